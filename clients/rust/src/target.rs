//! Targets: what a user writes, and the addresses of servers that it means.

use std::net::{IpAddr, SocketAddr};

use crate::error::Error;

const DEFAULT_PORT: &str = "50051";
/// The server of a client whose target is empty, if the variable `HEADRACE_TARGET` is not set.
pub const DEFAULT_TARGET: &str = "127.0.0.1:50051";

/// Where a client's servers are: `host:port`, `unix:/path` or a path; `dns:///name:port`, each of whose addresses is a
/// server; several of these, as a list or with commas between them. A missing port is 50051. An empty text is the
/// variable `HEADRACE_TARGET`, else [`DEFAULT_TARGET`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target(Vec<String>);

impl From<&str> for Target {
    fn from(text: &str) -> Self {
        Self(vec![text.to_owned()])
    }
}

impl From<String> for Target {
    fn from(text: String) -> Self {
        Self(vec![text])
    }
}

impl From<&String> for Target {
    fn from(text: &String) -> Self {
        Self(vec![text.clone()])
    }
}

impl<S: Into<String>> From<Vec<S>> for Target {
    fn from(texts: Vec<S>) -> Self {
        Self(texts.into_iter().map(Into::into).collect())
    }
}

impl<S: Into<String>, const N: usize> From<[S; N]> for Target {
    fn from(texts: [S; N]) -> Self {
        Self(texts.into_iter().map(Into::into).collect())
    }
}

/// What a part of a target names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// One server.
    Server(Address),
    /// A name, each of whose addresses is a server.
    Name { host: String, port: u16 },
}

/// Where one server is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Address {
    Unix(String),
    /// A host, as a user wrote it, and its port.
    Host(String),
    /// An address to which a name was resolved; the name is on its certificate.
    Resolved(SocketAddr, String),
}

impl Address {
    /// What it is called, in messages and as the name of a server whose instance is not known.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Unix(path) => format!("unix:{path}"),
            Self::Host(name) => name.clone(),
            Self::Resolved(at @ SocketAddr::V4(_), _) => format!("ipv4:{at}"),
            Self::Resolved(at @ SocketAddr::V6(_), _) => format!("ipv6:{at}"),
        }
    }
}

impl Place {
    /// Whether it is on this machine: a Unix socket or a loopback address.
    pub(crate) fn is_local(&self) -> bool {
        let host = match self {
            Self::Server(Address::Unix(_)) => return true,
            Self::Server(Address::Resolved(at, _)) => return at.ip().is_loopback(),
            Self::Server(Address::Host(name)) => name.rsplit_once(':').map_or(name.as_str(), |(host, _)| host),
            Self::Name { host, .. } => host,
        };
        let parsed: Result<IpAddr, _> = host.trim_matches(['[', ']']).parse();
        host == "localhost" || parsed.is_ok_and(|ip| ip.is_loopback())
    }

    pub(crate) fn name(&self) -> String {
        match self {
            Self::Server(address) => address.name(),
            Self::Name { host, port } => format!("dns:///{host}:{port}"),
        }
    }

    fn parse(text: &str) -> Result<Self, Error> {
        const URLS: [&str; 4] = ["http://", "https://", "grpc://", "grpcs://"];
        if text.is_empty() {
            return Err(Error::invalid("target", "is empty; use host:port, dns:///host:port or unix:/path"));
        }
        if URLS.iter().any(|url| text.starts_with(url)) {
            let told = format!(
                "{text:?} is a URL; use host:port, dns:///host:port or unix:/path, and tls() if the server is encrypted"
            );
            return Err(Error::invalid("target", told));
        }
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path); // unix:///path
            return Ok(Self::Server(Address::Unix(path.to_owned())));
        }
        if text.starts_with('/') || text.starts_with("./") {
            return Ok(Self::Server(Address::Unix(text.to_owned())));
        }
        let is_name = text.starts_with("dns:///");
        let rest = ["dns:///", "dns:", "ipv4:", "ipv6:"].iter().find_map(|scheme| text.strip_prefix(scheme));
        let name = with_port(rest.unwrap_or(text));
        let wrong =
            || Error::invalid("target", format!("{text:?}: a name and a port are needed, as in headrace:50051"));
        let (host, port) = name.rsplit_once(':').ok_or_else(wrong)?;
        let port: u16 = port.parse().map_err(|_| wrong())?;
        let is_bracketed = host.starts_with('[') && host.ends_with(']');
        if host.is_empty() || (!is_bracketed && host.contains([':', '/', '[', ']'])) {
            return Err(wrong());
        }
        if is_name {
            return Ok(Self::Name { host: host.to_owned(), port });
        }
        Ok(Self::Server(Address::Host(name)))
    }
}

fn with_port(name: &str) -> String {
    let has_port =
        name.rfind(':').is_some_and(|colon| !name.ends_with(']') && name.rfind(']').is_none_or(|at| at < colon));
    if has_port { name.to_owned() } else { format!("{name}:{DEFAULT_PORT}") }
}

impl Target {
    /// The places that it names, each once.
    pub(crate) fn places(&self) -> Result<Vec<Place>, Error> {
        let mut text = self.0.join(",");
        if text.is_empty() {
            text = std::env::var("HEADRACE_TARGET").unwrap_or_default();
        }
        if text.is_empty() {
            text = DEFAULT_TARGET.to_owned();
        }
        let mut places = Vec::new();
        for part in text.split(',') {
            let one = Place::parse(part.trim())?;
            if !places.contains(&one) {
                places.push(one);
            }
        }
        Ok(places)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(target: impl Into<Target>) -> Vec<String> {
        target.into().places().unwrap().iter().map(Place::name).collect()
    }

    #[test]
    fn targets_are_read() {
        assert_eq!(names("localhost"), ["localhost:50051"]);
        assert_eq!(names("a:1, b ,a:1"), ["a:1", "b:50051"]);
        assert_eq!(names(["a", "[::1]"]), ["a:50051", "[::1]:50051"]);
        assert_eq!(names("[::1]:7"), ["[::1]:7"]);
        assert_eq!(names("ipv6:[::1]:7"), ["[::1]:7"]);
        assert_eq!(names("/run/x,unix:/y,unix:///z,unix:rel"), ["unix:/run/x", "unix:/y", "unix:/z", "unix:rel"]);
        assert_eq!(names("dns:///headrace"), ["dns:///headrace:50051"]);
    }

    #[test]
    fn what_is_no_target_is_refused() {
        for text in ["http://a", "a,", "dns:///:5", "dns:///a:x", "::1", "a:70000"] {
            assert!(Target::from(text).places().is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_on_this_machine() {
        for text in ["localhost", "127.0.0.1:5", "[::1]:5", "unix:/a", "dns:///localhost"] {
            assert!(Target::from(text).places().unwrap()[0].is_local(), "{text}");
        }
        for text in ["example.com", "10.0.0.1:5", "dns:///headrace"] {
            assert!(!Target::from(text).places().unwrap()[0].is_local(), "{text}");
        }
    }
}
