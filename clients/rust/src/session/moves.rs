//! Where a session's requests go, and what becomes of them when their server refuses them or is lost: docs/clients.md and
//! docs/fleet.md have the rules. The session's lock is held in all of these.
//!
//! What passes through here: a request goes to a wire, or waits in the clock; what came of it, and what is due, comes back
//! from `receive` and `clock`.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tonic::Code;

use super::entry::FIRST_REATTACH;
use super::state::{Act, Shared, State};
use super::wire::Wire;
use crate::call::pause_after;
use crate::error::{ADAPTER_NOT_LOADED, Error, ErrorKind, WRONG_INSTANCE};
use crate::pool::{PATIENCE, Server, Servers};
use crate::proto;
use crate::proto::stream_result_request::Command;
use crate::request::random;

/// How often a request is sent again because its server was lost or not ready.
const MOST_LOSSES: u32 = 5;
/// The same of a batch's, which has twelve tries.
const MOST_BATCH_LOSSES: u32 = 11;

impl Shared {
    fn most_tries(&self) -> u32 {
        if self.restarts { MOST_BATCH_LOSSES } else { MOST_LOSSES }
    }
}

impl State {
    /// Sends a request to a server, or has it wait for one.
    pub(super) fn place(&mut self, shared: &Arc<Shared>, key: u64, avoid: Option<u64>) {
        let Some(entry) = self.live.get_mut(&key) else { return };
        let avoided: HashSet<u64> = avoid.into_iter().collect();
        let mut pool = shared.client.pool.lock();
        let mut room_in = None;
        let mut chosen = pool.choose(entry.keys.as_ref(), &avoided, &entry.lacking, false);
        if chosen.is_none() {
            room_in = pool.room_in(&entry.lacking);
            let is_too_late = |wait| entry.give_up_at.is_some_and(|until| Instant::now() + wait > until);
            if room_in.is_some_and(is_too_late) {
                chosen = pool.choose(entry.keys.as_ref(), &avoided, &entry.lacking, true);
            }
        }
        if let Some(server) = &chosen {
            pool.begun(server.id);
        }
        drop(pool);
        match (chosen, room_in) {
            (Some(server), _) => self.send_to(shared, &server, key),
            (None, Some(wait)) => self.wait(shared, key, wait),
            (None, None) if !entry.wants_server => {
                entry.wants_server = true;
                let left = entry.lost_until.saturating_duration_since(Instant::now());
                self.later(shared, key, PATIENCE.max(left), Act::GiveUp);
            }
            (None, None) => {}
        }
    }

    fn send_to(&mut self, shared: &Arc<Shared>, server: &Arc<Server>, key: u64) {
        let Some(entry) = self.live.get_mut(&key) else { return };
        (entry.attaching, entry.wants_server, entry.at) = (false, false, Some(server.id));
        entry.instance.clear();
        entry.turn += 1;
        let spec = entry.spec.as_deref().cloned();
        let wire = self.wire_to(shared, server);
        let command = wire.send(Command::Add(proto::AddCommand { spec }));
        wire.commands.insert(command, key);
        self.live.entry(key).and_modify(|entry| entry.command = command);
    }

    /// Continues a request at the server that has it, as far as that is known.
    pub(super) fn attach(&mut self, shared: &Arc<Shared>, key: u64) {
        let Some(entry) = self.live.get_mut(&key) else { return };
        let pool = shared.client.pool.lock();
        entry.instance = pool.owner(entry.output.id());
        let found = if pool.many { pool.by_instance(&entry.instance) } else { pool.reachable() };
        drop(pool);
        match found.first() {
            Some(server) => self.attach_at(shared, server, key),
            None => {
                entry.instance.clear();
                let told = format!("no server has request {:?}", entry.output.id());
                self.ask_next(shared, key, &Error::status(Code::NotFound, told));
            }
        }
    }

    /// Continues a request at a server.
    pub(super) fn attach_at(&mut self, shared: &Arc<Shared>, server: &Arc<Server>, key: u64) {
        let Some(entry) = self.live.get_mut(&key) else { return };
        shared.client.pool.lock().begun(server.id);
        (entry.attaching, entry.at) = (true, Some(server.id));
        entry.turn += 1;
        let (id, cancelled) = (entry.output.id().to_owned(), entry.cancelled);
        let attach = proto::AttachCommand {
            request_id: id.clone(),
            from_seq: entry.output.lock().fold.next,
            instance_id: entry.instance.clone(),
        };
        let wire = self.wire_to(shared, server);
        let command = wire.send(Command::Attach(attach));
        wire.commands.insert(command, key);
        if cancelled {
            wire.send_cancel(&id, "");
        }
        self.live.entry(key).and_modify(|entry| entry.command = command);
    }

    /// Places a request after a while.
    fn wait(&mut self, shared: &Arc<Shared>, key: u64, pause: Duration) {
        self.live.entry(key).and_modify(|entry| entry.wants_server = false);
        self.later(shared, key, pause, Act::Place);
    }

    /// Ends a request whose end has arrived, unless its server failed before it had delivered anything.
    pub(super) fn over(&mut self, shared: &Arc<Shared>, at: u64, key: u64, was_told: bool) {
        let Some(entry) = self.live.get_mut(&key) else { return };
        let output = Arc::clone(&entry.output);
        let (error, begun) = {
            let told = output.lock();
            (told.fold.error.clone(), told.fold.has_begun && !shared.restarts)
        };
        {
            let mut pool = shared.client.pool.lock();
            if error.is_none() {
                pool.budget.succeeded();
            }
            pool.ended_alone(output.id());
        }
        if let Some(error) = &error {
            let is_ours = entry.spec.is_some();
            let may_again = is_ours && !begun && !entry.cancelled && entry.losses < shared.most_tries();
            if shared.resumes && was_told && error.code() == Code::Unavailable && may_again {
                self.leave(shared, key);
                output.restart();
                self.send_again(shared, key, at, error);
                return;
            }
            // The contract was broken: do not let it run for nobody.
            if !was_told
                && is_ours
                && let Some(wire) = self.wires.get_mut(&at)
            {
                wire.send_cancel(output.id(), "");
            }
        }
        let losses = self.live.get(&key).map_or(0, |entry| entry.losses);
        self.forget(shared, key);
        if losses > 0 {
            if let Some(wire) = self.wires.get(&at)
                && let Some(orphans) = self.orphans.get_mut(&wire.instance)
            {
                orphans.remove(output.id());
            }
            let servers: Vec<u64> = self.wires.keys().copied().collect();
            servers.into_iter().for_each(|server| self.end_orphans(shared, server));
        }
        output.close_with(None);
    }

    /// Decides what becomes of a request that a server refused.
    pub(super) fn refused(&mut self, shared: &Arc<Shared>, at: u64, key: u64, error: Error) {
        let Some(server) = self.server_of(at) else { return };
        self.leave(shared, key);
        let Some(entry) = self.live.get(&key) else { return };
        let may_wait = error.retry_after().is_some() && shared.options.room_timeout != Some(Duration::ZERO);
        let moves_on = (shared.client.pool.many || shared.restarts) && entry.losses < shared.most_tries();
        match error.code() {
            _ if entry.attaching => self.not_attached(shared, &server, key, error),
            _ if entry.cancelled && error.is_worth_a_retry() => {
                self.fail(shared, key, Error::status(Code::Cancelled, "it was cancelled before a server had room"));
            }
            Code::AlreadyExists if entry.losses > 0 => self.attach_at(shared, &server, key), // it had arrived after all
            Code::ResourceExhausted if may_wait => self.find_room(shared, at, key, error),
            _ if error.reason() == ADAPTER_NOT_LOADED && !entry.cancelled => self.find_adapter(shared, at, key, error),
            Code::Unavailable if moves_on => self.send_again(shared, key, at, &error),
            _ => self.fail(shared, key, error),
        }
    }

    /// Sends a request elsewhere, or again when its server may have room.
    fn find_room(&mut self, shared: &Arc<Shared>, at: u64, key: u64, error: Error) {
        let Some(entry) = self.live.get(&key) else { return };
        let advice = error.retry_after().unwrap_or_default();
        let pool = &shared.client.pool;
        if pool.many {
            pool.note_failure(at, &error);
            let mut state = pool.lock();
            let choose =
                |state: &mut Servers| state.choose(entry.keys.as_ref(), &HashSet::from([at]), &entry.lacking, false);
            let other = state.budget.failed().then(|| choose(&mut state));
            drop(state);
            if other.flatten().is_some_and(|other| other.id != at) {
                return self.place(shared, key, Some(at));
            }
        }
        if entry.give_up_at.is_some_and(|until| Instant::now() + advice > until) {
            self.fail(shared, key, error);
        } else {
            self.wait(shared, key, advice);
        }
    }

    /// Sends a request at once to a server that has not said that it lacks the adapter; each is asked once.
    fn find_adapter(&mut self, shared: &Arc<Shared>, at: u64, key: u64, error: Error) {
        let Some(entry) = self.live.get_mut(&key) else { return };
        entry.lacking.insert(at);
        let is_another_ready = shared.client.pool.lock().room_in(&entry.lacking).is_some();
        if is_another_ready {
            self.place(shared, key, None);
        } else {
            self.fail(shared, key, error);
        }
    }

    /// Takes a stream's end; no error: the server ended it in order.
    pub(super) fn lost(&mut self, shared: &Arc<Shared>, wire: Wire, told: Option<Error>) {
        let at = wire.server.id;
        let was_refused = wire.is_refused();
        let was_told = told.is_some();
        let in_order = || Error::status(Code::Unavailable, "the server ended the session before its requests");
        let error = told.unwrap_or_else(in_order);
        let is_loss = error.is_loss() && !was_refused;
        if is_loss && !self.closing {
            shared.client.pool.set_aside(at, &error);
        }
        let error = error.of_stream();
        if self.ended.is_none() && (!shared.resumes || was_refused) && (was_told || !self.closing) {
            self.ended = Some(error.clone());
        }
        let moved: Vec<u64> = self.live.iter().filter(|(_, entry)| entry.at == Some(at)).map(|(key, _)| *key).collect();
        for key in moved {
            if let Some(entry) = self.live.get_mut(&key) {
                entry.lost_with(&wire);
            }
            self.leave(shared, key);
            if is_loss && shared.resumes {
                self.go_on(shared, &wire, key, &error);
            } else {
                self.fail(shared, key, error.clone());
            }
        }
        self.settle(shared);
    }

    /// Decides what becomes of a request whose stream was lost.
    fn go_on(&mut self, shared: &Arc<Shared>, wire: &Wire, key: u64, error: &Error) {
        let Some(entry) = self.live.get(&key) else { return };
        let output = Arc::clone(&entry.output);
        let begun = output.has_begun() && !shared.restarts;
        let may_wait = entry.spec.is_some() && !begun && !entry.cancelled && !shared.client.pool.many;
        if may_wait && wire.instance.is_empty() && Instant::now() < entry.lost_until {
            self.wait_for_its_server(shared, key); // which was not reached, and may have it: that was no try
        } else if entry.spec.is_none() || begun || entry.losses >= shared.most_tries() {
            self.reattach(shared, wire, key, error);
        } else if entry.cancelled {
            self.fail(shared, key, Error::status(Code::Cancelled, "it was cancelled, and its server was lost"));
        } else {
            if shared.options.lease.is_some() && !wire.instance.is_empty() {
                // It may run on there.
                self.orphans.entry(wire.instance.clone()).or_default().insert(output.id().to_owned());
            }
            output.restart();
            self.send_again(shared, key, wire.server.id, error);
        }
    }

    /// Sends a request once more: elsewhere at once, if the budget allows it, else after a pause.
    fn send_again(&mut self, shared: &Arc<Shared>, key: u64, avoid: u64, error: &Error) {
        let Some(entry) = self.live.get_mut(&key) else { return };
        entry.losses += 1;
        let losses = entry.losses;
        let pool = &shared.client.pool;
        pool.set_aside(avoid, error);
        let may_now = pool.lock().budget.failed() && pool.many;
        if may_now {
            return self.place(shared, key, Some(avoid));
        }
        let spread = || {
            let pause = if pool.many { Duration::from_secs(1) } else { pause_after(losses - 1) };
            pause.mul_f64(0.5 + random())
        };
        self.wait(shared, key, error.retry_after().unwrap_or_else(spread));
    }

    /// Sends a request once more to its only server, which could not be reached.
    fn wait_for_its_server(&mut self, shared: &Arc<Shared>, key: u64) {
        let Some(entry) = self.live.get_mut(&key) else { return };
        let pause = entry.next_pause();
        self.wait(shared, key, pause);
    }

    /// Attaches a request again where it lives, until its lease has passed.
    fn reattach(&mut self, shared: &Arc<Shared>, wire: &Wire, key: u64, error: &Error) {
        let Some(entry) = self.live.get_mut(&key) else { return };
        let pause = entry.next_pause();
        if entry.instance.is_empty() || Instant::now() + pause > entry.lost_until {
            self.fail(shared, key, error.clone());
        } else {
            self.later(shared, key, pause, Act::AttachAt(Arc::clone(&wire.server)));
        }
    }

    /// Decides what becomes of a request that a server did not attach.
    fn not_attached(&mut self, shared: &Arc<Shared>, server: &Arc<Server>, key: u64, error: Error) {
        let Some(entry) = self.live.get_mut(&key) else { return };
        let is_ours = entry.spec.is_some();
        if shared.client.pool.many && !is_ours && entry.instance.is_empty() && error.code() == Code::NotFound {
            entry.asked.insert(server.id);
            return self.ask_next(shared, key, &error);
        }
        if error.reason() == WRONG_INSTANCE && entry.asked.insert(server.id) {
            let mut pool = shared.client.pool.lock();
            if let Some(known) = pool.entry(server.id) {
                known.instance = error.metadata().get("instance_id").cloned().unwrap_or_default();
            }
            let found = pool.by_instance(&entry.instance);
            drop(pool);
            if let (Some(other), 1) = (found.first(), entry.asked.len()) {
                return self.attach_at(shared, other, key); // followed once
            }
        }
        if !is_ours || error.code() != Code::NotFound {
            self.fail(shared, key, error);
        } else if !entry.output.has_begun() && entry.losses < shared.most_tries() {
            entry.output.restart();
            self.send_again(shared, key, server.id, &error);
        } else {
            let told = "the server that had the request was lost, and it with it";
            self.fail(shared, key, Error::new(ErrorKind::Status, Code::Unavailable, told));
        }
    }

    /// Attaches a request at the next server that may have it.
    pub(super) fn ask_next(&mut self, shared: &Arc<Shared>, key: u64, error: &Error) {
        let Some(entry) = self.live.get(&key) else { return };
        let pool = shared.client.pool.lock();
        let next = pool.reachable().into_iter().find(|server| !entry.asked.contains(&server.id));
        let is_settled = pool.is_settled();
        drop(pool);
        match next {
            Some(server) => self.attach_at(shared, &server, key),
            None if is_settled || Instant::now() > entry.ask_until => self.fail(shared, key, error.clone()),
            None => self.later(shared, key, FIRST_REATTACH, Act::AskNext(error.clone())),
        }
    }
}
