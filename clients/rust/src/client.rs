//! The client: what is shared by its calls, streams and sessions.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::call::{About, Attempts};
use crate::capability::{GENERATE_REQUEST, required_by};
use crate::error::Error;
use crate::options::{ClientBuilder, Settings};
use crate::placement::keys_of;
use crate::pool::Pool;
use crate::proto;
use crate::request::Request;
use crate::result::Completion;
use crate::session::Shared as Session;
use crate::target::{Place, Target};
use crate::transport::Tasks;

/// Calls one server, or chooses among several, by the rules of `docs/fleet.md` in its repository. One client for a process is enough: it has one
/// connection for each server. It is cheap to clone; clones are the same client.
///
/// Its connections end when it and all sessions, handles and streams of it were dropped, or with [`close`](Self::close).
#[derive(Clone)]
pub struct Client {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) pool: Arc<Pool>,
    sessions: Mutex<Sessions>,
}

#[derive(Default)]
struct Sessions {
    open: HashMap<u64, Weak<Session>>,
    next: u64,
    is_closed: bool,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("servers", &self.inner.pool.names()).finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.pool.close();
        self.pool.tasks.stop();
    }
}

impl Inner {
    /// Keeps a session, to end it with the client.
    pub(crate) fn open(&self, session: impl FnOnce(u64) -> Arc<Session>) -> Result<Arc<Session>, Error> {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        if sessions.is_closed {
            return Err(Error::closed("the client"));
        }
        let number = sessions.next;
        sessions.next += 1;
        let made = session(number);
        sessions.open.insert(number, Arc::downgrade(&made));
        self.pool.lock().listeners.insert(number, Arc::downgrade(&made));
        Ok(made)
    }

    pub(crate) fn forget(&self, number: u64) {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner).open.remove(&number);
        self.pool.lock().listeners.remove(&number);
    }
}

impl Client {
    /// Makes a client with the usual options. It does not wait for a connection. It must be called within a Tokio runtime,
    /// in which the client's connections live.
    ///
    /// # Errors
    ///
    /// The target is not valid, or there is no runtime.
    pub fn connect(target: impl Into<Target>) -> Result<Self, Error> {
        Self::builder().connect(target)
    }

    /// Sets a client up.
    pub fn builder() -> ClientBuilder {
        ClientBuilder::default()
    }

    pub(crate) fn with(settings: Settings, places: Vec<Place>) -> Result<Self, Error> {
        let pool = Pool::new(settings, places, Tasks::new()?)?;
        Ok(Self { inner: Arc::new(Inner { pool, sessions: Mutex::default() }) })
    }

    /// Ends all connections and what runs on them: sessions and calls that are open fail with `UNAVAILABLE`. When it
    /// returns, nothing of the client is left.
    pub async fn close(&self) {
        let open: Vec<_> = {
            let mut sessions = self.inner.sessions.lock().unwrap_or_else(PoisonError::into_inner);
            sessions.is_closed = true;
            sessions.open.drain().filter_map(|(_, session)| session.upgrade()).collect()
        };
        for session in open {
            session.abort(&Error::closed("the client"));
        }
        self.inner.pool.close();
        self.inner.pool.tasks.stop();
        self.inner.pool.tasks.ended().await;
    }

    /// Runs one request and returns its whole result. Dropping the future ends the request.
    ///
    /// # Errors
    ///
    /// The request was refused or failed; see [`Error`].
    pub async fn generate(&self, request: impl Into<Request>) -> Result<Completion, Error> {
        let pool = &self.inner.pool;
        let spec = request.into().build()?;
        let about = About { request_id: spec.request_id.clone(), trace: pool.settings.tracer.now(), deadline: None };
        let tries = Attempts::new(pool, keys_of(&spec), None);
        let mut message = proto::GenerateRequest { spec: Some(spec), ..Default::default() };
        message.required_capabilities = required_by(&message, GENERATE_REQUEST, &[]);
        let send = |server: Arc<crate::pool::Server>, request| async move {
            server.connection.generation().generate(request).await
        };
        let (answer, _) = pool.call(tries, &about, &message, send).await?;
        pool.lock().note_owner(&about.request_id, &answer.instance_id);
        Ok(Completion::from_proto(answer))
    }
}
