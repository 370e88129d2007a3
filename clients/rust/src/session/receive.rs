//! What comes by a session's streams.
//!
//! What passes through here: one task for each stream has its commands sent, takes messages, and gives each event to its
//! request's output; refusals, ends and the stream's loss go to `moves`.

use std::sync::Arc;

use tonic::codec::Streaming;

use super::state::{Shared, State};
use super::wire::Outbox;
use crate::error::Error;
use crate::pool::Server;
use crate::proto;
use crate::proto::result_event::Event;
use crate::result::duration;

/// Starts a stream's task.
pub(super) fn start(shared: &Arc<Shared>, server: &Arc<Server>, wire: u64, outbox: Outbox) {
    shared.client.pool.tasks.spawn(run(Arc::clone(shared), Arc::clone(server), wire, outbox));
}

impl State {
    /// Takes one message; false: the stream is of no use.
    fn receive(&mut self, shared: &Arc<Shared>, at: u64, message: proto::StreamResultResponse) -> bool {
        self.note_server(shared, at, &message);
        let Some(wire) = self.wires.get_mut(&at) else { return false };
        if let Some(opened) = message.opened {
            wire.lease = opened.lease.and_then(duration);
        }
        for rejection in message.rejections {
            let Some(wire) = self.wires.get_mut(&at) else { return false };
            let error = Error::from_rpc(&rejection.status.unwrap_or_default());
            if rejection.command_id != 0 && rejection.command_id == wire.open {
                wire.refused = Some(error);
                return false;
            }
            // Else of a cancel or a credit whose request has just ended.
            if let Some(&key) = wire.commands.get(&rejection.command_id) {
                self.refused(shared, at, key, error);
            }
        }
        for detached in message.detached {
            let key = self.wires.get(&at).and_then(|wire| wire.numbers.get(&detached.request_number)).copied();
            if let Some(key) = key {
                let id = self.live.get(&key).map(|entry| entry.output.id().to_owned()).unwrap_or_default();
                self.fail(shared, key, Error::moved(&id));
            }
        }
        for attached in message.attached {
            let key = self.wires.get(&at).and_then(|wire| wire.commands.get(&attached.command_id)).copied();
            if let Some(key) = key {
                self.number(shared, at, key, attached.request_number);
            }
        }
        for event in message.events {
            self.take(shared, at, event);
        }
        true
    }

    fn note_server(&mut self, shared: &Shared, at: u64, message: &proto::StreamResultResponse) {
        if message.instance_id.is_empty() && message.load.is_none() {
            return;
        }
        let mut pool = shared.client.pool.lock();
        if !message.instance_id.is_empty() {
            if let Some(wire) = self.wires.get_mut(&at) {
                wire.instance.clone_from(&message.instance_id);
            }
            if let Some(entry) = pool.entry(at) {
                entry.instance.clone_from(&message.instance_id);
            }
        }
        if let Some(load) = &message.load {
            pool.take_load(at, load);
        }
    }

    /// Notes by which number the server calls a request; it is there.
    fn number(&mut self, shared: &Shared, at: u64, key: u64, number: u32) {
        let (Some(wire), Some(entry)) = (self.wires.get_mut(&at), self.live.get_mut(&key)) else { return };
        wire.commands.remove(&entry.command);
        entry.number = number;
        wire.numbers.insert(number, key);
        if entry.instance != wire.instance {
            entry.instance.clone_from(&wire.instance);
            shared.client.pool.lock().note_owner(entry.output.id(), &wire.instance);
        }
    }

    fn take(&mut self, shared: &Arc<Shared>, at: u64, event: proto::ResultEvent) {
        if let Some(Event::Accepted(accepted)) = &event.event
            && let Some(&key) = self.ids.get(&accepted.request_id)
            && self.live.get(&key).is_some_and(|entry| entry.at == Some(at) && entry.number == 0)
        {
            self.number(shared, at, key, event.request_number);
        }
        let Some(wire) = self.wires.get(&at) else { return };
        // None: of a request that failed here before its last events came.
        let Some(&key) = wire.numbers.get(&event.request_number) else { return };
        let Some(entry) = self.live.get(&key) else { return };
        let has_failed = matches!(event.event, Some(Event::Failed(_)));
        let (id, credits) = (wire.id, shared.options.initial_credit > 0);
        let (is_over, owed) = entry.output.take(event, &wire.instance, credits.then_some(id), entry.unlimited);
        if owed > 0 {
            self.pay(shared, key, id, owed);
        }
        if is_over {
            self.over(shared, at, key, has_failed);
        }
    }
}

/// Holds a stream from its opening to its end.
async fn run(shared: Arc<Shared>, server: Arc<Server>, wire: u64, outbox: Outbox) {
    let mut cut = shared.cut.subscribe();
    let told = tokio::select! {
        told = hold(&shared, &server, wire, outbox) => told,
        _ = cut.wait_for(|is_cut| *is_cut) => return, // who has cut it sees to the rest
    };
    let mut state = shared.lock();
    let is_it = state.wires.get(&server.id).is_some_and(|known| known.id == wire);
    if is_it && let Some(wire) = state.wires.remove(&server.id) {
        let refused = wire.refused.clone();
        state.lost(&shared, wire, refused.or(told.err()));
    }
}

async fn hold(shared: &Arc<Shared>, server: &Arc<Server>, wire: u64, outbox: Outbox) -> Result<(), Error> {
    let failed = |status: tonic::Status| Error::from_call(&status, &server.name());
    let request = shared.client.pool.settings.outgoing(outbox, shared.trace.as_ref())?;
    let answer = server.connection.generation().stream_result(request).await;
    let mut messages: Streaming<proto::StreamResultResponse> = answer.map_err(failed)?.into_inner();
    while let Some(message) = messages.message().await.map_err(failed)? {
        let mut state = shared.lock();
        if state.wires.get(&server.id).is_none_or(|known| known.id != wire) {
            return Ok(());
        }
        if !state.receive(shared, server.id, message) {
            return Ok(());
        }
    }
    Ok(())
}
