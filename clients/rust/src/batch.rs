//! Batches: any number of requests, a bounded number at a time.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::client::Client;
use crate::error::Error;
use crate::request::Request;
use crate::result::Completion;
use crate::session::{Ended, Session, SessionOptions};

/// How many windows of outcomes may wait for an earlier one.
const WINDOWS_AHEAD: usize = 16;

/// How a batch is run.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct BatchOptions {
    max_in_flight: usize,
    ordered: bool,
}

impl Default for BatchOptions {
    fn default() -> Self {
        Self { max_in_flight: 64, ordered: false }
    }
}

impl BatchOptions {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many requests are with the server at a time; default 64, at least 1.
    pub fn max_in_flight(mut self, requests: usize) -> Self {
        self.max_in_flight = requests.max(1);
        self
    }

    /// Gives outcomes in the order of their requests, not of their ends.
    pub fn ordered(mut self, ordered: bool) -> Self {
        self.ordered = ordered;
        self
    }
}

/// What came of one request of a batch.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Outcome {
    /// The request's place in the batch, from 0.
    pub index: usize,
    /// Its output, or why there is none.
    pub result: Result<Completion, Error>,
}

/// A batch that runs: a [`futures_core::Stream`] of outcomes. [`Client::batch`] makes it.
///
/// It takes its requests from the iterator while it is polled, when there is room for them. Dropping it cancels what runs.
#[must_use = "a batch does nothing until it is polled"]
pub struct Batch<I> {
    session: Session,
    requests: I,
    options: BatchOptions,
    ended: Arc<Mutex<Queue>>,
    /// How many requests there were so far.
    taken: usize,
    in_flight: usize,
    has_all: bool,
    /// Those that wait for an earlier one.
    early: BTreeMap<usize, Outcome>,
    /// The index that is to be given next, if they are given in order.
    next: usize,
}

#[derive(Default)]
struct Queue {
    outcomes: VecDeque<Outcome>,
    reader: Option<Waker>,
}

impl Client {
    /// Runs any number of requests, a bounded number at a time, on a session of their own. It gives one outcome for each
    /// request, as they end. A request that was lost before its end is begun again, if it may be.
    ///
    /// ```no_run
    /// # async fn example(client: headrace::Client) -> Result<(), headrace::Error> {
    /// use headrace::{BatchOptions, Request};
    ///
    /// let requests = (0..1000).map(|number| Request::text(format!("{number} in words:")).max_tokens(16));
    /// let mut batch = client.batch(requests, BatchOptions::new().max_in_flight(128))?;
    /// while let Some(outcome) = batch.next().await {
    ///     println!("{}: {}", outcome.index, outcome.result?.text());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The client was closed.
    pub fn batch<R>(&self, requests: R, options: BatchOptions) -> Result<Batch<R::IntoIter>, Error>
    where
        R: IntoIterator,
        R::Item: Into<Request>,
    {
        Ok(Batch {
            session: self.open_session(SessionOptions::default(), true)?,
            requests: requests.into_iter(),
            options,
            ended: Arc::default(),
            taken: 0,
            in_flight: 0,
            has_all: false,
            early: BTreeMap::new(),
            next: 0,
        })
    }
}

impl<I> Batch<I>
where
    I: Iterator,
    I::Item: Into<Request>,
{
    /// The next outcome; `None` once there was one for each request.
    pub async fn next(&mut self) -> Option<Outcome> {
        poll_fn(|cx| self.poll_outcome(cx)).await
    }

    fn poll_outcome(&mut self, cx: &mut Context<'_>) -> Poll<Option<Outcome>> {
        loop {
            self.fill();
            if let Some(outcome) = self.early.remove(&self.next) {
                self.next += 1;
                return Poll::Ready(Some(outcome));
            }
            let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(outcome) = ended.outcomes.pop_front() else {
                if self.has_all && self.in_flight == 0 {
                    return Poll::Ready(None);
                }
                ended.reader = Some(cx.waker().clone());
                return Poll::Pending;
            };
            drop(ended);
            self.in_flight -= 1;
            if !self.options.ordered {
                return Poll::Ready(Some(outcome));
            }
            self.early.insert(outcome.index, outcome);
        }
    }

    /// Submits requests as there is room for them.
    fn fill(&mut self) {
        let window = self.options.max_in_flight;
        while !self.has_all && self.in_flight < window && self.early.len() < WINDOWS_AHEAD * window {
            let Some(request) = self.requests.next() else {
                self.has_all = true;
                return;
            };
            let index = self.taken;
            self.taken += 1;
            self.in_flight += 1;
            let ended = Arc::clone(&self.ended);
            let end = move |result| {
                let mut queue = ended.lock().unwrap_or_else(PoisonError::into_inner);
                queue.outcomes.push_back(Outcome { index, result });
                let reader = queue.reader.take();
                drop(queue);
                reader.into_iter().for_each(Waker::wake);
            };
            if let Err(error) = self.session.begin(request.into(), Ended(Some(Box::new(end.clone())))) {
                end(Err(error));
            }
        }
    }
}

impl<I> futures_core::Stream for Batch<I>
where
    I: Iterator + Unpin,
    I::Item: Into<Request>,
{
    type Item = Outcome;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Outcome>> {
        self.poll_outcome(cx)
    }
}

impl<I> fmt::Debug for Batch<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch").field("taken", &self.taken).field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}
