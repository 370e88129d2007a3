//! The tasks of a fleet: they look names up, and ask servers that are not ready whether they are.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout};
use tonic::Code;

use crate::error::Error;
use crate::pool::{Pool, Readiness, Server};
use crate::proto;
use crate::target::{Address, Place};
use crate::transport::HealthRequest;

const RESOLVE_EVERY: Duration = Duration::from_secs(3);
/// Between two look-ups, after failures.
const RESOLVE_PAUSE: Duration = Duration::from_millis(500);
/// Of a question for a server's health.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);

/// Looks names up, every few seconds and soon after failures. What cannot be looked up keeps its addresses.
pub(crate) async fn resolve(pool: Arc<Pool>, places: Vec<Place>) {
    let mut known: HashMap<String, Vec<Address>> = HashMap::new();
    loop {
        let mut addresses = Vec::new();
        for place in &places {
            match place {
                Place::Server(address) => addresses.push(address.clone()),
                Place::Name { host, port } => {
                    match look_up(host, *port).await {
                        Ok(found) => {
                            known.insert(place.name(), found);
                        }
                        Err(error) => pool.lock().unresolved = format!("{host} cannot be looked up: {error}"),
                    }
                    addresses.extend(known.get(&place.name()).cloned().unwrap_or_default());
                }
            }
        }
        if let Err(error) = pool.list(&addresses) {
            pool.lock().unresolved = error.to_string();
        }
        let _ = timeout(RESOLVE_EVERY, pool.kicked.notified()).await;
        tokio::time::sleep(RESOLVE_PAUSE).await;
    }
}

async fn look_up(host: &str, port: u16) -> Result<Vec<Address>, std::io::Error> {
    let found = tokio::net::lookup_host((host.trim_matches(['[', ']']), port)).await?;
    let mut addresses: Vec<Address> = Vec::new();
    for at in found {
        let one = Address::Resolved(SocketAddr::new(at.ip().to_canonical(), port), host.to_owned());
        if !addresses.contains(&one) {
            addresses.push(one);
        }
    }
    Ok(addresses)
}

/// Asks servers that are not ready whether they are: all that are due at the same time, so that the first requests find
/// all servers that are there.
pub(crate) async fn check(pool: Arc<Pool>) {
    let mut changed = pool.watch();
    loop {
        let now = Instant::now();
        let mut next = now + Duration::from_secs(3600);
        let mut due = Vec::new();
        for entry in &mut pool.lock().entries {
            if entry.state == Readiness::Joining {
                if entry.check_at <= now {
                    entry.wait_for_check(now);
                    due.push(Arc::clone(&entry.server));
                }
                next = next.min(entry.check_at);
            }
        }
        if due.is_empty() {
            tokio::select! {
                () = sleep_until(next) => {}
                _ = changed.changed() => {}
            }
        } else {
            ask_all(&pool, due).await;
        }
    }
}

async fn ask_all(pool: &Arc<Pool>, due: Vec<Arc<Server>>) {
    let mut asked = tokio::task::JoinSet::new();
    for server in &due {
        let (pool, server) = (Arc::clone(pool), Arc::clone(server));
        asked.spawn(async move { ask(&pool, &server).await });
    }
    asked.join_all().await;
    pool.notify();
    let listeners: Vec<_> = {
        let mut state = pool.lock();
        let is_ready = |server: &Arc<Server>| {
            state.entries.iter().any(|entry| entry.server.id == server.id && entry.state == Readiness::Ready)
        };
        if due.iter().any(is_ready) {
            state.listeners.retain(|_, session| session.strong_count() > 0);
            state.listeners.values().filter_map(std::sync::Weak::upgrade).collect()
        } else {
            Vec::new()
        }
    };
    for session in listeners {
        session.server_changed();
    }
}

/// Asks a server for its health, and a ready one for its instance and capacity.
async fn ask(pool: &Pool, server: &Server) {
    let late = || Error::status(Code::Unavailable, format!("the server at {} does not answer", server.name()));
    let told = timeout(CHECK_TIMEOUT, identify(pool, server)).await.unwrap_or_else(|_| Err(late()));
    let mut state = pool.lock();
    if let Some(entry) = state.entry(server.id) {
        entry.is_known = true;
    }
    match told {
        Ok((instance, capacity)) => state.joined(server.id, instance, capacity),
        Err(error) => {
            if let Some(entry) = state.entry(server.id) {
                entry.problem = Some(error);
            }
        }
    }
}

async fn identify(pool: &Pool, server: &Server) -> Result<(String, u64), Error> {
    let name = server.name();
    let request = pool.settings.outgoing(HealthRequest::of_generation(), None)?;
    let told = server.connection.is_serving(request).await;
    if !told.map_err(|status| Error::from_call(&status, &name))? {
        return Err(Error::status(Code::Unavailable, format!("the server at {name} is not ready")));
    }
    let request = pool.settings.outgoing(proto::GetModelRequest::default(), None)?;
    match server.connection.models().get_model(request).await {
        Ok(answer) => {
            let model = answer.into_inner().model.unwrap_or_default();
            Ok((model.instance_id, u64::from(model.limits.unwrap_or_default().max_running_requests)))
        }
        Err(status) => {
            let error = Error::from_call(&status, &name);
            // A caller that may not ask for the model gets neither.
            if error.code() == Code::Unavailable { Err(error) } else { Ok((String::new(), 1)) }
        }
    }
}
