//! A request of a session, as its reader has it.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::sync::Notify;

use super::Shared;
use crate::error::Error;
use crate::fold::Fold;
use crate::proto;
use crate::result::{Accepted, Chunk, Completion};

/// One request of a [`Session`](super::Session): a [`futures_core::Stream`] of its chunks, by the handle or by a reference
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

    /// The number of the event that comes next: from where [`Session::attach_from`](super::Session::attach_from) would
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
        let mut told = self.output.lock();
        if let Some(queued) = told.chunks.get(told.read) {
            let (chunk, wire) = (queued.chunk.clone(), queued.wire);
            told.read += 1;
            drop(told);
            if let Some(wire) = wire {
                self.pay(wire, &chunk);
            }
            return Poll::Ready(Some(Ok(chunk)));
        }
        if told.is_closed {
            let error = told.fold.error.clone().filter(|_| !told.was_told);
            told.was_told = true;
            return Poll::Ready(error.map(Err));
        }
        told.reader = Some(cx.waker().clone());
        Poll::Pending
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

/// What is done at a request's end, beside waking who waits for it: a batch's.
#[derive(Default)]
pub(crate) struct Ended(pub(crate) Option<End>);

pub(crate) type End = Box<dyn Fn(Result<Completion, Error>) + Send + Sync>;

/// A request's output: the session puts events in, the handle takes chunks out.
pub(crate) struct Output {
    id: String,
    told: Mutex<Told>,
    closed: Notify,
    ended: Ended,
}

pub(super) struct Told {
    pub(super) fold: Fold,
    /// The output, all of it: who resumes the request elsewhere wants it from its beginning.
    chunks: Vec<Queued>,
    /// How many of them the reader has taken.
    read: usize,
    is_closed: bool,
    /// Whether the reader has the error.
    was_told: bool,
    reader: Option<Waker>,
}

/// A chunk, and the stream by which it came and which is paid for it when it is read; none: it is paid for.
struct Queued {
    chunk: Chunk,
    wire: Option<u64>,
}

impl Output {
    pub(super) fn new(fold: Fold, ended: Ended) -> Arc<Self> {
        Self::with(fold, Vec::new(), false, ended)
    }

    fn with(fold: Fold, chunks: Vec<Queued>, is_closed: bool, ended: Ended) -> Arc<Self> {
        let id = fold.id.clone();
        let told = Told { fold, chunks, read: 0, is_closed, was_told: false, reader: None };
        Arc::new(Self { id, told: Mutex::new(told), closed: Notify::new(), ended })
    }

    /// The output of a lost request, to be continued: all of it, from the beginning.
    pub(super) fn reopened(&self) -> Arc<Self> {
        let told = self.lock();
        let chunks = told.chunks.iter().map(|queued| Queued { chunk: queued.chunk.clone(), wire: None }).collect();
        let fold = told.fold.reopened();
        let is_closed = fold.done;
        Self::with(fold, chunks, is_closed, Ended::default())
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    async fn until_closed(&self) {
        loop {
            let notified = self.closed.notified(); // it is told of each end from here on
            if self.is_closed() {
                return;
            }
            notified.await;
        }
    }

    /// Takes an event that came by a wire (none: without credits). Whether the request has ended, and how many tokens are
    /// to be paid for at once.
    pub(super) fn take(
        &self,
        event: proto::ResultEvent,
        instance: &str,
        wire: Option<u64>,
        unlimited: bool,
    ) -> (bool, u32) {
        let mut told = self.lock();
        if told.fold.instance != instance {
            instance.clone_into(&mut told.fold.instance);
        }
        let mut owed = 0;
        if let Some(chunk) = told.fold.add(event) {
            if unlimited && wire.is_some() {
                owed = u32::try_from(chunk.token_ids.len()).unwrap_or(u32::MAX);
            }
            if self.ended.0.is_none() {
                told.chunks.push(Queued { chunk, wire: wire.filter(|_| !unlimited) });
                if let Some(reader) = told.reader.take() {
                    drop(told);
                    reader.wake();
                    return (false, owed); // a chunk is no end
                }
            }
        }
        (told.fold.done, owed)
    }

    /// Counts the tokens that a stream has sent and nobody has paid for; they count as paid from now on.
    pub(super) fn take_owed(&self, wire: u64) -> u32 {
        let mut told = self.lock();
        let read = told.read;
        let unread = told.chunks[read..].iter_mut().filter(|queued| queued.wire == Some(wire));
        let count = unread.map(|queued| {
            queued.wire = None;
            queued.chunk.token_ids.len()
        });
        u32::try_from(count.sum::<usize>()).unwrap_or(u32::MAX)
    }

    /// Tells the readers of the end; with an error, if it is not the one of the events.
    pub(super) fn close_with(&self, error: Option<Error>) {
        let mut told = self.lock();
        if let Some(error) = error {
            told.fold.fail(error);
        }
        if told.is_closed {
            return;
        }
        told.is_closed = true;
        let reader = told.reader.take();
        let result = self.ended.0.as_ref().map(|_| told.fold.result());
        drop(told);
        reader.into_iter().for_each(Waker::wake);
        self.closed.notify_waiters();
        if let (Some(ended), Some(result)) = (&self.ended.0, result) {
            ended(result);
        }
    }

    /// Forgets all output: the request is sent again.
    pub(super) fn restart(&self) {
        let mut told = self.lock();
        told.fold.restart();
        told.chunks.clear();
        told.read = 0;
    }

    pub(super) fn has_begun(&self) -> bool {
        self.lock().fold.has_begun
    }
}

impl super::State {
    /// The key of a request, while it is live here.
    fn key_of(&self, output: &Arc<Output>) -> Option<u64> {
        let key = *self.ids.get(output.id())?;
        self.live.get(&key).filter(|entry| Arc::ptr_eq(&entry.output, output)).map(|_| key)
    }
}
