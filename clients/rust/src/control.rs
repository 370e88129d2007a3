//! What operators do at a server: they say which adapters requests may name.

use std::sync::Arc;
use std::time::Duration;

use crate::call::{About, Attempts};
use crate::client::Client;
use crate::error::{Error, proto_duration};
use crate::pool::Server;
use crate::proto;

/// What operators do at a client's one server; [`Client::control`] makes it. Its calls are not tried again.
#[derive(Clone, Debug)]
pub struct Control {
    client: Client,
}

/// How an adapter is loaded. The default: it is neither pinned nor takes another's place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct LoadOptions {
    pinned: bool,
    replace: bool,
}

impl LoadOptions {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether it stays when others need the memory.
    pub fn pinned(mut self, pinned: bool) -> Self {
        self.pinned = pinned;
        self
    }

    /// Whether it may take the place of a loaded adapter with this name. Requests that were accepted before go on with what
    /// they began with.
    pub fn replace(mut self, replace: bool) -> Self {
        self.replace = replace;
        self
    }
}

impl Client {
    /// What is for operators.
    ///
    /// # Errors
    ///
    /// The client has several servers: make one of the address of that which is meant.
    pub fn control(&self) -> Result<Control, Error> {
        if self.inner.pool.many {
            return Err(Error::invalid(
                "target",
                "names several servers; control is of one, so make a client of its address",
            ));
        }
        Ok(Control { client: self.clone() })
    }
}

impl Control {
    /// Loads an adapter, and returns when requests may name it: the adapter, and the names of those that had to go because
    /// it needed the memory. The source is the name of its directory below the server's `--adapter-root`.
    ///
    /// # Errors
    ///
    /// `ALREADY_EXISTS`: the name is taken. `FAILED_PRECONDITION`: it cannot be served; the message gives the reason.
    /// `RESOURCE_EXHAUSTED`: there is no room for it. The call failed; see [`Error`].
    pub async fn load_adapter(
        &self,
        name: impl Into<String>,
        source: impl Into<String>,
        options: LoadOptions,
    ) -> Result<proto::LoadAdapterResponse, Error> {
        let message = proto::LoadAdapterRequest {
            name: name.into(),
            source: source.into(),
            pinned: options.pinned,
            replace: options.replace,
            required_capabilities: Vec::new(),
        };
        let send =
            |server: Arc<Server>, request| async move { server.connection.control().load_adapter(request).await };
        self.once(&message, send).await
    }

    /// Unloads an adapter: requests can no longer name it. Returns how many have it: these go on for as long as the timeout
    /// says (`None`: to their end), and are then cancelled.
    ///
    /// # Errors
    ///
    /// `NOT_FOUND`: the server has no adapter with this name. The call failed; see [`Error`].
    pub async fn unload_adapter(&self, name: impl Into<String>, timeout: Option<Duration>) -> Result<u64, Error> {
        let message = proto::UnloadAdapterRequest {
            name: name.into(),
            timeout: timeout.map(proto_duration),
            required_capabilities: Vec::new(),
        };
        let send =
            |server: Arc<Server>, request| async move { server.connection.control().unload_adapter(request).await };
        Ok(self.once(&message, send).await?.live_requests)
    }

    async fn once<M, A, F, S>(&self, message: &M, send: S) -> Result<A, Error>
    where
        M: Clone,
        S: Fn(Arc<Server>, tonic::Request<M>) -> F,
        F: Future<Output = Result<tonic::Response<A>, tonic::Status>>,
    {
        let pool = &self.client.inner.pool;
        let deadline = pool.short_deadline();
        let about = About { deadline, trace: pool.settings.tracer.now(), ..About::default() };
        Ok(pool.call(Attempts::new(pool, None, deadline).once(), &about, message, send).await?.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn control_is_of_one_server() {
        assert!(Client::connect("a:1").unwrap().control().is_ok());
        let refused = Client::connect("a:1,b:1").unwrap().control().unwrap_err();
        assert_eq!(refused.fields()[0].field, "target");
    }
}
