//! Connections: one channel for each server, and the tasks that they run, which end with the client.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use crate::error::Error;
use crate::options::Settings;
use crate::proto::control_service_client::ControlServiceClient;
use crate::proto::generation_service_client::GenerationServiceClient;
use crate::proto::model_service_client::ModelServiceClient;
use crate::target::Address;

const VERSION: &str = env!("CARGO_PKG_VERSION");
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// What a stream may have unread; and that of all streams of a connection together never holds one of them up.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
/// An error's details travel in a header.
const HEADER_BYTES: u32 = 64 << 10;

/// The client's tasks. They end when the client is closed, or its last user has gone.
#[derive(Clone, Debug)]
pub(crate) struct Tasks {
    runtime: Handle,
    stopped: Arc<watch::Sender<bool>>,
}

impl Tasks {
    pub(crate) fn new() -> Result<Self, Error> {
        let runtime = Handle::try_current()
            .map_err(|_| Error::invalid("runtime", "a client is made within a Tokio runtime: in an async function"))?;
        Ok(Self { runtime, stopped: Arc::new(watch::Sender::new(false)) })
    }

    /// Runs a task until it ends or the client does.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut stopped = self.stopped.subscribe();
        self.runtime.spawn(async move {
            tokio::select! {
                _ = stopped.wait_for(|is_stopped| *is_stopped) => {}
                () = task => {}
            }
            drop(stopped); // who waits for the tasks' end sees it when the task is gone
        });
    }

    pub(crate) fn stop(&self) {
        self.stopped.send_replace(true);
    }

    /// Returns when all tasks have gone.
    pub(crate) async fn ended(&self) {
        self.stopped.closed().await;
    }
}

impl hyper::rt::Executor<Pin<Box<dyn Future<Output = ()> + Send>>> for Tasks {
    fn execute(&self, task: Pin<Box<dyn Future<Output = ()> + Send>>) {
        self.spawn(task);
    }
}

/// A connection to one server. It connects with its first call, and again with the next call after it was lost.
#[derive(Clone, Debug)]
pub(crate) struct Connection {
    channel: Channel,
    max_message_bytes: usize,
}

impl Connection {
    pub(crate) fn new(address: &Address, settings: &Settings, tasks: &Tasks) -> Result<Self, Error> {
        let scheme = if settings.tls.is_some() { "https" } else { "http" };
        let authority = match address {
            Address::Host(name) => name.clone(),
            Address::Unix(_) => "localhost".to_owned(),
            Address::Resolved(at, name) => format!("{name}:{}", at.port()),
        };
        let wrong = |error: &dyn std::fmt::Display| Error::invalid("target", format!("{}: {error}", address.name()));
        let mut endpoint = Endpoint::from_shared(format!("{scheme}://{authority}"))
            .and_then(|made| made.user_agent(format!("headrace-rust/{VERSION}")))
            .map_err(|error| wrong(&error))?
            .executor(tasks.clone())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .http2_max_header_list_size(HEADER_BYTES)
            .connect_timeout(CONNECT_TIMEOUT);
        if let Some(every) = settings.keepalive {
            endpoint = endpoint.http2_keep_alive_interval(every).keep_alive_timeout(KEEPALIVE_TIMEOUT);
        }
        if let Some(tls) = &settings.tls {
            endpoint = endpoint.tls_config(tls.clone()).map_err(|error| wrong(&error))?;
        }
        let to = address.clone();
        let channel = match to {
            Address::Host(_) => endpoint.connect_lazy(),
            Address::Unix(path) => endpoint.connect_with_connector_lazy(service_fn(move |_| {
                let path = path.clone();
                async { UnixStream::connect(path).await.map(TokioIo::new) }
            })),
            Address::Resolved(at, _) => endpoint.connect_with_connector_lazy(service_fn(move |_| async move {
                let stream = TcpStream::connect(at).await?;
                stream.set_nodelay(true)?;
                Ok::<_, std::io::Error>(TokioIo::new(stream))
            })),
        };
        Ok(Self { channel, max_message_bytes: settings.max_message_bytes })
    }

    pub(crate) fn generation(&self) -> GenerationServiceClient<Channel> {
        GenerationServiceClient::new(self.channel.clone())
            .max_decoding_message_size(self.max_message_bytes)
            .max_encoding_message_size(self.max_message_bytes)
    }

    pub(crate) fn models(&self) -> ModelServiceClient<Channel> {
        ModelServiceClient::new(self.channel.clone())
            .max_decoding_message_size(self.max_message_bytes)
            .max_encoding_message_size(self.max_message_bytes)
    }

    pub(crate) fn control(&self) -> ControlServiceClient<Channel> {
        ControlServiceClient::new(self.channel.clone())
            .max_decoding_message_size(self.max_message_bytes)
            .max_encoding_message_size(self.max_message_bytes)
    }

    /// Asks whether the generation service is ready: gRPC's health protocol, of which this is all that is needed.
    pub(crate) async fn is_serving(&self, request: tonic::Request<HealthRequest>) -> Result<bool, tonic::Status> {
        let mut grpc = Grpc::new(self.channel.clone());
        let not_ready = |error: tonic::transport::Error| tonic::Status::from_error(error.into());
        grpc.ready().await.map_err(not_ready)?;
        let path = PathAndQuery::from_static("/grpc.health.v1.Health/Check");
        let codec = tonic_prost::ProstCodec::<HealthRequest, HealthResponse>::default();
        let answer = grpc.unary(request, path, codec).await?.into_inner();
        Ok(answer.status == SERVING)
    }
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HealthRequest {
    #[prost(string, tag = "1")]
    pub(crate) service: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct HealthResponse {
    #[prost(int32, tag = "1")]
    status: i32,
}

const SERVING: i32 = 1;

impl HealthRequest {
    pub(crate) fn of_generation() -> Self {
        Self { service: "headrace.v1.GenerationService".to_owned() }
    }
}
