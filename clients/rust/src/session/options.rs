//! How a session is set up.

use std::time::Duration;

/// How a session is set up. The default is a session without lease and credits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct SessionOptions {
    pub(super) lease: Option<Duration>,
    pub(super) initial_credit: u32,
    pub(super) room_timeout: Option<Duration>,
}

impl SessionOptions {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// How long requests go on, and their results are kept, after the connection was lost; the server may grant less. With
    /// a lease a lost session resumes by itself: what has output is attached again where it lives until the lease has
    /// passed, what has none is sent again. Without, the requests of a lost session end with `UNAVAILABLE`.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease).filter(|lease| !lease.is_zero());
        self
    }

    /// How many tokens of each request the server may send ahead of its reader; so a request that is not read takes no
    /// more memory than that. By default (and with 0) what is not read is kept here.
    pub fn initial_credit(mut self, tokens: u32) -> Self {
        self.initial_credit = tokens;
        self
    }

    /// For how long a request for which the server has no room is sent again, each time when the server said that it may
    /// have some. By default as long as it takes; zero: the first refusal is the request's error.
    pub fn room_timeout(mut self, limit: Duration) -> Self {
        self.room_timeout = Some(limit);
        self
    }
}
