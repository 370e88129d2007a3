//! Requests that run without a stream, and what is done to requests by their ids: docs/fleet.md says which server is asked.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};
use tonic::Code;

use crate::call::{About, Attempts, pause_after};
use crate::capability::{ADD_REQUEST_REQUEST, required_by};
use crate::client::Client;
use crate::error::{Error, ErrorKind, WRONG_INSTANCE, proto_duration};
use crate::fold::Fold;
use crate::placement::keys_of;
use crate::pool::{Pool, Server};
use crate::proto;
use crate::request::{Request, random};
use crate::result::{Accepted, Completion};
use crate::stream::Stream;

/// How long one GetResult waits: proxies cut quiet calls.
const POLL_WAIT: Duration = Duration::from_secs(30);
/// How many requests one Cancel may name.
const MAX_CANCEL_IDS: usize = 1024;

/// What a cancel found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CancelStatus {
    /// The status is newer than this library.
    #[default]
    Unknown,
    /// The request is being ended.
    Cancelled,
    /// It had ended.
    AlreadyFinished,
    /// There is no such request of this caller.
    NotFound,
}

impl CancelStatus {
    /// The status in words, such as `"not_found"`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Cancelled => "cancelled",
            Self::AlreadyFinished => "already_finished",
            Self::NotFound => "not_found",
        }
    }

    fn from_proto(told: i32) -> Self {
        match proto::CancelStatus::try_from(told) {
            Ok(proto::CancelStatus::Cancelled) => Self::Cancelled,
            Ok(proto::CancelStatus::AlreadyFinished) => Self::AlreadyFinished,
            Ok(proto::CancelStatus::NotFound) => Self::NotFound,
            Ok(proto::CancelStatus::Unspecified) | Err(_) => Self::Unknown,
        }
    }
}

impl fmt::Display for CancelStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Client {
    /// Starts a request that runs without a stream, and returns once the server has accepted it. Its result is kept for
    /// [`result`](Self::result) and [`attach`](Self::attach), and for a while after its end. The same call again, with the
    /// same id, starts nothing and returns the same.
    ///
    /// # Errors
    ///
    /// The request was refused; see [`Error`].
    pub async fn add(&self, request: impl Into<Request>) -> Result<Accepted, Error> {
        let pool = &self.inner.pool;
        let spec = request.into().build()?;
        let deadline = pool.short_deadline();
        let about = About { request_id: spec.request_id.clone(), trace: pool.settings.tracer.now(), deadline };
        let tries = Attempts::new(pool, keys_of(&spec), deadline).sticking();
        let mut message = proto::AddRequestRequest { spec: Some(spec), ..Default::default() };
        message.required_capabilities = required_by(&message, ADD_REQUEST_REQUEST, &[]);
        let send =
            |server: Arc<Server>, request| async move { server.connection.generation().add_request(request).await };
        let (answer, server) = pool.call(tries, &about, &message, send).await?;
        let mut state = pool.lock();
        state.note_owner(&about.request_id, &answer.instance_id);
        state.runs_alone(&about.request_id, server.id);
        drop(state);
        Ok(Accepted::from_proto(&answer.request_id, answer.accepted.unwrap_or_default()))
    }

    /// Waits for the end of a request that runs without a stream, and returns its whole result. Reading does not consume;
    /// dropping the future ends the wait alone.
    ///
    /// # Errors
    ///
    /// There is no such request, or it failed; see [`Error`].
    pub async fn result(&self, request_id: impl Into<String>) -> Result<Completion, Error> {
        let mut fold = Fold::new(request_id, 0, 1);
        loop {
            let answer = self.inner.pool.get_result(&fold.id, fold.next, true).await?;
            fold.instance = answer.instance_id;
            for event in answer.events {
                fold.add(event);
            }
            if answer.done || fold.done {
                return fold.result();
            }
        }
    }

    /// Streams the output of a request that runs without a stream, from the event of that number on; 1: the first. Several
    /// readers may do so. Dropping the stream does not affect the request.
    pub fn attach(&self, request_id: impl Into<String>, from: u64) -> Stream {
        Stream::polled(self, request_id.into(), from)
    }

    /// Ends requests by their ids, and returns what it found of each.
    ///
    /// # Errors
    ///
    /// No server that may have them can be reached; see [`Error`].
    pub async fn cancel<I>(&self, request_ids: I) -> Result<HashMap<String, CancelStatus>, Error>
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        let ids: BTreeSet<String> = request_ids.into_iter().map(Into::into).collect();
        let ids: Vec<String> = ids.into_iter().collect();
        let mut statuses = HashMap::with_capacity(ids.len());
        for some in ids.chunks(MAX_CANCEL_IDS) {
            self.cancel_some(some, &mut statuses).await?;
        }
        Ok(statuses)
    }

    async fn cancel_some(&self, ids: &[String], statuses: &mut HashMap<String, CancelStatus>) -> Result<(), Error> {
        let pool = &self.inner.pool;
        if !pool.many {
            let message = proto::CancelRequest { request_ids: ids.to_vec(), ..Default::default() };
            let send =
                |server: Arc<Server>, request| async move { server.connection.generation().cancel(request).await };
            note(self.anywhere(&message, send).await?, statuses);
            return Ok(());
        }
        pool.settle().await;
        let mut by_owner: BTreeMap<String, Vec<String>> = BTreeMap::new();
        {
            let state = pool.lock();
            for id in ids {
                let owner = state.owner(id);
                let is_here = !state.by_instance(&owner).is_empty();
                by_owner.entry(if is_here { owner } else { String::new() }).or_default().push(id.clone());
            }
        }
        for (owner, some) in by_owner {
            pool.cancel_at(&owner, &some, statuses).await?;
        }
        Ok(())
    }
}

fn note(answer: proto::CancelResponse, statuses: &mut HashMap<String, CancelStatus>) {
    for one in answer.results {
        statuses.insert(one.request_id, CancelStatus::from_proto(one.status));
    }
}

impl Pool {
    /// Cancels at the instance that has the requests; if none is known, at each server what was not found before.
    async fn cancel_at(
        &self,
        owner: &str,
        ids: &[String],
        statuses: &mut HashMap<String, CancelStatus>,
    ) -> Result<(), Error> {
        let (servers, mut problem) = {
            let state = self.lock();
            let mut servers = if owner.is_empty() { state.reachable() } else { state.by_instance(owner) };
            if !owner.is_empty() {
                servers.truncate(1);
            }
            (servers, state.nobody())
        };
        let send = |server: Arc<Server>, request| async move { server.connection.generation().cancel(request).await };
        let mut answered = false;
        for server in servers {
            let found = |id: &&String| {
                matches!(statuses.get(*id), Some(CancelStatus::Cancelled | CancelStatus::AlreadyFinished))
            };
            let left: Vec<String> = ids.iter().filter(|id| !found(id)).cloned().collect();
            if left.is_empty() {
                return Ok(());
            }
            let message =
                proto::CancelRequest { request_ids: left, instance_id: owner.to_owned(), ..Default::default() };
            let about = About { deadline: self.short_deadline(), ..About::default() };
            match self.bounded_call(&server, &about, message, &send).await {
                Ok(answer) => {
                    answered = true;
                    note(answer, statuses);
                }
                Err(error) if error.code() == Code::NotFound => answered = true, // another process is there now
                Err(error) if error.code() == Code::Unavailable => problem = error,
                Err(error) => return Err(error),
            }
        }
        if !answered {
            return Err(problem);
        }
        for id in ids {
            let status = statuses.entry(id.clone()).or_default();
            if *status == CancelStatus::Unknown {
                *status = CancelStatus::NotFound;
            }
        }
        Ok(())
    }

    async fn bounded_call<M, A, F, S>(
        &self,
        server: &Arc<Server>,
        about: &About,
        message: M,
        send: &S,
    ) -> Result<A, Error>
    where
        S: Fn(Arc<Server>, tonic::Request<M>) -> F,
        F: Future<Output = Result<tonic::Response<A>, tonic::Status>>,
    {
        let call = self.call_at(server, about, message, send);
        match about.deadline {
            None => call.await,
            Some(at) => timeout_at(at, call).await.unwrap_or_else(|_| Err(Error::deadline().of(&about.request_id))),
        }
    }

    /// Reads the next events of a request, at the server that has it.
    pub(crate) async fn get_result(
        self: &Arc<Self>,
        id: &str,
        from: u64,
        until_done: bool,
    ) -> Result<proto::GetResultResponse, Error> {
        let mut tries = OwnerTries::new(self, id).await;
        let deadline = self.settings.call_timeout.map(|limit| Instant::now() + POLL_WAIT + limit);
        let about = About { request_id: id.to_owned(), trace: self.settings.tracer.now(), deadline };
        let send =
            |server: Arc<Server>, request| async move { server.connection.generation().get_result(request).await };
        loop {
            let server = tries.next()?;
            let message = proto::GetResultRequest {
                request_id: id.to_owned(),
                from_seq: from,
                wait: Some(proto_duration(POLL_WAIT)),
                until_done,
                instance_id: tries.owner.clone(),
                required_capabilities: Vec::new(),
            };
            match self.bounded_call(&server, &about, message, &send).await {
                Ok(answer) => {
                    let mut state = self.lock();
                    state.note_owner(id, &answer.instance_id);
                    if answer.done {
                        state.ended_alone(id);
                    }
                    drop(state);
                    return Ok(answer);
                }
                Err(_) if self.lock().closed => return Err(Error::closed("the client")),
                Err(error) => tries.failed(&server, error).await?,
            }
        }
    }
}

/// The tries of a call to the server that has a request: to the instance that an answer named; if none is known, to one
/// server after another.
struct OwnerTries {
    pool: Arc<Pool>,
    id: String,
    /// The instance to name in the call; empty: none is known.
    owner: String,
    servers: Vec<Arc<Server>>,
    left: u32,
    pauses: u32,
    followed: bool,
    problem: Option<Error>,
}

impl OwnerTries {
    async fn new(pool: &Arc<Pool>, id: &str) -> Self {
        let owner = pool.lock().owner(id);
        if owner.is_empty() {
            pool.settle().await;
        }
        let mut servers = if owner.is_empty() { pool.lock().reachable() } else { pool.lock().by_instance(&owner) };
        if !owner.is_empty() {
            servers.truncate(1);
        }
        Self {
            pool: Arc::clone(pool),
            id: id.to_owned(),
            owner,
            servers,
            left: pool.settings.retries,
            pauses: 0,
            followed: false,
            problem: None,
        }
    }

    fn next(&self) -> Result<Arc<Server>, Error> {
        let state = self.pool.lock();
        if state.closed {
            return Err(Error::closed("the client"));
        }
        match (self.servers.first(), &self.problem) {
            (Some(server), _) => Ok(Arc::clone(server)),
            (None, Some(problem)) => Err(problem.clone()),
            (None, None) if self.owner.is_empty() => Err(state.nobody()),
            (None, None) => Err(self.gone()),
        }
    }

    /// Notes a failed try, and waits as long as the next one must. The error if there is none.
    async fn failed(&mut self, at: &Arc<Server>, error: Error) -> Result<(), Error> {
        if error.reason() == WRONG_INSTANCE {
            return self.follow(at, &error);
        }
        if error.code() == Code::NotFound && self.owner.is_empty() && self.pool.many {
            self.servers.remove(0);
            self.problem.get_or_insert(error);
            return Ok(());
        }
        if !error.is_worth_a_retry() {
            return Err(error);
        }
        if self.left > 0 {
            self.left -= 1;
            let pause = error.retry_after().unwrap_or_else(|| {
                self.pauses += 1;
                pause_after(self.pauses - 1).mul_f64(random())
            });
            sleep(pause).await;
            return Ok(());
        }
        if !self.owner.is_empty() || !self.pool.many {
            return Err(error);
        }
        self.servers.remove(0);
        self.problem = Some(error); // it may be there: more than that it is nowhere else
        Ok(())
    }

    /// Looks once whether the owner has another address: this one has another process than it had.
    fn follow(&mut self, at: &Arc<Server>, error: &Error) -> Result<(), Error> {
        let mut state = self.pool.lock();
        if let Some(entry) = state.entry(at.id) {
            entry.instance = error.metadata().get("instance_id").cloned().unwrap_or_default();
        }
        self.servers = state.by_instance(&self.owner);
        drop(state);
        self.servers.retain(|one| one.id != at.id);
        if self.followed || self.servers.is_empty() {
            return Err(self.gone());
        }
        self.followed = true;
        Ok(())
    }

    fn gone(&self) -> Error {
        let told = format!("the server that had request {:?} (instance {}) is gone", self.id, self.owner);
        Error::new(ErrorKind::Status, Code::Unavailable, told).of(&self.id)
    }
}
