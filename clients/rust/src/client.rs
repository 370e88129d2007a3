//! The client: what is shared by its calls, streams and sessions.
//!
//! What passes through here: options become a pool of servers, for which all calls are made. Sessions are not known here:
//! they listen at the pool, which tells them of its end.

use std::fmt;
use std::sync::Arc;

use crate::call::{About, Attempts};
use crate::capability::{GENERATE_REQUEST, required_by};
use crate::error::Error;
use crate::health;
use crate::options::ClientBuilder;
use crate::placement::keys_of;
use crate::pool::{Pool, Server};
use crate::proto;
use crate::request::Request;
use crate::result::Completion;
use crate::target::Target;
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

impl ClientBuilder {
    /// Makes the client. It does not wait for a connection. It must be called within a Tokio runtime, in which the client's
    /// connections live.
    ///
    /// # Errors
    ///
    /// The target or an option is not valid, a file cannot be read, a token would travel in clear text, or there is no
    /// runtime.
    pub fn connect(self, target: impl Into<Target>) -> Result<Client, Error> {
        let places = target.into().places()?;
        let pool = Pool::new(self.settings(&places)?, &places, Tasks::new()?)?;
        health::start(&pool, places);
        Ok(Client { inner: Arc::new(Inner { pool }) })
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

    /// Ends all connections and what runs on them: sessions and calls that are open fail with `UNAVAILABLE`. When it
    /// returns, nothing of the client is left.
    pub async fn close(&self) {
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
        let send = |server: Arc<Server>, request| async move { server.connection.generation().generate(request).await };
        let (answer, _) = pool.call(tries, &about, &message, send).await?;
        pool.lock().note_owner(&about.request_id, &answer.instance_id);
        Ok(Completion::from_proto(answer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_needs_a_runtime() {
        assert_eq!(Client::connect("localhost").unwrap_err().fields()[0].field, "runtime");
    }
}
