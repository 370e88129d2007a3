//! What a session does after a while, for requests that wait: one task for all of them, as long as there is something.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::{Shared, State};
use crate::error::Error;
use crate::pool::Server;

/// What is to be done for a request, if nothing else has come of it by then.
pub(super) struct Timer {
    key: u64,
    turn: u64,
    act: Act,
}

pub(super) enum Act {
    Place,
    /// No server has become ready.
    GiveUp,
    AttachAt(Arc<Server>),
    AskNext(Error),
}

impl State {
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
            shared.client.pool.tasks.spawn(run(Arc::clone(shared)));
        } else if is_first {
            shared.sooner.notify_one();
        }
    }

    /// Does what is due; when to look again, if there is something to wait for.
    fn do_due(&mut self, shared: &Arc<Shared>) -> Option<Instant> {
        loop {
            let now = Instant::now();
            let Some(first) = self.timers.first_entry() else {
                self.clock_runs = false;
                return None;
            };
            if first.key().0 > now {
                return Some(first.key().0);
            }
            let Timer { key, turn, act } = first.remove();
            if self.live.get(&key).is_none_or(|entry| entry.turn != turn) {
                continue;
            }
            match act {
                Act::Place => self.place(shared, key, None),
                Act::GiveUp => {
                    let error = shared.client.pool.lock().nobody();
                    self.fail(shared, key, error);
                }
                Act::AttachAt(server) => self.attach_at(shared, &server, key),
                Act::AskNext(error) => self.ask_next(shared, key, &error),
            }
            self.settle(shared);
        }
    }
}

async fn run(shared: Arc<Shared>) {
    loop {
        let Some(next) = shared.lock().do_due(&shared) else { return };
        tokio::select! {
            () = sleep_until(next) => {}
            () = shared.sooner.notified() => {}
        }
    }
}
