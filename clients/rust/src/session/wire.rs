//! A session's stream to one server. Commands go into its outbox, which tonic sends; one task receives.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tonic::codec::Streaming;

use super::{Shared, State};
use crate::capability::{STREAM_RESULT_REQUEST, required_by};
use crate::error::{Error, proto_duration};
use crate::pool::Server;
use crate::proto;
use crate::proto::result_event::Event;
use crate::proto::stream_result_request::Command;
use crate::result::duration;

const LOAD_INTERVAL: Duration = Duration::from_secs(1);

pub(super) struct Wire {
    pub(super) id: u64,
    pub(super) server: Arc<Server>,
    /// The server's process, once it has answered.
    pub(super) instance: String,
    pub(super) lease: Option<Duration>,
    /// The live requests, by their numbers there.
    pub(super) numbers: HashMap<u32, u64>,
    /// Those whose add or attach was not answered.
    pub(super) commands: HashMap<u64, u64>,
    /// The number of the last command.
    last: u64,
    /// The number of the open command; 0: none was sent.
    open: u64,
    /// None: the stream is half-closed.
    outbox: Option<UnboundedSender<proto::StreamResultRequest>>,
    /// Why open was refused.
    refused: Option<Error>,
}

/// The commands of a stream, as tonic takes them. Its end is the half-close.
struct Outbox(UnboundedReceiver<proto::StreamResultRequest>);

impl futures_core::Stream for Outbox {
    type Item = proto::StreamResultRequest;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx)
    }
}

impl Wire {
    /// Has a command sent, and returns its number.
    pub(super) fn send(&mut self, command: Command) -> u64 {
        self.last += 1;
        let mut message = proto::StreamResultRequest {
            command_id: self.last,
            command: Some(command),
            required_capabilities: Vec::new(),
        };
        if let Some(Command::Add(_)) = &message.command {
            message.required_capabilities = required_by(&message, STREAM_RESULT_REQUEST, &[]);
        }
        if let Some(outbox) = &self.outbox {
            let _ = outbox.send(message); // a stream that has ended is told as lost
        }
        self.last
    }

    pub(super) fn send_cancel(&mut self, id: &str, instance: &str) {
        let (request_id, instance_id) = (id.to_owned(), instance.to_owned());
        self.send(Command::Cancel(proto::CancelCommand { request_id, instance_id }));
    }

    pub(super) fn send_credit(&mut self, id: &str, tokens: u32) {
        self.send(Command::Credit(proto::CreditCommand { request_id: id.to_owned(), tokens }));
    }

    pub(super) fn is_refused(&self) -> bool {
        self.refused.is_some()
    }

    pub(super) fn half_close(&mut self) {
        self.outbox = None;
    }
}

impl State {
    /// The stream to a server.
    pub(super) fn wire_to(&mut self, shared: &Arc<Shared>, server: &Arc<Server>) -> &mut Wire {
        if !self.wires.contains_key(&server.id) {
            self.open_wire(shared, server);
        }
        self.wires.get_mut(&server.id).expect("it was opened")
    }

    fn open_wire(&mut self, shared: &Arc<Shared>, server: &Arc<Server>) {
        let (outbox, commands) = unbounded_channel();
        self.last_wire += 1;
        let mut wire = Wire {
            id: self.last_wire,
            server: Arc::clone(server),
            instance: String::new(),
            lease: None,
            numbers: HashMap::new(),
            commands: HashMap::new(),
            last: 0,
            open: 0,
            outbox: Some(outbox),
            refused: None,
        };
        let open = proto::OpenCommand {
            lease: shared.options.lease.map(proto_duration),
            initial_credit: shared.options.initial_credit,
            load_interval: shared.client.pool.many.then(|| proto_duration(LOAD_INTERVAL)),
        };
        if open != proto::OpenCommand::default() {
            wire.open = wire.send(Command::Open(open));
        }
        let id = wire.id;
        self.wires.insert(server.id, wire);
        self.end_orphans(shared, server.id);
        shared.client.pool.tasks.spawn(run(Arc::clone(shared), Arc::clone(server), id, Outbox(commands)));
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
