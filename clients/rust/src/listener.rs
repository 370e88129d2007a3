//! Who has requests at the servers for longer than a call.
//!
//! What passes through here: the pool and the tasks of its servers tell those above them, without knowing them, what
//! becomes of the servers and the client.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use crate::error::Error;

/// One of them. No lock of the pool's is held while it is told.
pub(crate) trait Listener: Send + Sync {
    /// A server has become ready.
    fn server_changed(self: Arc<Self>);

    /// Nothing goes on: what is left fails with this error.
    fn abort(self: Arc<Self>, error: &Error);
}

/// Those that there are, by numbers.
#[derive(Default)]
pub(crate) struct Listeners {
    known: HashMap<u64, Weak<dyn Listener>>,
    last: u64,
}

impl Listeners {
    /// Keeps a listener that is made for its number, until it is removed.
    pub(crate) fn add<L: Listener + 'static>(&mut self, made: impl FnOnce(u64) -> Arc<L>) -> Arc<L> {
        self.last += 1;
        let listener = made(self.last);
        self.known.insert(self.last, Arc::<L>::downgrade(&listener));
        listener
    }

    pub(crate) fn remove(&mut self, number: u64) {
        self.known.remove(&number);
    }

    pub(crate) fn all(&self) -> Vec<Arc<dyn Listener>> {
        self.known.values().filter_map(Weak::upgrade).collect()
    }
}
