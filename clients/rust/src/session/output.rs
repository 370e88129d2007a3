//! A request's output: the session puts events in, the handle takes chunks out, and who waits is told of the end.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::sync::Notify;

use crate::error::Error;
use crate::fold::Fold;
use crate::proto;
use crate::result::{Chunk, Completion};

/// What is done at a request's end, beside waking who waits for it: a batch's.
#[derive(Default)]
pub(crate) struct Ended(pub(crate) Option<End>);

pub(crate) type End = Box<dyn Fn(Result<Completion, Error>) + Send + Sync>;

/// A request's output.
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
#[derive(Clone)]
pub(super) struct Queued {
    pub(super) chunk: Chunk,
    pub(super) wire: Option<u64>,
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

    /// The next chunk.
    pub(super) fn poll_chunk(&self, cx: &mut Context<'_>) -> Poll<Option<Result<Queued, Error>>> {
        let mut told = self.lock();
        if let Some(queued) = told.chunks.get(told.read) {
            let next = queued.clone();
            told.read += 1;
            return Poll::Ready(Some(Ok(next)));
        }
        if told.is_closed {
            let error = told.fold.error.clone().filter(|_| !told.was_told);
            told.was_told = true;
            return Poll::Ready(error.map(Err));
        }
        told.reader = Some(cx.waker().clone());
        Poll::Pending
    }

    pub(super) async fn until_closed(&self) {
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
