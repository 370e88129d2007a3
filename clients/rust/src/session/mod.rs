//! Sessions: many requests on one stream.
//!
//! What passes through here: a request is [submitted](Session::submit) and becomes an [`Entry`] of the session's [`state`],
//! which `moves` sends to a server by a `wire` (a stream to one server, opened with its first request). The wire's task
//! ([`receive`]) gives each event to its request's `output`, which a reader of its [`Handle`] polls. What waits (for room,
//! for a server, to be attached again) waits in the session's one [`clock`]. So a request costs no task.
//!
//! The way down is: session, `receive` and `clock`, `moves`, `state`. The state starts tasks without knowing them, and the
//! pool below tells a session that a server is ready, or that the client is closed, as one of its listeners.
//!
//! Locks are taken in the order session, handle, pool.

mod clock;
mod entry;
mod handle;
mod moves;
mod options;
mod output;
mod receive;
mod state;
mod wire;

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout};
use tonic::Code;

pub use handle::Handle;
pub use options::SessionOptions;
pub(crate) use output::{Ended, Output};

use crate::client::Client;
use crate::error::Error;
use crate::fold::Fold;
use crate::listener::Listener;
use crate::request::{Request, choices_of, size_of};
use crate::trace::label;
use entry::Entry;
use state::{Shared, Starts};

/// What a command has beside its request, with the names of the most capabilities that one may need.
const COMMAND_BYTES: usize = 4096;
/// How long a close that cancels waits for the servers' answers.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);

/// Many requests on one stream (one for each server, if there are several). It has a task for each stream, and none for a
/// request. A request that is not read delays no other.
///
/// End it with [`finish`](Self::finish), or with [`close`](Self::close), which cancels. Dropping it cancels too, without
/// waiting for the ends.
///
/// ```no_run
/// # async fn example(client: headrace::Client) -> Result<(), headrace::Error> {
/// use headrace::{Request, SessionOptions};
/// use std::time::Duration;
///
/// let session = client.session(SessionOptions::new().lease(Duration::from_secs(30)))?;
/// let poem = session.submit(Request::text("A poem:").max_tokens(64))?;
/// let recipe = session.submit(Request::text("A recipe:").max_tokens(64))?;
/// while let Some(chunk) = poem.next().await {
///     print!("{}", chunk?.text);
/// }
/// println!("{}", recipe.result().await?.text());
/// session.finish().await
/// # }
/// ```
pub struct Session {
    shared: Arc<Shared>,
}

impl Client {
    /// Opens a session. It does not wait for the server: the stream opens with the first request.
    ///
    /// # Errors
    ///
    /// The client was closed.
    pub fn session(&self, options: SessionOptions) -> Result<Session, Error> {
        self.open_session(options, false)
    }

    pub(crate) fn open_session(&self, options: SessionOptions, restarts: bool) -> Result<Session, Error> {
        let pool = &self.inner.pool;
        let trace = pool.settings.tracer.now();
        let shared = pool.listen(|number| {
            Arc::new(Shared {
                client: Arc::clone(&self.inner),
                number,
                resumes: options.lease.is_some() || pool.many,
                options,
                restarts,
                trace,
                starts: Starts { stream: receive::start, clock: clock::start },
                state: Mutex::default(),
                quiet: watch::Sender::new(false),
                cut: watch::Sender::new(false),
                sooner: Notify::new(),
            })
        })?;
        Ok(Session { shared })
    }
}

impl Session {
    /// Starts a request, and returns without waiting for the server. What the server refuses is told by the handle.
    ///
    /// # Errors
    ///
    /// The request cannot be sent, its id is live on this session, or the session was closed, or lost without a lease.
    pub fn submit(&self, request: impl Into<Request>) -> Result<Handle, Error> {
        let output = self.begin(request.into(), Ended::default())?;
        Ok(Handle::new(&self.shared, output))
    }

    pub(crate) fn begin(&self, request: Request, ended: Ended) -> Result<Arc<Output>, Error> {
        let shared = &self.shared;
        let mut spec = request.build()?;
        label(shared.client.pool.settings.tracer.now(), &mut spec);
        let (size, most) = (size_of(&spec) + COMMAND_BYTES, shared.client.pool.settings.max_message_bytes);
        if size > most {
            // The stream would end for it.
            let told = format!("the request takes {size} bytes, and messages may have {most}; see max_message_bytes");
            return Err(Error::status(Code::ResourceExhausted, told).of(&spec.request_id));
        }
        let output = Output::new(Fold::new(spec.request_id.clone(), choices_of(&spec), 1), ended);
        let mut entry = Entry::new(Arc::clone(&output), Some(spec));
        let room = shared.options.room_timeout.filter(|limit| !limit.is_zero());
        entry.give_up_at = room.map(|limit| Instant::now() + limit);
        let mut state = shared.lock();
        let key = state.register(entry)?;
        state.place(shared, key, None);
        state.settle(shared);
        Ok(output)
    }

    /// Continues a request of another session, or of [`Client::add`], on this one, from its first event.
    ///
    /// # Errors
    ///
    /// Its id is live on this session, or the session has ended.
    pub fn attach(&self, request_id: impl Into<String>) -> Result<Handle, Error> {
        self.attach_fold(Fold::new(request_id, 0, 1))
    }

    /// The same from the event of that number on: the handle has only what follows. Event 1 tells how many choices the
    /// request has; where that does not come again, it has to be said.
    ///
    /// # Errors
    ///
    /// As those of [`attach`](Self::attach).
    pub fn attach_from(&self, request_id: impl Into<String>, from: u64, choices: usize) -> Result<Handle, Error> {
        if from > 1 && choices == 0 {
            let told = "are needed: event 1 tells them, which does not come again from there";
            return Err(Error::invalid("choices", told));
        }
        self.attach_fold(Fold::new(request_id, choices, from))
    }

    /// Continues a request whose session was lost, on this one, where its handle left off. The new handle has all output
    /// from the beginning. If the end had arrived, it has that too, and nothing is sent.
    ///
    /// # Errors
    ///
    /// Its id is live on this session, or the session has ended.
    pub fn resume(&self, lost: &Handle) -> Result<Handle, Error> {
        let output = lost.output().reopened();
        if output.is_closed() {
            return Ok(Handle::new(&self.shared, output));
        }
        self.attach_output(output)
    }

    fn attach_fold(&self, fold: Fold) -> Result<Handle, Error> {
        self.attach_output(Output::new(fold, Ended::default()))
    }

    fn attach_output(&self, output: Arc<Output>) -> Result<Handle, Error> {
        let shared = &self.shared;
        let mut state = shared.lock();
        let key = state.register(Entry::new(Arc::clone(&output), None))?;
        state.attach(shared, key);
        state.settle(shared);
        drop(state);
        Ok(Handle::new(shared, output))
    }

    /// How many requests have not ended.
    pub fn live(&self) -> usize {
        self.shared.lock().live.len()
    }

    /// The lease that the server granted; of several servers, the shortest. `None`: none has answered yet, or the session
    /// asked for none.
    pub fn lease(&self) -> Option<Duration> {
        self.shared.lock().wires.values().filter_map(|wire| wire.lease).min()
    }

    /// Takes no more requests and waits until the live ones have ended; they need no reader for that. Then the session has
    /// ended. If the future is dropped, the live requests go on: wait again, or close.
    ///
    /// # Errors
    ///
    /// Never for a request's sake: handles tell what came of them. The error is that of the session, if it was lost.
    pub async fn finish(&self) -> Result<(), Error> {
        let ended = {
            let mut state = self.shared.lock();
            state.closing = true;
            for key in state.keys() {
                state.pay_all(&self.shared, key);
            }
            state.settle(&self.shared);
            state.ended.clone()
        };
        self.shared.until_quiet().await;
        self.shared.client.pool.lock().listeners.remove(self.shared.number);
        ended.map_or(Ok(()), Err)
    }

    /// Cancels the live requests, waits for their ends, at most 5 s, and ends the session. After [`finish`](Self::finish)
    /// it does nothing.
    pub async fn close(&self) {
        self.shared.cancel_all();
        self.shared.end_soon().await;
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if *self.shared.quiet.borrow() {
            return;
        }
        self.shared.cancel_all();
        if !*self.shared.quiet.borrow() {
            let shared = Arc::clone(&self.shared);
            self.shared.client.pool.tasks.spawn(async move { shared.end_soon().await });
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("live", &self.live()).finish_non_exhaustive()
    }
}

impl Shared {
    fn cancel_all(self: &Arc<Self>) {
        let mut state = self.lock();
        state.closing = true;
        for key in state.keys() {
            state.cancel(self, key);
        }
        state.settle(self);
    }

    async fn end_soon(self: &Arc<Self>) {
        if timeout(CLOSE_PATIENCE, self.until_quiet()).await.is_err() {
            Arc::clone(self).abort(&Error::closed("the session"));
            self.until_quiet().await;
        }
        self.client.pool.lock().listeners.remove(self.number);
    }
}

impl Listener for Shared {
    /// Has requests that wait for a server look again.
    fn server_changed(self: Arc<Self>) {
        let mut state = self.lock();
        for key in state.keys() {
            if state.live.get(&key).is_some_and(|entry| entry.wants_server) {
                state.place(&self, key, None);
            }
        }
    }

    /// Cuts all streams, and fails what is left.
    fn abort(self: Arc<Self>, error: &Error) {
        let mut state = self.lock();
        if *self.quiet.borrow() {
            return;
        }
        state.closing = true;
        state.ended = Some(error.clone());
        for key in state.keys() {
            state.fail(&self, key, error.clone());
        }
        state.timers.clear();
        self.cut.send_replace(true);
        // The streams' tasks may be gone by now, with those of the client.
        state.wires.clear();
        state.settle(&self);
    }
}
