//! Errors: one type for all of them.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use prost::Message;
pub use tonic::Code;

use crate::proto::google::rpc;
use crate::result::{Completion, duration};

/// What a call, or one request of a session, ended with.
///
/// It has gRPC's [code](Error::code), the server's [reason](Error::reason), the refused [fields](Error::fields), and its
/// advice [when to try again](Error::retry_after). A streamed request that failed has the output until then in
/// [`partial`](Error::partial).
#[derive(Clone)]
pub struct Error(Box<Detail>);

/// What kind of error it is, beside its code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A status: the server sent it, or the connection to it failed (then there is no [reason](Error::reason)).
    Status,
    /// A value that this library refused, before anything was sent.
    Invalid,
    /// The client or the session was closed.
    Closed,
    /// Another stream attached the request: its results continue there.
    Moved,
    /// The server broke the contract: an event was missing, came twice or out of order.
    Protocol,
}

/// A refused field of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldViolation {
    /// Its path in the message, such as `spec.sampling.top_p`.
    pub field: String,
    /// What to change.
    pub description: String,
}

#[derive(Clone)]
struct Detail {
    kind: ErrorKind,
    code: Code,
    message: String,
    reason: String,
    metadata: HashMap<String, String>,
    fields: Vec<FieldViolation>,
    retry_after: Option<Duration>,
    never_again: bool,
    request_id: String,
    partial: Option<Completion>,
}

pub(crate) const ADAPTER_NOT_LOADED: &str = "ADAPTER_NOT_LOADED";
pub(crate) const WRONG_INSTANCE: &str = "WRONG_INSTANCE";
const MOVED: &str = "REQUEST_MOVED";

impl Error {
    /// gRPC's code. A code that is newer than this library is [`Code::Unknown`].
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// What kind of error it is.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What happened, in words.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The server's machine-readable reason, such as `QUEUE_FULL`. Empty: it gave none, or the error was made here or on
    /// the way.
    pub fn reason(&self) -> &str {
        &self.0.reason
    }

    /// More values that belong to the reason. The operator looks for `error_id`.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.0.metadata
    }

    /// The fields of the request that were refused.
    pub fn fields(&self) -> &[FieldViolation] {
        &self.0.fields
    }

    /// When to try again, if the server said so. Zero is not `None`.
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// The request that failed. Empty: not known, or the call was about none.
    pub fn request_id(&self) -> &str {
        &self.0.request_id
    }

    /// The output that had arrived before a streamed request failed.
    pub fn partial(&self) -> Option<&Completion> {
        self.0.partial.as_ref()
    }

    pub(crate) fn new(kind: ErrorKind, code: Code, message: impl Into<String>) -> Self {
        Self(Box::new(Detail {
            kind,
            code,
            message: message.into(),
            reason: String::new(),
            metadata: HashMap::new(),
            fields: Vec::new(),
            retry_after: None,
            never_again: false,
            request_id: String::new(),
            partial: None,
        }))
    }

    pub(crate) fn status(code: Code, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Status, code, message)
    }

    /// For a value that cannot be put in a message.
    pub(crate) fn invalid(field: &str, description: impl Into<String>) -> Self {
        let description = description.into();
        let mut made = Self::new(ErrorKind::Invalid, Code::InvalidArgument, format!("{field}: {description}"));
        made.0.fields = vec![FieldViolation { field: field.to_owned(), description }];
        made
    }

    /// For a use of what was closed.
    pub(crate) fn closed(what: &str) -> Self {
        Self::new(ErrorKind::Closed, Code::Unavailable, format!("{what} is closed"))
    }

    pub(crate) fn deadline() -> Self {
        Self::status(Code::DeadlineExceeded, "the time for the call has passed")
    }

    pub(crate) fn moved(request_id: &str) -> Self {
        let told = format!("the results of request {request_id:?} moved to a stream that attached to it");
        let mut made = Self::new(ErrorKind::Moved, Code::Aborted, told);
        made.0.reason = MOVED.to_owned();
        made.of(request_id)
    }

    pub(crate) fn of(mut self, request_id: &str) -> Self {
        self.0.request_id = request_id.to_owned();
        self
    }

    /// The error for one of several requests that it ended.
    pub(crate) fn copy_for(&self, request_id: &str) -> Self {
        let mut made = self.clone().of(request_id);
        made.0.partial = None;
        made
    }

    pub(crate) fn with_message(mut self, message: String) -> Self {
        self.0.message = message;
        self
    }

    pub(crate) fn with_partial(mut self, partial: Completion) -> Self {
        self.0.partial.get_or_insert(partial);
        self
    }

    /// Reads a status and its details. What cannot be read of them is passed over.
    pub(crate) fn from_rpc(received: &rpc::Status) -> Self {
        let code = Code::from_i32(received.code); // a code that is not known is UNKNOWN
        let message = if received.message.is_empty() { code.to_string() } else { received.message.clone() };
        let mut made = Self::status(code, message);
        let detail = &mut *made.0;
        for packed in &received.details {
            match packed.type_url.rsplit('/').next().unwrap_or_default() {
                "google.rpc.ErrorInfo" => {
                    if let Ok(info) = rpc::ErrorInfo::decode(packed.value.as_slice()) {
                        (detail.reason, detail.metadata) = (info.reason, info.metadata);
                    }
                }
                "google.rpc.BadRequest" => {
                    if let Ok(bad) = rpc::BadRequest::decode(packed.value.as_slice()) {
                        let fields = bad.field_violations.into_iter();
                        detail.fields.extend(
                            fields.map(|one| FieldViolation { field: one.field, description: one.description }),
                        );
                    }
                }
                "google.rpc.RetryInfo" => {
                    if let Ok(retry) = rpc::RetryInfo::decode(packed.value.as_slice()) {
                        detail.retry_after = retry.retry_delay.and_then(duration);
                    }
                }
                _ => {}
            }
        }
        if detail.reason == MOVED {
            detail.kind = ErrorKind::Moved;
        }
        made
    }

    /// Reads the error of a call to a server.
    pub(crate) fn from_call(received: &tonic::Status, target: &str) -> Self {
        if std::error::Error::source(received).is_some() {
            return Self::status(
                Code::Unavailable,
                format!("cannot reach a Headrace server at {target}: {}", causes(received)),
            );
        }
        let mut told = rpc::Status::decode(received.details()).unwrap_or_default();
        if told.code != received.code() as i32 {
            told =
                rpc::Status { code: received.code() as i32, message: received.message().to_owned(), details: vec![] };
        }
        let mut made = Self::from_rpc(&told);
        // tonic's own word for an answer that is larger than the client takes; the contract has another code for it.
        let is_large = received.message().starts_with("Error, decoded message length too large");
        if made.code() == Code::OutOfRange && received.details().is_empty() && is_large {
            made.0.code = Code::ResourceExhausted;
        }
        if made.code() == Code::Unavailable && made.reason().is_empty() {
            made.0.message = format!("cannot reach a Headrace server at {target}: {}", made.0.message);
        }
        if let Some(pushback) = received.metadata().get("grpc-retry-pushback-ms") {
            made.heed(pushback.to_str().ok().and_then(|text| text.parse::<i64>().ok()));
        }
        made
    }

    /// Takes gRPC's own advice: so many milliseconds; or, if it is negative, not to come again.
    fn heed(&mut self, pushback: Option<i64>) {
        match pushback.and_then(|told| u64::try_from(told).ok()) {
            None => self.0.never_again = true,
            Some(millis) => self.0.retry_after = self.0.retry_after.max(Some(Duration::from_millis(millis))),
        }
    }

    /// Whether the same may succeed later, or elsewhere: the server was lost or is not ready, or it has no room and says
    /// when to come again.
    pub(crate) fn is_worth_a_retry(&self) -> bool {
        let is_of_a_server = matches!(self.0.kind, ErrorKind::Status | ErrorKind::Moved);
        match self.0.code {
            Code::Unavailable => is_of_a_server && !self.0.never_again,
            Code::ResourceExhausted => self.0.retry_after.is_some() && !self.0.never_again,
            _ => false,
        }
    }

    /// The error of a stream's end: one that was lost is `UNAVAILABLE`, whatever gRPC calls that.
    pub(crate) fn of_stream(self) -> Self {
        if self.is_loss() && self.0.code != Code::Unavailable {
            Self::status(Code::Unavailable, format!("the stream was lost: {}", self.0.message))
        } else {
            self
        }
    }

    /// Whether a stream that ended with this was lost: the one place that says so. What a server itself says has a
    /// reason.
    pub(crate) fn is_loss(&self) -> bool {
        let has_no_reason = self.0.reason.is_empty();
        self.0.kind == ErrorKind::Status
            && match self.0.code {
                Code::Unavailable | Code::Cancelled => true,
                Code::Internal | Code::Unknown => has_no_reason, // gRPC's words for some connections that broke
                _ => false,
            }
    }
}

/// The messages of an error and of what caused it.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let told = cause.to_string();
        if !text.contains(&told) {
            text = format!("{text}: {told}");
        }
        next = cause.source();
    }
    text
}

/// A duration as the contract has it.
pub(crate) fn proto_duration(given: Duration) -> prost_types::Duration {
    prost_types::Duration {
        seconds: i64::try_from(given.as_secs()).unwrap_or(i64::MAX),
        nanos: given.subsec_nanos().cast_signed(),
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.reason.is_empty() {
            write!(f, "{:?}: {}", self.0.code, self.0.message)
        } else {
            write!(f, "{:?} ({}): {}", self.0.code, self.0.reason, self.0.message)
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("code", &self.0.code)
            .field("reason", &self.0.reason)
            .field("message", &self.0.message)
            .field("metadata", &self.0.metadata)
            .field("fields", &self.0.fields)
            .field("retry_after", &self.0.retry_after)
            .field("request_id", &self.0.request_id)
            .finish_non_exhaustive()
    }
}

impl std::error::Error for Error {}
