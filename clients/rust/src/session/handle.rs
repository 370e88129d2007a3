//! A request of a session, as its reader has it.
//!
//! What passes through here: chunks go from the request's output to the reader, and from the reader to the session what it
//! has taken, which is paid for, and what it asks for.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::output::{Output, Queued};
use super::state::Shared;
use crate::error::Error;
use crate::result::{Accepted, Chunk, Completion};

/// One request of a [`Session`](crate::Session): a [`futures_core::Stream`] of its chunks, by the handle or by a reference
/// to it.
///
/// Without a reader its output is kept; a wait for the [result](Self::result) needs none. Dropping the handle before the
/// request's end cancels the request, as nobody can have its output any more; [`detach`](Self::detach) leaves it running.
#[must_use = "dropping a handle cancels its request"]
pub struct Handle {
    session: Arc<Shared>,
    output: Arc<Output>,
    is_detached: bool,
}

impl Handle {
    pub(super) fn new(session: &Arc<Shared>, output: Arc<Output>) -> Self {
        Self { session: Arc::clone(session), output, is_detached: false }
    }

    pub(super) fn output(&self) -> &Arc<Output> {
        &self.output
    }

    /// The request's id.
    pub fn request_id(&self) -> &str {
        self.output.id()
    }

    /// Whether the request has ended.
    pub fn is_done(&self) -> bool {
        self.output.is_closed()
    }

    /// The number of the event that comes next: from where [`Session::attach_from`](crate::Session::attach_from) would
    /// continue.
    pub fn next_seq(&self) -> u64 {
        self.output.lock().fold.next
    }

    /// The parameters in force, once the server has accepted the request.
    pub fn accepted(&self) -> Option<Accepted> {
        self.output.lock().fold.accepted.clone()
    }

    /// Asks for the request's end. It does not wait for it: the handle then ends with
    /// [`FinishReason::Cancelled`](crate::FinishReason::Cancelled) and the output so far. It does nothing if the request
    /// has ended.
    pub fn cancel(&self) {
        let mut state = self.session.lock();
        if let Some(key) = state.key_of(&self.output) {
            state.cancel(&self.session, key);
        }
    }

    /// Lets go of the request, which goes on: it can be attached by its id.
    pub fn detach(mut self) {
        self.is_detached = true;
    }

    /// The next chunk; `None` at the end, and after an error. An error comes last, with the output in
    /// [`Error::partial`]. Dropping the future ends the wait alone.
    pub async fn next(&self) -> Option<Result<Chunk, Error>> {
        poll_fn(|cx| self.poll_chunk(cx)).await
    }

    /// Waits for the end and returns the whole result. A cancelled request has one too. It needs no reader of chunks.
    /// Dropping the future ends the wait alone: bound it with [`tokio::time::timeout`].
    ///
    /// # Errors
    ///
    /// The request was refused or failed; see [`Error`].
    pub async fn result(&self) -> Result<Completion, Error> {
        {
            let mut state = self.session.lock();
            if let Some(key) = state.key_of(&self.output) {
                state.pay_all(&self.session, key);
            }
        }
        self.output.until_closed().await;
        self.output.lock().fold.result()
    }

    fn poll_chunk(&self, cx: &mut Context<'_>) -> Poll<Option<Result<Chunk, Error>>> {
        self.output.poll_chunk(cx).map(|told| {
            told.map(|queued| {
                let Queued { chunk, wire } = queued?;
                if let Some(wire) = wire {
                    self.pay(wire, &chunk);
                }
                Ok(chunk)
            })
        })
    }

    /// Lets the server send more for what the reader has taken.
    fn pay(&self, wire: u64, chunk: &Chunk) {
        let mut state = self.session.lock();
        if let Some(key) = state.key_of(&self.output) {
            let tokens = u32::try_from(chunk.token_ids.len()).unwrap_or(u32::MAX);
            state.pay(&self.session, key, wire, tokens);
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.is_detached && !self.is_done() {
            self.cancel();
        }
    }
}

impl futures_core::Stream for Handle {
    type Item = Result<Chunk, Error>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_chunk(cx)
    }
}

impl futures_core::Stream for &Handle {
    type Item = Result<Chunk, Error>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_chunk(cx)
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Handle");
        shown.field("request_id", &self.request_id()).field("is_done", &self.is_done()).finish_non_exhaustive()
    }
}
