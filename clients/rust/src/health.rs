//! The tasks of a fleet: they look names up, and ask servers that are not ready whether they are.
//!
//! What passes through here: names become the addresses of the pool's servers, and a server's answers make it ready.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout};
use tonic::Code;

use crate::error::Error;
use crate::pool::{Entry, Identity, Pool, Readiness, Server, Servers};
use crate::proto;
use crate::target::{Address, Place};
use crate::transport::HealthRequest;

const RESOLVE_EVERY: Duration = Duration::from_secs(3);
/// Between two look-ups, after failures.
const RESOLVE_PAUSE: Duration = Duration::from_millis(500);
/// Of a question for a server's health.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a server that is ready waits for the others that were asked.
const TOGETHER: Duration = Duration::from_millis(100);
/// Between two questions to an address of a server that is used by another.
const TWIN_PAUSE: Duration = Duration::from_secs(10);

/// Starts the tasks that a pool of several servers needs.
pub(crate) fn start(pool: &Arc<Pool>, places: Vec<Place>) {
    if pool.many {
        pool.tasks.spawn(check(Arc::clone(pool)));
        if places.iter().any(|place| matches!(place, Place::Name { .. })) {
            pool.tasks.spawn(resolve(Arc::clone(pool), places));
        }
    }
}

/// Looks names up, every few seconds and soon after failures. What cannot be looked up keeps its addresses.
async fn resolve(pool: Arc<Pool>, places: Vec<Place>) {
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

/// Asks servers that are not ready whether they are. Each answer is taken as it comes: none waits for the others, but for
/// a moment with those that are ready.
async fn check(pool: Arc<Pool>) {
    let mut changed = pool.watch();
    loop {
        let now = Instant::now();
        let (due, are_told, next) = {
            let mut state = pool.lock();
            (state.due_for_check(now), state.tell(now), state.next_check(now))
        };
        for server in due {
            pool.tasks.spawn(ask(Arc::clone(&pool), server));
        }
        if are_told {
            pool.notify();
            let listening = pool.lock().listeners.all();
            for listener in listening {
                listener.server_changed();
            }
        }
        tokio::select! {
            () = sleep_until(next) => {}
            _ = changed.changed() => {}
        }
    }
}

impl Servers {
    /// The servers whose health is to be asked for now.
    fn due_for_check(&mut self, now: Instant) -> Vec<Arc<Server>> {
        let due = self.entries.iter_mut().filter(|entry| entry.waits_for_check() && entry.check_at <= now);
        due.map(|entry| {
            entry.is_asked = true;
            entry.wait_for_check(now);
            Arc::clone(&entry.server)
        })
        .collect()
    }

    /// When a server is to be asked, or the ones that were found are to be used.
    fn next_check(&self, now: Instant) -> Instant {
        let unasked = self.entries.iter().filter(|entry| entry.waits_for_check());
        unasked.map(|entry| entry.check_at).chain(self.found.until).min().unwrap_or(now + Duration::from_secs(3600))
    }

    /// A server is ready. It is used together with the others that are asked, so that the first requests are not all
    /// placed on the first that answers; but it does not wait long for them.
    fn found(&mut self, id: u64, identity: Identity, now: Instant) {
        self.found.identities.push((id, identity));
        self.found.until.get_or_insert(now + TOGETHER);
    }

    /// Makes the servers that were found ready, if it is time; whether there were any.
    fn tell(&mut self, now: Instant) -> bool {
        let is_found = |entry: &Entry| self.found.identities.iter().any(|(id, _)| *id == entry.server.id);
        let is_time = |until| now >= until || self.entries.iter().all(|entry| !entry.is_asked || is_found(entry));
        if !self.found.until.is_some_and(is_time) {
            return false;
        }
        for (id, identity) in std::mem::take(&mut self.found).identities {
            self.joined(id, identity);
        }
        true
    }

    /// Makes a server ready, unless it is known by another address already.
    fn joined(&mut self, id: u64, (instance, capacity): Identity) {
        let has_twin = self.entries.iter().any(|twin| {
            !instance.is_empty() && twin.instance == instance && twin.server.id != id && twin.state == Readiness::Ready
        });
        let Some(entry) = self.entry(id) else { return };
        (entry.instance, entry.capacity) = (instance, capacity.max(1));
        (entry.is_known, entry.is_asked) = (true, false);
        if entry.state != Readiness::Joining {
            return;
        }
        if has_twin {
            entry.check_at = Instant::now() + TWIN_PAUSE;
        } else {
            (entry.state, entry.problem, entry.checks) = (Readiness::Ready, None, 0);
        }
    }

    /// A server was asked, and is not ready.
    fn not_joined(&mut self, id: u64, problem: Error) {
        if let Some(entry) = self.entry(id) {
            (entry.is_known, entry.is_asked, entry.problem) = (true, false, Some(problem));
        }
    }
}

/// Asks a server for its health, and a ready one for its instance and capacity. Its answer, or that there is none, is told
/// to who waits for servers.
async fn ask(pool: Arc<Pool>, server: Arc<Server>) {
    let late = || Error::status(Code::Unavailable, format!("the server at {} does not answer", server.name()));
    let told = timeout(CHECK_TIMEOUT, identify(&pool, &server)).await.unwrap_or_else(|_| Err(late()));
    {
        let mut state = pool.lock();
        match told {
            Ok(identity) => state.found(server.id, identity, Instant::now()),
            Err(error) => state.not_joined(server.id, error),
        }
    }
    pool.notify();
}

async fn identify(pool: &Pool, server: &Server) -> Result<Identity, Error> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::ClientBuilder;
    use crate::target::Target;
    use crate::transport::Tasks;

    /// Three servers that are asked, at a moment; no task of the client's runs before the test's first wait.
    fn asked() -> (Arc<Pool>, Vec<u64>, Instant) {
        let places = Target::from("a:1,b:1,c:1").places().unwrap();
        let settings = ClientBuilder::default().settings(&places).unwrap();
        let pool = Pool::new(settings, &places, Tasks::new().unwrap()).unwrap();
        let now = Instant::now();
        let ids = pool.lock().due_for_check(now).iter().map(|server| server.id).collect();
        (pool, ids, now)
    }

    fn ready(state: &Servers) -> usize {
        state.entries.iter().filter(|entry| entry.state == Readiness::Ready).count()
    }

    fn named(name: &str) -> Identity {
        (name.to_owned(), 1)
    }

    #[tokio::test]
    async fn servers_that_are_ready_are_used_together() {
        let (pool, ids, now) = asked();
        let mut state = pool.lock();
        state.found(ids[0], named("a"), now);
        state.found(ids[1], named("b"), now);
        assert!(!state.tell(now), "one has not answered");
        assert_eq!((ready(&state), state.next_check(now)), (0, now + TOGETHER));
        state.not_joined(ids[2], Error::closed("the server"));
        assert!(state.tell(now), "none is waited for");
        assert_eq!(ready(&state), 2);
        assert!(!state.tell(now), "there is nothing new");
    }

    #[tokio::test]
    async fn a_server_that_does_not_answer_is_waited_for_a_moment() {
        let (pool, ids, now) = asked();
        let mut state = pool.lock();
        state.found(ids[0], named("a"), now);
        state.found(ids[1], named("b"), now + TOGETHER / 2);
        assert!(!state.tell(now + TOGETHER / 2));
        assert!(state.tell(now + TOGETHER));
        assert_eq!(ready(&state), 2);
        assert!(state.due_for_check(now + CHECK_TIMEOUT).is_empty(), "the third is asked already");
    }
}
