//! A client's servers, and the choice among them by docs/fleet.md. With one server there is no choice: it is always ready,
//! and its channel connects to it.
//!
//! What passes through here: addresses become servers, of which is noted what calls, streams and checks saw; a request
//! asks for one of them. Who has requests for longer than a call is a [`Listener`].

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tonic::Code;

use crate::error::Error;
use crate::listener::{Listener, Listeners};
use crate::options::Settings;
use crate::placement::{Candidate, Placement, PrefixKeys};
use crate::proto;
use crate::recent::Recent;
use crate::target::{Address, Place};
use crate::transport::{Connection, Tasks};

const CHECK_TIMEOUT: Duration = Duration::from_secs(2);
const FIRST_CHECK: Duration = Duration::from_millis(100);
/// How long a request waits for a server to be ready.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
const LOAD_HOLDS: Duration = Duration::from_secs(5);
const LEFT_FOR: Duration = Duration::from_secs(60);
const ALONE_FOR: Duration = Duration::from_secs(60);
const MOST_OWNERS: usize = 65_536;
const BUDGET: f64 = 100.0;
const BUDGET_SUCCESS: f64 = 0.1;

/// A server: where it is, and the connection to it.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) id: u64,
    pub(crate) address: Address,
    pub(crate) connection: Connection,
}

impl Server {
    pub(crate) fn name(&self) -> String {
        self.address.name()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readiness {
    /// Not known to be ready: asked until it is.
    Joining,
    Ready,
    /// Listed no longer: what runs there goes on.
    Leaving,
}

/// What the client knows of a server.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) server: Arc<Server>,
    pub(crate) state: Readiness,
    /// Its process; empty: not known.
    pub(crate) instance: String,
    /// How many requests it runs at a time.
    pub(crate) capacity: u64,
    /// How many requests of this client it has.
    outstanding: u64,
    full_until: Option<Instant>,
    pub(crate) check_at: Instant,
    used_at: Instant,
    turn: u64,
    /// Why it is not ready.
    pub(crate) problem: Option<Error>,
    /// Whether it has answered for its health, or failed to.
    pub(crate) is_known: bool,
    /// Whether a question for its health is on its way.
    pub(crate) is_asked: bool,
    pub(crate) checks: u32,
    /// The load that is not this client's.
    others: u64,
    others_until: Option<Instant>,
}

impl Entry {
    fn name(&self) -> String {
        if self.instance.is_empty() { self.server.name() } else { self.instance.clone() }
    }

    fn load(&self, now: Instant) -> u64 {
        self.outstanding + self.others_until.filter(|until| now < *until).map_or(0, |_| self.others)
    }

    fn has_room(&self, now: Instant) -> bool {
        self.full_until.is_none_or(|until| until <= now)
    }

    /// Whether it is to be asked for its health, at `check_at`.
    pub(crate) fn waits_for_check(&self) -> bool {
        self.state == Readiness::Joining && !self.is_asked
    }

    /// Puts off the next question for its health: 0.1 s, then twice as long each time.
    pub(crate) fn wait_for_check(&mut self, now: Instant) {
        self.check_at = now + (FIRST_CHECK * 2_u32.pow(self.checks)).min(CHECK_TIMEOUT);
        self.checks = (self.checks + 1).min(10);
    }
}

/// Tells whether what failed may be sent again at once: a failure takes a token of a bucket, a success gives back a tenth
/// of one, and while it is at most half full nothing may.
#[derive(Debug)]
pub(crate) struct Budget(f64);

impl Budget {
    pub(crate) fn failed(&mut self) -> bool {
        self.0 = (self.0 - 1.0).max(0.0);
        self.0 > BUDGET / 2.0
    }

    pub(crate) fn succeeded(&mut self) {
        self.0 = (self.0 + BUDGET_SUCCESS).min(BUDGET);
    }
}

/// The servers that have said that they are ready, and are not used yet.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) identities: Vec<(u64, Identity)>,
    /// When they are used at the latest, once there is one.
    pub(crate) until: Option<Instant>,
}

/// A server's instance and capacity.
pub(crate) type Identity = (String, u64);

pub(crate) struct Pool {
    pub(crate) settings: Settings,
    pub(crate) tasks: Tasks,
    pub(crate) many: bool,
    /// Told when a server may have become usable.
    changed: watch::Sender<()>,
    /// Told when names are to be looked up now.
    pub(crate) kicked: Notify,
    state: Mutex<Servers>,
}

pub(crate) struct Servers {
    pub(crate) many: bool,
    pub(crate) entries: Vec<Entry>,
    next_id: u64,
    pub(crate) found: Found,
    pub(crate) listeners: Listeners,
    placement: Placement,
    pub(crate) budget: Budget,
    /// By request: the instance that has it.
    owners: Recent,
    /// Requests that run without a call: they count as their servers' load until they were seen to have ended.
    alone: HashMap<String, (u64, Instant)>,
    turn: u64,
    /// Why a name could not be looked up.
    pub(crate) unresolved: String,
    pub(crate) closed: bool,
}

impl Pool {
    pub(crate) fn new(settings: Settings, places: &[Place], tasks: Tasks) -> Result<Arc<Self>, Error> {
        let many = places.len() > 1 || matches!(places[0], Place::Name { .. });
        let pool = Arc::new(Self {
            settings,
            tasks,
            many,
            changed: watch::Sender::new(()),
            kicked: Notify::new(),
            state: Mutex::new(Servers {
                many,
                entries: Vec::new(),
                next_id: 0,
                found: Found::default(),
                listeners: Listeners::default(),
                placement: Placement::default(),
                budget: Budget(BUDGET),
                owners: Recent::default(),
                alone: HashMap::new(),
                turn: 0,
                unresolved: String::new(),
                closed: false,
            }),
        });
        let listed = places.iter().filter_map(|place| match place {
            Place::Server(address) => Some(address.clone()),
            Place::Name { .. } => None,
        });
        pool.list(&listed.collect::<Vec<_>>())?;
        if !many {
            pool.lock().entries[0].state = Readiness::Ready;
        }
        Ok(pool)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Servers> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes those who wait for a server.
    pub(crate) fn notify(&self) {
        self.changed.send_replace(());
    }

    pub(crate) fn watch(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Has nothing begin or go on any more.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let listening = state.listeners.all();
        drop(state);
        for listener in listening {
            listener.abort(&Error::closed("the client"));
        }
        self.notify();
    }

    /// Makes a listener for its number, unless the client is closed.
    pub(crate) fn listen<L: Listener + 'static>(&self, made: impl FnOnce(u64) -> Arc<L>) -> Result<Arc<L>, Error> {
        let mut state = self.lock();
        if state.closed {
            return Err(Error::closed("the client"));
        }
        Ok(state.listeners.add(made))
    }

    /// Takes the addresses that there are now.
    pub(crate) fn list(&self, addresses: &[Address]) -> Result<(), Error> {
        let now = Instant::now();
        let mut guard = self.lock();
        let state = &mut *guard;
        for wanted in addresses {
            match state.entries.iter_mut().find(|entry| entry.server.address == *wanted) {
                None => {
                    let connection = Connection::new(wanted, &self.settings, &self.tasks)?;
                    let id = state.next_id;
                    state.next_id += 1;
                    state.entries.push(Entry {
                        server: Arc::new(Server { id, address: wanted.clone(), connection }),
                        state: Readiness::Joining,
                        instance: String::new(),
                        capacity: 1,
                        outstanding: 0,
                        full_until: None,
                        check_at: now,
                        used_at: now,
                        turn: 0,
                        problem: None,
                        is_known: false,
                        is_asked: false,
                        checks: 0,
                        others: 0,
                        others_until: None,
                    });
                }
                Some(entry) if entry.state == Readiness::Leaving => {
                    (entry.state, entry.check_at) = (Readiness::Joining, now);
                }
                Some(_) => {}
            }
        }
        state.entries.retain_mut(|entry| {
            if addresses.contains(&entry.server.address) {
                return true;
            }
            entry.state = Readiness::Leaving;
            entry.outstanding > 0 || now - entry.used_at <= LEFT_FOR
        });
        drop(guard);
        self.notify();
        Ok(())
    }

    /// Has a server asked for its health before it gets anything new.
    pub(crate) fn set_aside(&self, id: u64, problem: &Error) {
        if self.many {
            self.lock().set_aside(id, problem);
            self.look();
        }
    }

    /// What a server's failure says of it: it has no room for a while, or is not ready.
    pub(crate) fn note_failure(&self, id: u64, error: &Error) {
        if error.code() != Code::ResourceExhausted {
            return self.set_aside(id, error);
        }
        let until = Instant::now() + error.retry_after().unwrap_or_default();
        if let Some(entry) = self.lock().entry(id) {
            entry.full_until = entry.full_until.max(Some(until));
        }
    }

    /// Has names looked up and servers asked soon.
    fn look(&self) {
        self.kicked.notify_one();
        self.notify();
    }

    /// Waits until all servers were asked whether they are ready, but not long.
    pub(crate) async fn settle(&self) {
        let end = Instant::now() + PATIENCE;
        let mut changed = self.watch();
        if !self.many {
            return;
        }
        loop {
            let is_settled = {
                let state = self.lock();
                state.closed || state.is_settled()
            };
            if is_settled || tokio::time::timeout_at(end, changed.changed()).await.is_err() {
                return;
            }
        }
    }

    /// Names the servers, for messages.
    pub(crate) fn names(&self) -> String {
        self.lock().entries.iter().map(|entry| entry.server.name()).collect::<Vec<_>>().join(",")
    }
}

impl Servers {
    pub(crate) fn entry(&mut self, id: u64) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.server.id == id)
    }

    fn set_aside(&mut self, id: u64, problem: &Error) {
        let now = Instant::now();
        let Some(entry) = self.entry(id) else { return };
        entry.problem = Some(problem.copy_for(""));
        if entry.state == Readiness::Leaving {
            return;
        }
        entry.state = Readiness::Joining;
        entry.wait_for_check(now);
        let instance = entry.instance.clone();
        for twin in &mut self.entries {
            let is_twin = !instance.is_empty() && twin.instance == instance && twin.server.id != id;
            if is_twin && twin.state == Readiness::Joining {
                twin.check_at = now;
            }
        }
    }

    /// The server for a request; none: none is ready and has room. One to avoid is better than none; one that lacks what
    /// the request needs is not.
    pub(crate) fn choose(
        &mut self,
        keys: Option<&PrefixKeys>,
        avoid: &HashSet<u64>,
        lacking: &HashSet<u64>,
        even_full: bool,
    ) -> Option<Arc<Server>> {
        if !self.many {
            return self.entries.first().map(|entry| Arc::clone(&entry.server));
        }
        let now = Instant::now();
        let over: Vec<String> =
            self.alone.iter().filter(|(_, (_, until))| *until < now).map(|(id, _)| id.clone()).collect();
        over.iter().for_each(|id| self.ended_alone(id));
        let pick = |fits: &dyn Fn(&Entry) -> bool| -> Vec<&Entry> {
            self.ready(lacking).filter(|entry| fits(entry)).collect()
        };
        let is_avoided = |entry: &Entry| avoid.contains(&entry.server.id);
        let mut from = pick(&|entry| entry.has_room(now) && !is_avoided(entry));
        if from.is_empty() {
            from = pick(&|entry| entry.has_room(now));
        }
        if from.is_empty() && even_full {
            from = pick(&|entry| !is_avoided(entry));
            if from.is_empty() {
                from = pick(&|_| true);
            }
        }
        if from.is_empty() {
            return None;
        }
        let candidates: Vec<Candidate> = from
            .iter()
            .map(|entry| Candidate {
                name: entry.name(),
                load: entry.load(now),
                capacity: entry.capacity,
                turn: entry.turn,
            })
            .collect();
        let servers: Vec<Arc<Server>> = from.into_iter().map(|entry| Arc::clone(&entry.server)).collect();
        let chosen = self.placement.choose(keys, &candidates);
        servers.into_iter().nth(chosen)
    }

    /// The ready servers without those that lack what a request needs.
    fn ready(&self, lacking: &HashSet<u64>) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| entry.state == Readiness::Ready && !lacking.contains(&entry.server.id))
    }

    /// When a ready server has room, as these said; none: none is ready but those that lack what the request needs.
    pub(crate) fn room_in(&self, lacking: &HashSet<u64>) -> Option<Duration> {
        let now = Instant::now();
        self.ready(lacking)
            .map(|entry| entry.full_until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now)))
            .min()
    }

    /// Notes that a request goes to a server.
    pub(crate) fn begun(&mut self, id: u64) {
        self.turn += 1;
        let turn = self.turn;
        if let Some(entry) = self.entry(id) {
            entry.turn = turn;
            entry.outstanding += 1;
            entry.used_at = Instant::now();
        }
    }

    /// Notes that a request has ended at a server, or goes elsewhere.
    pub(crate) fn over(&mut self, id: u64) {
        if let Some(entry) = self.entry(id) {
            entry.outstanding = entry.outstanding.saturating_sub(1);
            entry.used_at = Instant::now();
        }
    }

    pub(crate) fn take_load(&mut self, id: u64, told: &proto::ServerLoad) {
        if let Some(entry) = self.entry(id) {
            let all = u64::from(told.running) + u64::from(told.waiting);
            entry.others = all.saturating_sub(entry.outstanding);
            entry.others_until = Some(Instant::now() + LOAD_HOLDS);
        }
    }

    pub(crate) fn runs_alone(&mut self, request: &str, id: u64) {
        self.ended_alone(request);
        self.alone.insert(request.to_owned(), (id, Instant::now() + ALONE_FOR));
        self.begun(id);
    }

    pub(crate) fn ended_alone(&mut self, request: &str) {
        if let Some((id, _)) = self.alone.remove(request) {
            self.over(id);
        }
    }

    /// Notes the instance that has a request.
    pub(crate) fn note_owner(&mut self, request: &str, instance: &str) {
        if !instance.is_empty() && self.many {
            self.owners.put(request, instance, MOST_OWNERS);
        }
    }

    pub(crate) fn owner(&self, request: &str) -> String {
        self.owners.get(request).unwrap_or_default().to_owned()
    }

    /// The servers that are this instance, the ready ones first.
    pub(crate) fn by_instance(&self, instance: &str) -> Vec<Arc<Server>> {
        let is_it = |entry: &&Entry| !instance.is_empty() && entry.instance == instance;
        let mut found: Vec<&Entry> = self.entries.iter().filter(is_it).collect();
        found.sort_by_key(|entry| entry.state != Readiness::Ready);
        found.into_iter().map(|entry| Arc::clone(&entry.server)).collect()
    }

    /// The servers that may answer for what they have.
    pub(crate) fn reachable(&self) -> Vec<Arc<Server>> {
        let able = self.entries.iter().filter(|entry| entry.state != Readiness::Joining);
        able.map(|entry| Arc::clone(&entry.server)).collect()
    }

    /// Whether all servers were asked whether they are ready.
    pub(crate) fn is_settled(&self) -> bool {
        !self.entries.is_empty() && self.entries.iter().all(|entry| entry.is_known)
    }

    /// The error for a request that found no server.
    pub(crate) fn nobody(&self) -> Error {
        let mut told: Vec<&str> = Vec::new();
        for problem in self.entries.iter().filter_map(|entry| entry.problem.as_ref()) {
            if !told.contains(&problem.message()) {
                told.push(problem.message());
            }
        }
        let why = match (told.is_empty(), self.unresolved.as_str()) {
            (false, _) => told.join("; "),
            (true, "") => "no answer yet".to_owned(),
            (true, unresolved) => unresolved.to_owned(),
        };
        let message = format!("none of {} servers is ready: {why}", self.entries.len());
        let mut problems = self.entries.iter().filter_map(|entry| entry.problem.as_ref());
        match problems.find(|problem| !problem.reason().is_empty()) {
            Some(problem) => problem.clone().with_message(message),
            None => Error::status(Code::Unavailable, message),
        }
    }
}
