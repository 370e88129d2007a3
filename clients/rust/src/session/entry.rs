//! A live request of a session, as the session sees it: where it is, and what came of it there.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::output::Output;
use super::wire::Wire;
use crate::placement::{PrefixKeys, keys_of};
use crate::pool::PATIENCE;
use crate::proto;

pub(super) const FIRST_REATTACH: Duration = Duration::from_millis(100);
const LONGEST_REATTACH: Duration = Duration::from_secs(1);

/// A live request.
pub(super) struct Entry {
    pub(super) output: Arc<Output>,
    /// What to send; none: another stream started it.
    pub(super) spec: Option<Box<proto::GenerationSpec>>,
    pub(super) keys: Option<PrefixKeys>,
    /// The server at which it is; none: it waits.
    pub(super) at: Option<u64>,
    /// By which its events there name it; 0: not known yet.
    pub(super) number: u32,
    /// The number of the command that brought it there.
    pub(super) command: u64,
    /// Whether it was attached there, not added.
    pub(super) attaching: bool,
    /// Whether everything that arrives is paid for at once.
    pub(super) unlimited: bool,
    pub(super) cancelled: bool,
    /// Whether it waits for a server to be ready.
    pub(super) wants_server: bool,
    /// Until when it is sent again for want of room; none: no bound.
    pub(super) give_up_at: Option<Instant>,
    /// The process that has it.
    pub(super) instance: String,
    /// How often it was sent again.
    pub(super) losses: u32,
    pub(super) reattached: u32,
    /// Until when the server that it was lost with may have it: how long its lease is.
    pub(super) lost_until: Instant,
    pub(super) asked: HashSet<u64>,
    /// The servers that have said that they lack its adapter.
    pub(super) lacking: HashSet<u64>,
    pub(super) ask_until: Instant,
    /// Grows when it is sent or begins to wait: what was to be done before is void.
    pub(super) turn: u64,
}

impl Entry {
    pub(super) fn new(output: Arc<Output>, spec: Option<proto::GenerationSpec>) -> Self {
        let now = Instant::now();
        Self {
            output,
            keys: spec.as_ref().and_then(keys_of),
            spec: spec.map(Box::new),
            at: None,
            number: 0,
            command: 0,
            attaching: false,
            unlimited: false,
            cancelled: false,
            wants_server: false,
            give_up_at: None,
            instance: String::new(),
            losses: 0,
            reattached: 0,
            lost_until: now,
            asked: HashSet::new(),
            lacking: HashSet::new(),
            ask_until: now + PATIENCE,
            turn: 0,
        }
    }

    /// Its stream was lost. If the server may have it, that is a new loss, with a lease of its own.
    pub(super) fn lost_with(&mut self, wire: &Wire) {
        let may_be_there = if self.attaching { self.reattached == 0 } else { !wire.instance.is_empty() };
        if self.number != 0 || may_be_there {
            self.reattached = 0;
            self.lost_until = self.lost_until.max(Instant::now() + wire.lease.unwrap_or_default());
        }
    }

    /// How long to wait before the server that was lost is tried again: 0.1 s, 0.2 s, … 1 s.
    pub(super) fn next_pause(&mut self) -> Duration {
        let pause = (FIRST_REATTACH * 2_u32.pow(self.reattached.min(4))).min(LONGEST_REATTACH);
        self.reattached += 1;
        pause
    }
}
