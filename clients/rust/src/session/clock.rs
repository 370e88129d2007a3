//! What a session does after a while, for requests that wait: one task for all of them, as long as there is something.
//!
//! What passes through here: timers that are due go to `moves`.

use std::sync::Arc;

use tokio::time::{Instant, sleep_until};

use super::state::{Act, Shared, State, Timer};

/// Starts the task.
pub(super) fn start(shared: &Arc<Shared>) {
    shared.client.pool.tasks.spawn(run(Arc::clone(shared)));
}

impl State {
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
