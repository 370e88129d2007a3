//! Unary calls, and their tries: docs/clients.md has the rules.

use std::collections::HashSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout, timeout_at};
use tonic::{Code, Response, Status};

use crate::error::{ADAPTER_NOT_LOADED, Error};
use crate::placement::PrefixKeys;
use crate::pool::{PATIENCE, Pool, Server};
use crate::request::random;
use crate::trace::TraceContext;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// How long to wait after a failure without advice: 0.1 s, three times as long each time, at most 2 s.
pub(crate) fn pause_after(times: u32) -> Duration {
    (FIRST_PAUSE * 3_u32.pow(times.min(3))).min(LONGEST_PAUSE)
}

/// A call at a server, which counts as its load while this exists.
pub(crate) struct Visit {
    pool: Arc<Pool>,
    pub(crate) server: Arc<Server>,
}

impl Drop for Visit {
    fn drop(&mut self) {
        self.pool.lock().over(self.server.id);
    }
}

/// The tries of a call that any server may answer.
pub(crate) struct Attempts {
    pool: Arc<Pool>,
    keys: Option<PrefixKeys>,
    left: u32,
    /// A lost connection is no reason to go elsewhere at once: the server may have taken the request.
    sticks: bool,
    same: Option<Arc<Server>>,
    tried: HashSet<u64>,
    /// Those that have said that they lack the request's adapter.
    lacking: HashSet<u64>,
    pauses: u32,
    /// It has waited for room once; now it may ask.
    full: bool,
    began: Option<Instant>,
    deadline: Option<Instant>,
}

enum Look {
    Go(Arc<Server>),
    Wait(Duration),
}

impl Attempts {
    pub(crate) fn new(pool: &Arc<Pool>, keys: Option<PrefixKeys>, deadline: Option<Instant>) -> Self {
        Self {
            pool: Arc::clone(pool),
            keys,
            left: pool.settings.retries,
            sticks: false,
            same: None,
            tried: HashSet::new(),
            lacking: HashSet::new(),
            pauses: 0,
            full: false,
            began: None,
            deadline,
        }
    }

    /// Has what failed not tried again.
    pub(crate) fn once(mut self) -> Self {
        self.left = 0;
        self
    }

    pub(crate) fn sticking(mut self) -> Self {
        self.sticks = true;
        self
    }

    /// The server to call now, once there is one. The call counts as begun there.
    pub(crate) async fn next(&mut self) -> Result<Visit, Error> {
        let began = *self.began.get_or_insert_with(Instant::now);
        let mut changed = self.pool.watch();
        loop {
            match self.look(began)? {
                Look::Go(server) => {
                    self.pool.lock().begun(server.id);
                    return Ok(Visit { pool: Arc::clone(&self.pool), server });
                }
                Look::Wait(pause) => {
                    let _ = timeout(pause, changed.changed()).await;
                }
            }
        }
    }

    fn look(&mut self, began: Instant) -> Result<Look, Error> {
        let mut state = self.pool.lock();
        if state.closed {
            return Err(Error::closed("the client"));
        }
        if let Some(same) = &self.same {
            return Ok(Look::Go(Arc::clone(same)));
        }
        if let Some(server) = state.choose(self.keys.as_ref(), &self.tried, &self.lacking, self.full) {
            return Ok(Look::Go(server));
        }
        if let Some(room_in) = state.room_in(&self.lacking) {
            self.full = true;
            return Ok(Look::Wait(room_in));
        }
        let left = PATIENCE.saturating_sub(began.elapsed());
        if left.is_zero() { Err(state.nobody()) } else { Ok(Look::Wait(left)) }
    }

    /// Notes a failed try, and waits as long as the next one must. The error if there is none.
    pub(crate) async fn failed(&mut self, at: &Server, error: Error) -> Result<(), Error> {
        let Some(pause) = self.pause(at, &error) else { return Err(error) };
        if self.deadline.is_some_and(|deadline| Instant::now() + pause > deadline) {
            return Err(error); // it would not be tried again
        }
        sleep(pause).await;
        Ok(())
    }

    fn pause(&mut self, at: &Server, error: &Error) -> Option<Duration> {
        if error.reason() == ADAPTER_NOT_LOADED {
            self.same = None;
            self.lacking.insert(at.id);
            // Each server is asked once: that is no retry.
            return self.pool.lock().room_in(&self.lacking).map(|_| Duration::ZERO);
        }
        if !error.is_worth_a_retry() || self.left == 0 || self.pool.lock().closed {
            if error.code() == Code::Unavailable {
                self.pool.set_aside(at.id, error);
            }
            return None;
        }
        self.left -= 1;
        if !self.pool.many {
            return Some(self.spread(error, random()));
        }
        let may_now = self.pool.lock().budget.failed();
        if self.sticks && self.same.is_none() && error.reason().is_empty() {
            let entry = self.pool.lock().entry(at.id).map(|entry| Arc::clone(&entry.server));
            self.same = entry;
            return Some(if may_now { Duration::ZERO } else { self.spread(error, 0.5 + random()) });
        }
        self.same = None;
        self.pool.note_failure(at.id, error);
        self.tried.insert(at.id);
        let other = self.pool.lock().choose(self.keys.as_ref(), &self.tried, &self.lacking, false);
        if may_now && other.is_some_and(|other| !self.tried.contains(&other.id)) {
            return Some(Duration::ZERO);
        }
        self.tried.clear();
        self.full = true;
        Some(self.spread(error, 0.5 + random()))
    }

    fn spread(&mut self, error: &Error, by: f64) -> Duration {
        if let Some(advised) = error.retry_after() {
            return advised;
        }
        self.pauses += 1;
        pause_after(self.pauses - 1).mul_f64(by)
    }
}

/// What a call has beside its message.
#[derive(Clone, Debug, Default)]
pub(crate) struct About {
    pub(crate) request_id: String,
    pub(crate) trace: Option<TraceContext>,
    pub(crate) deadline: Option<Instant>,
}

impl Pool {
    /// The deadline of a short call.
    pub(crate) fn short_deadline(&self) -> Option<Instant> {
        self.settings.call_timeout.map(|limit| Instant::now() + limit)
    }

    /// A unary call: as many tries as it may have.
    pub(crate) async fn call<M, A, F, S>(
        self: &Arc<Self>,
        mut tries: Attempts,
        about: &About,
        message: &M,
        send: S,
    ) -> Result<(A, Arc<Server>), Error>
    where
        M: Clone,
        S: Fn(Arc<Server>, tonic::Request<M>) -> F,
        F: Future<Output = Result<Response<A>, Status>>,
    {
        let all = async {
            loop {
                let visit = tries.next().await?;
                let answer = self.call_at(&visit.server, about, message.clone(), &send).await;
                let server = Arc::clone(&visit.server);
                drop(visit);
                match answer {
                    Ok(answer) => {
                        self.lock().budget.succeeded();
                        return Ok((answer, server));
                    }
                    Err(_) if self.lock().closed => return Err(Error::closed("the client")),
                    Err(error) => tries.failed(&server, error).await?,
                }
            }
        };
        match about.deadline {
            None => all.await,
            Some(at) => timeout_at(at, all).await.unwrap_or_else(|_| Err(Error::deadline().of(&about.request_id))),
        }
    }

    /// The same at one server, once.
    pub(crate) async fn call_at<M, A, F, S>(
        &self,
        server: &Arc<Server>,
        about: &About,
        message: M,
        send: &S,
    ) -> Result<A, Error>
    where
        S: Fn(Arc<Server>, tonic::Request<M>) -> F,
        F: Future<Output = Result<Response<A>, Status>>,
    {
        let mut request = self.settings.outgoing(message, about.trace.as_ref())?;
        if let Some(deadline) = about.deadline {
            request.set_timeout(deadline.saturating_duration_since(Instant::now()));
        }
        match send(Arc::clone(server), request).await {
            Ok(answer) => Ok(answer.into_inner()),
            Err(status) => Err(Error::from_call(&status, &server.name()).of(&about.request_id)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Client;
    use crate::pool::Readiness;
    use crate::proto::google::rpc;
    use prost::Message as _;

    fn adapter_not_loaded() -> Error {
        let info = rpc::ErrorInfo { reason: ADAPTER_NOT_LOADED.to_owned(), ..Default::default() };
        let packed = prost_types::Any {
            type_url: "type.googleapis.com/google.rpc.ErrorInfo".to_owned(),
            value: info.encode_to_vec(),
        };
        Error::from_rpc(&rpc::Status { code: Code::NotFound as i32, message: String::new(), details: vec![packed] })
    }

    #[tokio::test]
    async fn a_server_without_the_adapter_is_not_asked_again() {
        let client = Client::connect("unix:/a,unix:/b").unwrap();
        let pool = &client.inner.pool;
        pool.lock().entries.iter_mut().for_each(|entry| entry.state = Readiness::Ready);
        let mut tries = Attempts::new(pool, None, None).once();
        let mut asked = HashSet::new();
        for is_last in [false, true] {
            let visit = tries.next().await.unwrap();
            assert!(asked.insert(visit.server.id));
            let told = tries.failed(&visit.server, adapter_not_loaded()).await;
            assert_eq!(told.err().map(|error| error.reason().to_owned()), is_last.then(|| ADAPTER_NOT_LOADED.into()));
        }
    }

    #[tokio::test]
    async fn one_server_without_the_adapter_is_asked_once() {
        let client = Client::connect("unix:/a").unwrap();
        let mut tries = Attempts::new(&client.inner.pool, None, None);
        let visit = tries.next().await.unwrap();
        assert!(tries.failed(&visit.server, adapter_not_loaded()).await.is_err());
    }
}
