//! A session's stream to one server, as its commands go there.
//!
//! What passes through here: commands go, numbered, into the outbox, which tonic sends.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::capability::{STREAM_RESULT_REQUEST, required_by};
use crate::error::Error;
use crate::pool::Server;
use crate::proto;
use crate::proto::stream_result_request::Command;

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
    pub(super) open: u64,
    /// None: the stream is half-closed.
    outbox: Option<UnboundedSender<proto::StreamResultRequest>>,
    /// Why open was refused.
    pub(super) refused: Option<Error>,
}

/// The commands of a stream, as tonic takes them. Its end is the half-close.
pub(super) struct Outbox(UnboundedReceiver<proto::StreamResultRequest>);

impl futures_core::Stream for Outbox {
    type Item = proto::StreamResultRequest;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx)
    }
}

impl Wire {
    /// A stream, and what is to be sent by it.
    pub(super) fn new(id: u64, server: &Arc<Server>, open: proto::OpenCommand) -> (Self, Outbox) {
        let (outbox, commands) = unbounded_channel();
        let mut wire = Self {
            id,
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
        if open != proto::OpenCommand::default() {
            wire.open = wire.send(Command::Open(open));
        }
        (wire, Outbox(commands))
    }

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
