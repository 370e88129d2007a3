//! How a client is set up.
//!
//! What passes through here: options come in one by one, and leave as the [`Settings`] of all of a client's calls.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tonic::metadata::{Ascii, MetadataKey, MetadataMap, MetadataValue};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::error::Error;
use crate::target::Place;
use crate::trace::{TraceContext, Tracer};

/// Sets up a [`Client`](crate::Client).
///
/// ```no_run
/// # fn main() -> Result<(), headrace::Error> {
/// let client = headrace::Client::builder().tls().token_file("/run/secrets/token").retries(5).connect("dns:///headrace")?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct ClientBuilder {
    tls: Option<Tls>,
    ca_file: Option<PathBuf>,
    token: Option<Token>,
    may_leak_token: bool,
    metadata: Vec<(String, String)>,
    retries: u32,
    call_timeout: Option<Duration>,
    max_message_bytes: usize,
    keepalive: Option<Duration>,
    tracer: Tracer,
}

#[derive(Clone, Debug, Default)]
struct Tls {
    ca: Option<Vec<u8>>,
    server_name: Option<String>,
    identity: Option<Identity>,
}

impl Default for ClientBuilder {
    fn default() -> Self {
        Self {
            tls: None,
            ca_file: None,
            token: None,
            may_leak_token: false,
            metadata: Vec::new(),
            retries: 3,
            call_timeout: Some(Duration::from_secs(30)),
            max_message_bytes: 16 << 20,
            keepalive: Some(Duration::from_secs(45)),
            tracer: Tracer::default(),
        }
    }
}

impl ClientBuilder {
    /// Encrypts the connection, and trusts the system's authorities. Without this, and without an option below that needs
    /// TLS, connections are plaintext.
    pub fn tls(mut self) -> Self {
        self.tls.get_or_insert_default();
        self
    }

    /// Encrypts the connection, and trusts these authorities, in PEM form, instead of the system's.
    pub fn ca_pem(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.tls.get_or_insert_default().ca = Some(pem.into());
        self
    }

    /// Encrypts the connection, and trusts the authorities in a PEM file instead of the system's.
    pub fn ca_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.ca_file = Some(path.into());
        self.tls()
    }

    /// Shows a certificate of one's own to the server, with its key, both in PEM form. It needs TLS, and turns it on.
    pub fn identity_pem(mut self, certificate: impl AsRef<[u8]>, key: impl AsRef<[u8]>) -> Self {
        self.tls.get_or_insert_default().identity = Some(Identity::from_pem(certificate, key));
        self
    }

    /// The name that the server's certificate has, if it is not that of the target. It needs TLS, and turns it on.
    pub fn server_name(mut self, name: impl Into<String>) -> Self {
        self.tls.get_or_insert_default().server_name = Some(name.into());
        self
    }

    /// Sends a token with every call. Without TLS it is refused, unless all servers are on this machine.
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(Token::Fixed(token.into()));
        self
    }

    /// Sends the token that a file has, without blanks around it. The file is read again when it has changed, so that a
    /// token can be replaced while the client is in use.
    pub fn token_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.token = Some(Token::File(Arc::new(TokenFile { path: path.into(), last: Mutex::default() })));
        self
    }

    /// Lets the token travel to other machines in clear text.
    pub fn plaintext_token(mut self) -> Self {
        self.may_leak_token = true;
        self
    }

    /// Sends a key and a value with every call.
    pub fn metadata(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.metadata.push((key.into(), value.into()));
        self
    }

    /// How often a call that may be tried again without harm is tried again; default 3. That is a unary call that ended
    /// with `UNAVAILABLE`, or with `RESOURCE_EXHAUSTED` and advice when to come again; and, with several servers, a stream
    /// that has given nothing yet.
    pub fn retries(mut self, times: u32) -> Self {
        self.retries = times;
        self
    }

    /// How long short calls may take: all but those that wait for output. Default 30 s; `None`: no limit.
    pub fn call_timeout(mut self, limit: impl Into<Option<Duration>>) -> Self {
        self.call_timeout = limit.into();
        self
    }

    /// The size of the largest message, both ways; default 16 MiB.
    pub fn max_message_bytes(mut self, size: usize) -> Self {
        self.max_message_bytes = size;
        self
    }

    /// How often a quiet connection is asked whether it is there; default 45 s. `None`: never.
    pub fn keepalive(mut self, every: impl Into<Option<Duration>>) -> Self {
        self.keepalive = every.into();
        self
    }

    /// Asks for the trace context of each call when it is made; see [`TraceContext`]. With the feature `opentelemetry`
    /// that of OpenTelemetry's current context is sent without this.
    pub fn trace_context(mut self, hook: impl Fn() -> Option<TraceContext> + Send + Sync + 'static) -> Self {
        self.tracer = Tracer::new(hook);
        self
    }

    pub(crate) fn settings(mut self, places: &[Place]) -> Result<Settings, Error> {
        if let (Some(path), Some(tls)) = (&self.ca_file, &mut self.tls) {
            tls.ca = Some(fs::read(path).map_err(|error| unreadable("ca_file", path, &error))?);
        }
        if let (Some(_), None, false) = (&self.token, &self.tls, self.may_leak_token)
            && let Some(far) = places.iter().find(|place| !place.is_local())
        {
            let told =
                format!("would travel to {} in clear text: use tls(), or plaintext_token() to accept that", far.name());
            return Err(Error::invalid("token", told));
        }
        let mut metadata = Vec::with_capacity(self.metadata.len());
        for (key, value) in self.metadata {
            let wrong = || Error::invalid("metadata", format!("{key:?} or its value is not ASCII"));
            let name: MetadataKey<Ascii> = key.parse().map_err(|_| wrong())?;
            metadata.push((name, value.parse().map_err(|_| wrong())?));
        }
        let made = Settings {
            tls: self.tls.map(Tls::config),
            token: self.token,
            metadata,
            retries: self.retries,
            call_timeout: self.call_timeout,
            max_message_bytes: self.max_message_bytes,
            keepalive: self.keepalive,
            tracer: self.tracer,
        };
        made.add_to(&mut MetadataMap::new(), None)?; // a token that cannot be read or sent is told now
        Ok(made)
    }
}

impl Tls {
    fn config(self) -> ClientTlsConfig {
        let mut made = match self.ca {
            Some(pem) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)),
            None => ClientTlsConfig::new().with_native_roots(),
        };
        if let Some(name) = self.server_name {
            made = made.domain_name(name);
        }
        if let Some(identity) = self.identity {
            made = made.identity(identity);
        }
        made
    }
}

/// What was set up, once it is known to be right.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) tls: Option<ClientTlsConfig>,
    token: Option<Token>,
    metadata: Vec<(MetadataKey<Ascii>, MetadataValue<Ascii>)>,
    pub(crate) retries: u32,
    pub(crate) call_timeout: Option<Duration>,
    pub(crate) max_message_bytes: usize,
    pub(crate) keepalive: Option<Duration>,
    pub(crate) tracer: Tracer,
}

impl Settings {
    /// A message with what travels in the metadata of each call.
    pub(crate) fn outgoing<T>(&self, message: T, trace: Option<&TraceContext>) -> Result<tonic::Request<T>, Error> {
        let mut request = tonic::Request::new(message);
        self.add_to(request.metadata_mut(), trace)?;
        Ok(request)
    }

    fn add_to(&self, metadata: &mut MetadataMap, trace: Option<&TraceContext>) -> Result<(), Error> {
        if let Some(trace) = trace {
            for (name, value) in [("traceparent", &trace.traceparent), ("tracestate", &trace.tracestate)] {
                if let (false, Ok(value)) = (value.is_empty(), value.parse()) {
                    metadata.insert(name, value);
                }
            }
        }
        for (key, value) in &self.metadata {
            metadata.append(key.clone(), value.clone());
        }
        if let Some(token) = &self.token {
            let bearer = format!("Bearer {}", token.read()?).parse();
            metadata.insert("authorization", bearer.map_err(|_| Error::invalid("token", "is not ASCII"))?);
        }
        Ok(())
    }
}

#[derive(Clone)]
enum Token {
    Fixed(String),
    File(Arc<TokenFile>),
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token") // it is a secret
    }
}

struct TokenFile {
    path: PathBuf,
    last: Mutex<Option<(SystemTime, u64, String)>>,
}

impl Token {
    fn read(&self) -> Result<String, Error> {
        match self {
            Self::Fixed(token) => Ok(token.clone()),
            Self::File(file) => file.read(),
        }
    }
}

impl TokenFile {
    /// Looks at the file with each call: that takes microseconds.
    fn read(&self) -> Result<String, Error> {
        let failed = |error| unreadable("token_file", &self.path, &error);
        let found = fs::metadata(&self.path).map_err(failed)?;
        let changed = found.modified().map_err(failed)?;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((then, size, token)) = &*last
            && (*then, *size) == (changed, found.len())
        {
            return Ok(token.clone());
        }
        let token = fs::read_to_string(&self.path).map_err(failed)?.trim().to_owned();
        if token.is_empty() {
            return Err(Error::invalid("token_file", format!("{} is empty", self.path.display())));
        }
        *last = Some((changed, found.len(), token.clone()));
        Ok(token)
    }
}

fn unreadable(field: &str, path: &Path, error: &std::io::Error) -> Error {
    Error::invalid(field, format!("{} cannot be read: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::target::Target;

    fn sent(settings: &Settings, trace: Option<&TraceContext>) -> HashMap<String, String> {
        let headers = settings.outgoing((), trace).unwrap().into_parts().0.into_headers();
        headers.iter().map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned())).collect()
    }

    fn settings(builder: ClientBuilder, target: &str) -> Result<Settings, Error> {
        builder.settings(&Target::from(target).places()?)
    }

    #[test]
    fn a_token_does_not_travel_to_other_machines_in_clear_text() {
        let builder = || ClientBuilder::default().token("secret");
        let refused = settings(builder(), "localhost,example.com").unwrap_err();
        assert!(refused.message().contains("example.com:50051 in clear text"), "{refused}");
        for (builder, target) in [
            (builder(), "localhost,[::1]:5,unix:/a"),
            (builder().tls(), "example.com"),
            (builder().plaintext_token(), "example.com"),
        ] {
            let settings = settings(builder, target).unwrap();
            assert_eq!(sent(&settings, None)["authorization"], "Bearer secret");
            assert!(!format!("{settings:?}").contains("secret"));
        }
    }

    #[test]
    fn a_token_file_is_read_again_when_it_has_changed() {
        let path = std::env::temp_dir().join(format!("headrace-token-{}", std::process::id()));
        fs::write(&path, " one\n").unwrap();
        let made = settings(ClientBuilder::default().token_file(&path), "localhost").unwrap();
        assert_eq!(sent(&made, None)["authorization"], "Bearer one");
        fs::write(&path, "another").unwrap();
        assert_eq!(sent(&made, None)["authorization"], "Bearer another");
        fs::write(&path, " ").unwrap();
        assert_eq!(settings(ClientBuilder::default().token_file(&path), "localhost").unwrap_err().fields().len(), 1);
        fs::remove_file(&path).unwrap();
        assert!(made.outgoing((), None).is_err());
    }

    #[test]
    fn what_travels_with_a_call() {
        let made = settings(ClientBuilder::default().metadata("x-team", "mill"), "localhost").unwrap();
        let trace = TraceContext { traceparent: "00-1-2-01".to_owned(), tracestate: String::new() };
        let expected = [("x-team", "mill"), ("traceparent", "00-1-2-01")];
        assert_eq!(sent(&made, Some(&trace)), expected.map(|(key, value)| (key.to_owned(), value.to_owned())).into());
        assert!(settings(ClientBuilder::default().metadata("x team", "mill"), "localhost").is_err());
    }
}
