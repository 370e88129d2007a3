//! Calls Headrace servers: text generation over gRPC, one request at a time or many on one stream.
//!
//! A [`Client`] has a connection to one server, or chooses among several. It [generates](Client::generate) whole results,
//! [streams](Client::stream) one request's output, runs many requests on one stream (a [`Session`]) or a bounded number of
//! them at a time (a [`Batch`]), and [calls tools](Client::run_tools).
//!
//! ```no_run
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), headrace::Error> {
//! use headrace::{Client, Request};
//!
//! let client = Client::connect("localhost:50051")?;
//! let completion = client.generate(Request::text("Once upon a time").max_tokens(32)).await?;
//! println!("{}", completion.text());
//! # Ok(())
//! # }
//! ```
//!
//! - **Streams.** [`Stream`], [`Handle`] and [`Batch`] are [`futures_core::Stream`]s, and have a `next` of their own, so
//!   that no extension trait is needed.
//! - **Drop.** Dropping a future or a stream ends its request; what the documentation of a name says otherwise, it says.
//! - **Errors** are of one type, [`Error`], which has the server's code, reason, refused fields and advice when to come
//!   again. What may be tried again without harm is tried again here; see [`ClientBuilder::retries`] and
//!   [`SessionOptions`].
//! - **Runtime.** A client is made within a Tokio runtime, in which its connections live. All types may be used from
//!   several tasks.
//! - **Trace context** (W3C) goes with each call, where [`ClientBuilder::trace_context`] or the feature `opentelemetry`
//!   says which.

mod batch;
mod by_id;
mod call;
mod capability;
mod chat;
mod client;
mod control;
mod error;
mod fold;
mod health;
mod listener;
mod model;
mod options;
mod placement;
mod pool;
pub mod proto;
mod recent;
mod request;
mod result;
mod session;
mod stream;
mod target;
mod tools;
mod trace;
mod transport;

pub use batch::{Batch, BatchOptions, Outcome};
pub use by_id::CancelStatus;
pub use chat::{Message, Role, Tool, ToolCall, ToolChoice, ToolMode};
pub use client::Client;
pub use control::{Control, LoadOptions};
pub use error::{Code, Error, ErrorKind, FieldViolation};
pub use options::ClientBuilder;
pub use request::{Format, Request};
pub use result::{
    Accepted, Candidate, Choice, Chunk, Completion, FinishReason, Prompt, Timings, Token, ToolCallPart, Usage,
};
pub use session::{Handle, Session, SessionOptions};
pub use stream::Stream;
pub use target::{DEFAULT_TARGET, Target};
pub use tools::{ToolRun, ToolRunEnd, ToolRunner};
pub use trace::TraceContext;

/// This library's version; it is in the user agent.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The quick start of README.md, built as a test of the documentation.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadMe;
