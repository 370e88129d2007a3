//! One request's output, as it comes.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};
use tonic::Code;
use tonic::codec::Streaming;

use crate::call::{Attempts, Visit};
use crate::capability::{GENERATE_STREAM_REQUEST, required_by};
use crate::client::{Client, Inner};
use crate::error::Error;
use crate::fold::Fold;
use crate::placement::keys_of;
use crate::pool::Pool;
use crate::proto;
use crate::proto::result_event::Event;
use crate::request::{Request, choices_of};
use crate::result::{Accepted, Chunk, Completion};
use crate::trace::TraceContext;

/// One request's output, as it comes: a [`futures_core::Stream`] of chunks. [`Client::stream`] and [`Client::attach`] make
/// them.
///
/// It has no task: nothing runs before it is polled (or [started](Self::start)). If the request fails, an error comes last,
/// with the output until then in [`Error::partial`]. Dropping it before its end ends the request; that of an attached
/// stream goes on.
///
/// ```no_run
/// # async fn example(client: headrace::Client) -> Result<(), headrace::Error> {
/// let mut stream = client.stream("Once upon a time");
/// while let Some(chunk) = stream.next().await {
///     print!("{}", chunk?.text);
/// }
/// let completion = stream.result().await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "a stream does nothing until it is polled"]
pub struct Stream {
    client: Arc<Inner>,
    fold: Fold,
    queue: VecDeque<Chunk>,
    source: Source,
    timeout: Option<Duration>,
    timer: Option<Pin<Box<Sleep>>>,
    was_told: bool,
}

type Opening = Pin<Box<dyn Future<Output = (Box<Call>, Result<Box<Opened>, Error>)> + Send>>;
type Polling = Pin<Box<dyn Future<Output = Result<proto::GetResultResponse, Error>> + Send>>;

enum Source {
    /// A GenerateStream that has not begun; or one that is begun again after a failure.
    Idle(Box<Call>),
    Opening(Opening),
    Open(Box<Call>, Box<Opened>),
    /// A request that runs without a stream, by repeated GetResult calls.
    Polled(Option<Polling>),
    Over,
}

/// What a GenerateStream is begun with, and begun again as long as nothing was delivered.
struct Call {
    pool: Arc<Pool>,
    message: proto::GenerateStreamRequest,
    trace: Option<TraceContext>,
    tries: Attempts,
    deadline: Option<Instant>,
}

struct Opened {
    visit: Visit,
    messages: Streaming<proto::GenerateStreamResponse>,
}

impl Call {
    async fn open(self: Box<Self>, failed: Option<(Visit, Error)>) -> (Box<Call>, Result<Box<Opened>, Error>) {
        let mut call = self;
        let opened = call.try_to_open(failed).await;
        (call, opened)
    }

    async fn try_to_open(&mut self, mut failed: Option<(Visit, Error)>) -> Result<Box<Opened>, Error> {
        loop {
            if let Some((visit, error)) = failed.take() {
                let server = Arc::clone(&visit.server);
                drop(visit);
                self.tries.failed(&server, error).await?;
            }
            let visit = self.tries.next().await?;
            let mut request = self.pool.settings.outgoing(self.message.clone(), self.trace.as_ref())?;
            if let Some(deadline) = self.deadline {
                request.set_timeout(deadline.saturating_duration_since(Instant::now()));
            }
            match visit.server.connection.generation().generate_stream(request).await {
                Ok(answer) => return Ok(Box::new(Opened { visit, messages: answer.into_inner() })),
                Err(status) => {
                    let error = Error::from_call(&status, &visit.server.name()).of_stream();
                    if !self.pool.many {
                        return Err(error);
                    }
                    failed = Some((visit, error));
                }
            }
        }
    }
}

impl Client {
    /// Streams one request. It is sent when the stream is first polled.
    pub fn stream(&self, request: impl Into<Request>) -> Stream {
        self.stream_needing(request.into(), &[])
    }

    pub(crate) fn stream_needing(&self, request: Request, capabilities: &[&str]) -> Stream {
        let pool = &self.inner.pool;
        let spec = match request.build() {
            Ok(spec) => spec,
            Err(error) => {
                let mut fold = Fold::new("", 1, 1);
                fold.fail(error);
                return Stream::new(self, fold, Source::Over);
            }
        };
        let fold = Fold::new(spec.request_id.clone(), choices_of(&spec), 1);
        let tries = Attempts::new(pool, keys_of(&spec), None);
        let mut message = proto::GenerateStreamRequest { spec: Some(spec), ..Default::default() };
        message.required_capabilities = required_by(&message, GENERATE_STREAM_REQUEST, capabilities);
        let trace = pool.settings.tracer.now();
        let call = Call { pool: Arc::clone(pool), message, trace, tries, deadline: None };
        Stream::new(self, fold, Source::Idle(Box::new(call)))
    }
}

impl Stream {
    fn new(client: &Client, fold: Fold, source: Source) -> Self {
        Self {
            client: Arc::clone(&client.inner),
            fold,
            queue: VecDeque::new(),
            source,
            timeout: None,
            timer: None,
            was_told: false,
        }
    }

    pub(crate) fn polled(client: &Client, id: String, from: u64) -> Self {
        Self::new(client, Fold::new(id, 0, from), Source::Polled(None))
    }

    /// Bounds the call: when so much time has passed since it was begun, the request is ended, and the stream with
    /// `DEADLINE_EXCEEDED`. [`Request::time_limit`] bounds a request without an error.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.timeout = Some(limit);
        self
    }

    /// The request's id.
    pub fn request_id(&self) -> &str {
        &self.fold.id
    }

    /// The parameters in force, once the server has told them.
    pub fn accepted(&self) -> Option<&Accepted> {
        self.fold.accepted.as_ref()
    }

    /// Sends the request and waits until the server has answered first. It need not be called: polling does it.
    ///
    /// # Errors
    ///
    /// The request was refused, or failed already.
    pub async fn start(&mut self) -> Result<(), Error> {
        if self.queue.is_empty() && self.fold.next == 1 {
            poll_fn(|cx| self.poll_message(cx)).await;
        }
        self.fold.error.clone().map_or(Ok(()), Err)
    }

    /// The next chunk; `None` at the end, and after an error.
    pub async fn next(&mut self) -> Option<Result<Chunk, Error>> {
        poll_fn(|cx| self.poll_chunk(cx)).await
    }

    /// Reads to the end and returns the whole result; chunks that were not read stay to be read.
    ///
    /// # Errors
    ///
    /// The request failed: the error that the stream tells, too.
    pub async fn result(&mut self) -> Result<Completion, Error> {
        while poll_fn(|cx| self.poll_message(cx)).await {}
        self.fold.result()
    }

    /// Asks the server to end the request: the stream then ends with [`FinishReason::Cancelled`] and the output so far.
    ///
    /// # Errors
    ///
    /// The server cannot be asked.
    ///
    /// [`FinishReason::Cancelled`]: crate::FinishReason::Cancelled
    pub async fn cancel(&self) -> Result<(), Error> {
        let client = Client { inner: Arc::clone(&self.client) };
        client.cancel([self.request_id()]).await.map(drop)
    }

    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Chunk, Error>>> {
        loop {
            if let Some(chunk) = self.queue.pop_front() {
                return Poll::Ready(Some(Ok(chunk)));
            }
            if !ready!(self.poll_message(cx)) {
                let error = self.fold.error.clone().filter(|_| !self.was_told);
                self.was_told = true;
                return Poll::Ready(error.map(Err));
            }
        }
    }

    /// Takes the next message; false: there is none.
    fn poll_message(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        loop {
            if let Some(timer) = &mut self.timer
                && timer.as_mut().poll(cx).is_ready()
            {
                self.end(Some(Error::deadline()));
            }
            match std::mem::replace(&mut self.source, Source::Over) {
                Source::Over => return Poll::Ready(false),
                Source::Idle(mut call) => {
                    if let Some(limit) = self.timeout {
                        let deadline = Instant::now() + limit;
                        call.deadline = Some(deadline);
                        self.timer = Some(Box::pin(sleep_until(deadline)));
                    }
                    self.source = Source::Opening(Box::pin(call.open(None)));
                }
                Source::Opening(mut opening) => match opening.as_mut().poll(cx) {
                    Poll::Pending => {
                        self.source = Source::Opening(opening);
                        return Poll::Pending;
                    }
                    Poll::Ready((call, Ok(opened))) => self.source = Source::Open(call, opened),
                    Poll::Ready((_, Err(error))) => self.end(Some(error)),
                },
                Source::Open(call, mut opened) => {
                    match futures_core::Stream::poll_next(Pin::new(&mut opened.messages), cx) {
                        Poll::Pending => {
                            self.source = Source::Open(call, opened);
                            return Poll::Pending;
                        }
                        Poll::Ready(told) => {
                            if self.take(call, opened, told) {
                                return Poll::Ready(true);
                            }
                        }
                    }
                }
                Source::Polled(polling) => return self.poll_result(polling, cx),
            }
        }
    }

    /// Takes what a GenerateStream has told; false: its call is begun again, or has ended.
    fn take(
        &mut self,
        call: Box<Call>,
        opened: Box<Opened>,
        told_now: Option<Result<proto::GenerateStreamResponse, tonic::Status>>,
    ) -> bool {
        if self.fold.done {
            return false; // the call's own end, behind its request's: the server does not count it as lost
        }
        let pool = Arc::clone(&call.pool);
        let failure = match told_now {
            Some(Ok(message)) => {
                self.note(&pool, &opened, &message.instance_id);
                match self.undelivered_failure(&message.events).filter(|_| pool.many) {
                    Some(failure) => failure,
                    None => {
                        self.source = Source::Open(call, opened);
                        self.add(message.events);
                        return true;
                    }
                }
            }
            Some(Err(status)) => Error::from_call(&status, &opened.visit.server.name()).of_stream(),
            None => {
                self.end(Some(Error::status(Code::Unavailable, "the server ended the stream before the request")));
                return false;
            }
        };
        if pool.many && !self.fold.has_begun && !self.fold.done {
            self.fold.restart();
            self.source = Source::Opening(Box::pin(call.open(Some((opened.visit, failure)))));
        } else {
            self.end(Some(failure));
        }
        false
    }

    fn note(&mut self, pool: &Pool, opened: &Opened, instance: &str) {
        if instance.is_empty() {
            return;
        }
        instance.clone_into(&mut self.fold.instance);
        let mut state = pool.lock();
        if let Some(entry) = state.entry(opened.visit.server.id) {
            instance.clone_into(&mut entry.instance);
        }
        state.note_owner(&self.fold.id, instance);
        state.budget.succeeded();
    }

    /// The failure that events tell, if it is one of the server's and there is no output yet.
    fn undelivered_failure(&self, events: &[proto::ResultEvent]) -> Option<Error> {
        for event in events {
            match &event.event {
                _ if self.fold.has_begun => return None,
                Some(Event::Delta(_)) => return None,
                Some(Event::Failed(failed)) => {
                    let error = Error::from_rpc(failed.status.as_ref()?).of(&self.fold.id);
                    return Some(error).filter(|error| error.code() == Code::Unavailable);
                }
                _ => {}
            }
        }
        None
    }

    fn add(&mut self, events: Vec<proto::ResultEvent>) {
        for event in events {
            self.queue.extend(self.fold.add(event));
        }
        if self.fold.done && !self.fold.was_told {
            self.end(None);
        }
    }

    fn poll_result(&mut self, polling: Option<Polling>, cx: &mut Context<'_>) -> Poll<bool> {
        let mut polling = polling.unwrap_or_else(|| {
            let (pool, id, next) = (Arc::clone(&self.client.pool), self.fold.id.clone(), self.fold.next);
            Box::pin(async move { pool.get_result(&id, next, false).await })
        });
        match polling.as_mut().poll(cx) {
            Poll::Pending => {
                self.source = Source::Polled(Some(polling));
                Poll::Pending
            }
            Poll::Ready(Err(error)) => {
                self.end(Some(error));
                Poll::Ready(false)
            }
            Poll::Ready(Ok(answer)) => {
                self.fold.instance = answer.instance_id;
                self.source = if answer.done { Source::Over } else { Source::Polled(None) };
                self.add(answer.events);
                Poll::Ready(true)
            }
        }
    }

    /// Ends the stream; what it has of its call goes with it.
    fn end(&mut self, error: Option<Error>) {
        if let Some(error) = error
            && !self.fold.done
        {
            self.fold.fail(error);
        }
        self.timer = None;
        self.source = Source::Over;
    }
}

impl futures_core::Stream for Stream {
    type Item = Result<Chunk, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_chunk(cx)
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("request_id", &self.fold.id).finish_non_exhaustive()
    }
}
