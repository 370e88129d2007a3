//! What a session knows of its requests, its streams and what waits.
//!
//! What passes through here: each request, from when it is registered to when it has left its stream and the session; each
//! stream when it opens; each timer when it is set. What streams' tasks and the clock do stands above this: they are
//! [started](Starts) by functions that come from there.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tonic::Code;

use super::entry::Entry;
use super::options::SessionOptions;
use super::output::Output;
use super::wire::{Outbox, Wire};
use crate::client::Inner;
use crate::error::{Error, proto_duration};
use crate::pool::Server;
use crate::proto;
use crate::trace::TraceContext;

const LOAD_INTERVAL: Duration = Duration::from_secs(1);

pub(super) struct Shared {
    pub(super) client: Arc<Inner>,
    pub(super) number: u64,
    pub(super) options: SessionOptions,
    /// Whether a lost request goes on by itself.
    pub(super) resumes: bool,
    /// Whether nothing counts as delivered before a request's end.
    pub(super) restarts: bool,
    pub(super) trace: Option<TraceContext>,
    pub(super) starts: Starts,
    pub(super) state: Mutex<State>,
    /// Whether nothing of it runs any more.
    pub(super) quiet: watch::Sender<bool>,
    /// Cuts all streams.
    pub(super) cut: watch::Sender<bool>,
    /// Told when the clock has an earlier timer.
    pub(super) sooner: Notify,
}

#[derive(Default)]
pub(super) struct State {
    /// The requests that have not ended, by their keys here.
    pub(super) live: HashMap<u64, Entry>,
    pub(super) ids: HashMap<String, u64>,
    pub(super) last_key: u64,
    /// By server.
    pub(super) wires: HashMap<u64, Wire>,
    pub(super) last_wire: u64,
    /// By instance: what was sent elsewhere since.
    pub(super) orphans: HashMap<String, HashSet<String>>,
    pub(super) timers: BTreeMap<(Instant, u64), Timer>,
    pub(super) last_timer: u64,
    pub(super) clock_runs: bool,
    /// Whether it takes no more requests.
    pub(super) closing: bool,
    /// Why it takes none, if it was lost or closed.
    pub(super) ended: Option<Error>,
}

/// How a session's tasks are started.
pub(super) struct Starts {
    /// That which receives from a stream, by the wire's number, and has its commands sent.
    pub(super) stream: fn(&Arc<Shared>, &Arc<Server>, u64, Outbox),
    pub(super) clock: fn(&Arc<Shared>),
}

/// What is to be done for a request, if nothing else has come of it by then.
pub(super) struct Timer {
    pub(super) key: u64,
    pub(super) turn: u64,
    pub(super) act: Act,
}

pub(super) enum Act {
    Place,
    /// No server has become ready.
    GiveUp,
    AttachAt(Arc<Server>),
    AskNext(Error),
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.client.pool.lock().listeners.remove(self.number);
    }
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) async fn until_quiet(&self) {
        let mut quiet = self.quiet.subscribe();
        let _ = quiet.wait_for(|is_quiet| *is_quiet).await; // the sender lives as long as this
    }
}

impl State {
    pub(super) fn keys(&self) -> Vec<u64> {
        self.live.keys().copied().collect()
    }

    /// Takes a request in.
    pub(super) fn register(&mut self, entry: Entry) -> Result<u64, Error> {
        let id = entry.output.id();
        if let Some(ended) = &self.ended {
            return Err(ended.copy_for(id));
        }
        if self.closing {
            return Err(Error::closed("the session").of(id));
        }
        if self.ids.contains_key(id) {
            return Err(Error::status(Code::AlreadyExists, format!("a request {id:?} is live on this session")).of(id));
        }
        self.last_key += 1;
        self.ids.insert(id.to_owned(), self.last_key);
        self.live.insert(self.last_key, entry);
        Ok(self.last_key)
    }

    /// Half-closes the streams once the session is being closed and no request is live, and notes when none is left. While
    /// a request is live, its credits or a cancel may still have to be sent.
    pub(super) fn settle(&mut self, shared: &Shared) {
        if !self.closing || !self.live.is_empty() {
            return;
        }
        for wire in self.wires.values_mut() {
            wire.half_close();
        }
        if self.wires.is_empty() {
            shared.quiet.send_replace(true);
        }
    }

    /// Ends a request with an error that is not the server's end of it.
    pub(super) fn fail(&mut self, shared: &Shared, key: u64, error: Error) {
        if let Some(entry) = self.live.get(&key) {
            let output = Arc::clone(&entry.output);
            self.forget(shared, key);
            output.close_with(Some(error.copy_for(output.id())));
        }
    }

    /// Drops an ended request.
    pub(super) fn forget(&mut self, shared: &Shared, key: u64) {
        self.leave(shared, key);
        if let Some(entry) = self.live.remove(&key) {
            self.ids.remove(entry.output.id());
        }
        self.settle(shared);
    }

    /// Takes a request from its stream.
    pub(super) fn leave(&mut self, shared: &Shared, key: u64) {
        let Some(entry) = self.live.get_mut(&key) else { return };
        let Some(at) = entry.at.take() else { return };
        if let Some(wire) = self.wires.get_mut(&at) {
            wire.commands.remove(&entry.command);
            wire.numbers.remove(&entry.number);
        }
        entry.number = 0;
        shared.client.pool.lock().over(at);
    }

    /// Asks for a request's end; it ends with what it has.
    pub(super) fn cancel(&mut self, shared: &Shared, key: u64) {
        let Some(entry) = self.live.get_mut(&key) else { return };
        entry.cancelled = true;
        match entry.at {
            None => {
                self.fail(
                    shared,
                    key,
                    Error::status(Code::Cancelled, "it was cancelled while it waited to be sent again"),
                );
            }
            Some(at) => {
                let id = entry.output.id().to_owned();
                if let Some(wire) = self.wires.get_mut(&at) {
                    wire.send_cancel(&id, "");
                }
                self.pay_all(shared, key); // its end, too, comes behind its last token
            }
        }
    }

    /// Lets the server send as many more tokens as the reader took of what came by this stream.
    pub(super) fn pay(&mut self, shared: &Shared, key: u64, wire: u64, tokens: u32) {
        let Some(entry) = self.live.get(&key) else { return };
        let to = entry.at.and_then(|at| self.wires.get_mut(&at)).filter(|to| to.id == wire);
        if let (Some(to), true) = (to, shared.options.initial_credit > 0 && tokens > 0) {
            to.send_credit(entry.output.id(), tokens);
        }
    }

    /// Pays for all that has arrived and will arrive.
    pub(super) fn pay_all(&mut self, shared: &Shared, key: u64) {
        let Some(entry) = self.live.get_mut(&key) else { return };
        if shared.options.initial_credit == 0 || entry.unlimited {
            return;
        }
        entry.unlimited = true;
        let Some(wire) = entry.at.and_then(|at| self.wires.get(&at)) else { return };
        let (id, owed) = (wire.id, entry.output.take_owed(wire.id));
        self.pay(shared, key, id, owed);
    }

    /// Which server a wire goes to, for messages of the state's own.
    pub(super) fn server_of(&self, at: u64) -> Option<Arc<Server>> {
        self.wires.get(&at).map(|wire| Arc::clone(&wire.server))
    }

    /// The key of a request, while it is live here.
    pub(super) fn key_of(&self, output: &Arc<Output>) -> Option<u64> {
        let key = *self.ids.get(output.id())?;
        self.live.get(&key).filter(|entry| Arc::ptr_eq(&entry.output, output)).map(|_| key)
    }

    /// The stream to a server; it opens with its first request.
    pub(super) fn wire_to(&mut self, shared: &Arc<Shared>, server: &Arc<Server>) -> &mut Wire {
        if !self.wires.contains_key(&server.id) {
            let open = proto::OpenCommand {
                lease: shared.options.lease.map(proto_duration),
                initial_credit: shared.options.initial_credit,
                load_interval: shared.client.pool.many.then(|| proto_duration(LOAD_INTERVAL)),
            };
            self.last_wire += 1;
            let (wire, outbox) = Wire::new(self.last_wire, server, open);
            self.wires.insert(server.id, wire);
            self.end_orphans(shared, server.id);
            (shared.starts.stream)(shared, server, self.last_wire, outbox);
        }
        self.wires.get_mut(&server.id).expect("it was opened")
    }

    /// Cancels what runs at a server for nobody: its request has ended elsewhere.
    pub(super) fn end_orphans(&mut self, shared: &Shared, at: u64) {
        let instance = shared.client.pool.lock().entry(at).map(|entry| entry.instance.clone()).unwrap_or_default();
        let (Some(orphans), Some(wire)) = (self.orphans.get_mut(&instance), self.wires.get_mut(&at)) else { return };
        let ids = &self.ids;
        orphans.retain(|id| {
            let is_live = ids.contains_key(id);
            if !is_live {
                wire.send_cancel(id, &instance);
            }
            is_live
        });
    }

    /// Does something for a request after a while.
    pub(super) fn later(&mut self, shared: &Arc<Shared>, key: u64, after: Duration, act: Act) {
        let Some(entry) = self.live.get_mut(&key) else { return };
        entry.turn += 1;
        self.last_timer += 1;
        let at = (Instant::now() + after, self.last_timer);
        let is_first = self.timers.first_key_value().is_none_or(|(first, _)| at < *first);
        self.timers.insert(at, Timer { key, turn: entry.turn, act });
        if !self.clock_runs {
            self.clock_runs = true;
            (shared.starts.clock)(shared);
        } else if is_first {
            shared.sooner.notify_one();
        }
    }
}
