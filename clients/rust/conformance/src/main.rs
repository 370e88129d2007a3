//! The driver of the Rust library for the suite in `tests/conformance`: it reads commands from the standard input, a
//! JSON object a line, carries them out with the library, and writes an answer for each. It decides nothing and compares
//! nothing; `tests/conformance/README.md` has the protocol.

mod forms;
mod telling;

use std::collections::HashMap;
use std::io::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use headrace::{Client, Error, Handle, Session, Stream};
use opentelemetry::context::FutureExt as _;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::sync::{oneshot, watch};

use forms::Command;

/// Why a command has no result.
enum Problem {
    Library(Box<Error>),
    /// The future was dropped, or its time has passed: the language's own means, which the library does not see.
    Given(&'static str, &'static str),
    Unsupported(String),
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        Self::Library(Box::new(error))
    }
}

type Told = Result<Value, Problem>;

/// A stream that is read piece by piece, and may be left while it is.
struct Streamed {
    client: Client,
    id: String,
    stream: tokio::sync::Mutex<Option<Stream>>,
    left: watch::Sender<bool>,
}

/// What the runner has given names, and the commands that wait.
#[derive(Default)]
struct Driver {
    clients: Mutex<HashMap<String, Client>>,
    sessions: Mutex<HashMap<String, Arc<Session>>>,
    handles: Mutex<HashMap<String, Arc<Handle>>>,
    streams: Mutex<HashMap<String, Arc<Streamed>>>,
    waiting: Mutex<HashMap<i64, oneshot::Sender<()>>>,
}

fn lock<T>(one: &Mutex<T>) -> MutexGuard<'_, T> {
    one.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes a line. Where nobody reads any more, there is nothing left to do.
fn tell(answer: &Value) {
    let mut out = std::io::stdout().lock();
    if writeln!(out, "{answer}").and_then(|()| out.flush()).is_err() {
        std::process::exit(1);
    }
}

fn find<T: Clone>(named: &Mutex<HashMap<String, T>>, command: &Command, member: &str) -> Result<T, Problem> {
    let name = command.text(member).unwrap_or_default();
    let found = lock(named).get(&name).cloned();
    found.ok_or_else(|| Problem::Unsupported(format!("there is no {member} {name:?}")))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> std::io::Result<()> {
    tell(&json!({"ready": {"language": "rust", "protocol": 1}}));
    let driver = Arc::new(Driver::default());
    let mut lines = BufReader::with_capacity(1 << 20, tokio::io::stdin());
    let mut line = Vec::new();
    while lines.read_until(b'\n', &mut line).await? > 0 {
        driver.take(&line);
        line.clear();
    }
    let clients: Vec<Client> = lock(&driver.clients).drain().map(|(_, client)| client).collect();
    for client in clients {
        client.close().await;
    }
    Ok(())
}

impl Driver {
    /// Begins a command. Those that wait run beside the others; the rest take effect in the order of their lines.
    fn take(self: &Arc<Self>, line: &[u8]) {
        let command = match Command::parse(line) {
            Ok(command) => command,
            Err((id, why)) => return tell(&json!({"id": id, "unsupported": why})),
        };
        let is_of_stream = command.text("handle").is_some_and(|name| lock(&self.streams).contains_key(&name));
        let waits = match command.op.as_str() {
            "generate" | "read" | "result" | "leave" | "close_session" | "close_client" | "batch" | "add_request"
            | "get_result" | "cancel_ids" | "load_adapter" | "unload_adapter" | "adapters" => true,
            "cancel" => is_of_stream,
            _ => false,
        };
        if !waits {
            let told = self.at_once(&command);
            return answer(&command, told, None);
        }
        let (abandon, abandoned) = oneshot::channel();
        lock(&self.waiting).insert(command.id, abandon);
        let driver = Arc::clone(self);
        tokio::spawn(async move {
            let chunks = Mutex::new(Vec::new());
            let told = tokio::select! {
                told = driver.in_time(&command, &chunks) => told,
                Ok(()) = abandoned => Err(Problem::Given("CANCELLED", "the future was dropped")),
            };
            lock(&driver.waiting).remove(&command.id);
            let chunks = std::mem::take(&mut *lock(&chunks));
            answer(&command, told, (command.op == "read").then_some(chunks));
        });
    }

    /// What takes effect without a wait.
    fn at_once(&self, command: &Command) -> Told {
        let name = || command.text("handle").unwrap_or_default();
        match command.op.as_str() {
            "connect" => {
                let made = command.connect()?;
                lock(&self.clients).insert(command.text("client").unwrap_or_default(), made);
            }
            "open_session" => {
                let client = find(&self.clients, command, "client")?;
                let _guard = command.trace().attach();
                let made = client.session(command.session_options())?;
                lock(&self.sessions).insert(command.text("session").unwrap_or_default(), Arc::new(made));
            }
            "submit" | "attach" | "resume" => {
                let session = find(&self.sessions, command, "session")?;
                let made = match command.op.as_str() {
                    "submit" => session.submit(command.request())?,
                    "resume" => session.resume(&*find(&self.handles, command, "of")?)?,
                    _ => {
                        let id = command.text("request_id").unwrap_or_default();
                        let from = command.number("from_seq").unwrap_or(1);
                        let choices = command.number("n").unwrap_or_default();
                        session.attach_from(id, from, usize::try_from(choices).unwrap_or_default())?
                    }
                };
                let told = json!({"request_id": made.request_id()});
                lock(&self.handles).insert(name(), Arc::new(made));
                return Ok(told);
            }
            "stream" => self.stream(command, name())?,
            "cancel" => find(&self.handles, command, "handle")?.cancel(),
            "abandon" => {
                let of = command.number("of").and_then(|id| i64::try_from(id).ok()).unwrap_or_default();
                if let Some(abandon) = lock(&self.waiting).remove(&of) {
                    let _ = abandon.send(()); // it may have been answered just now
                }
            }
            "session" => {
                let session = find(&self.sessions, command, "session")?;
                let lease = session.lease().map(|lease| lease.as_millis());
                return Ok(json!({"lease_ms": lease, "live": session.live()}));
            }
            other => return Err(Problem::Unsupported(format!("there is no command {other:?}"))),
        }
        Ok(json!({}))
    }

    fn stream(&self, command: &Command, name: String) -> Result<(), Problem> {
        let client = find(&self.clients, command, "client")?;
        let guard = command.trace().attach();
        let mut stream = client.stream(command.request());
        drop(guard);
        if let Some(limit) = command.number("deadline_ms") {
            stream = stream.timeout(Duration::from_millis(limit));
        }
        let id = stream.request_id().to_owned();
        let stream = tokio::sync::Mutex::new(Some(stream));
        let made = Arc::new(Streamed { client, id, stream, left: watch::Sender::new(false) });
        lock(&self.streams).insert(name, Arc::clone(&made));
        tokio::spawn(async move {
            if let Some(stream) = &mut *made.stream.lock().await {
                let mut left = made.left.subscribe();
                tokio::select! {
                    _ = stream.start() => {} // what is wrong, the next read tells
                    _ = left.wait_for(|left| *left) => {}
                }
            }
        });
        Ok(())
    }

    /// What waits, for as long as it may.
    async fn in_time(&self, command: &Command, chunks: &Mutex<Vec<Value>>) -> Told {
        let told = self.wait_for(command, chunks).with_context(command.trace());
        match command.number("timeout_ms").filter(|_| command.op != "unload_adapter") {
            None => told.await,
            Some(limit) => tokio::time::timeout(Duration::from_millis(limit), told)
                .await
                .unwrap_or(Err(Problem::Given("DEADLINE_EXCEEDED", "the wait ended"))),
        }
    }

    async fn wait_for(&self, command: &Command, chunks: &Mutex<Vec<Value>>) -> Told {
        let client = || find(&self.clients, command, "client");
        let handle = find(&self.handles, command, "handle");
        match command.op.as_str() {
            "generate" => Ok(telling::result(&client()?.generate(command.request()).await?)),
            "read" => match handle {
                Ok(handle) => read(command, chunks, Source::Handle(&handle)).await,
                Err(_) => {
                    let streamed = find(&self.streams, command, "handle")?;
                    let mut stream = streamed.stream.lock().await;
                    let Some(stream) = &mut *stream else { return Ok(json!({"end": true})) };
                    read(command, chunks, Source::Stream(stream)).await
                }
            },
            "result" => match handle {
                Ok(handle) => Ok(telling::result(&handle.result().await?)),
                Err(_) => {
                    let streamed = find(&self.streams, command, "handle")?;
                    let mut stream = streamed.stream.lock().await;
                    let stream = stream.as_mut().ok_or_else(|| Problem::Unsupported("it was left".to_owned()))?;
                    Ok(telling::result(&stream.result().await?))
                }
            },
            "cancel" => {
                let streamed = find(&self.streams, command, "handle")?;
                streamed.client.cancel([streamed.id.as_str()]).await?;
                Ok(json!({}))
            }
            "leave" => {
                let streamed = find(&self.streams, command, "handle")?;
                streamed.left.send_replace(true);
                streamed.stream.lock().await.take();
                Ok(json!({}))
            }
            "close_session" => {
                let session = find(&self.sessions, command, "session")?;
                if command.flag("cancel") {
                    session.close().await;
                } else {
                    session.finish().await?;
                }
                Ok(json!({}))
            }
            "close_client" => {
                client()?.close().await;
                Ok(json!({}))
            }
            "batch" => {
                let mut batch = client()?.batch(command.requests(), command.batch_options())?;
                let mut told = Vec::new();
                while let Some(outcome) = batch.next().await {
                    told.push(telling::outcome(&outcome));
                }
                Ok(json!({"outcomes": told}))
            }
            "add_request" => Ok(json!({"request_id": client()?.add(command.request()).await?.request_id})),
            "get_result" => {
                let id = command.text("request_id").unwrap_or_default();
                Ok(telling::result(&client()?.result(id).await?))
            }
            "load_adapter" => {
                let name = command.text("name").unwrap_or_default();
                let source = command.text("source").unwrap_or_default();
                let control = client()?.control()?;
                Ok(telling::loaded(&control.load_adapter(name, source, command.load_options()).await?))
            }
            "unload_adapter" => {
                let grace = command.number("timeout_ms").map(Duration::from_millis);
                let control = client()?.control()?;
                let live = control.unload_adapter(command.text("name").unwrap_or_default(), grace).await?;
                Ok(json!({"live": live}))
            }
            "adapters" => {
                let found = client()?.adapters().await?;
                Ok(json!({"adapters": found.iter().map(telling::adapter).collect::<Vec<_>>()}))
            }
            _ => {
                let statuses = client()?.cancel(command.texts("request_ids")).await?;
                let told: HashMap<_, _> = statuses.iter().map(|(id, status)| (id, status.as_str())).collect();
                Ok(json!({"statuses": told}))
            }
        }
    }
}

/// What is read.
enum Source<'a> {
    Handle(&'a Handle),
    Stream(&'a mut Stream),
}

impl Source<'_> {
    async fn next(&mut self) -> Option<Result<headrace::Chunk, Error>> {
        match self {
            Self::Handle(handle) => handle.next().await,
            Self::Stream(stream) => stream.next().await,
        }
    }
}

/// Takes as many chunks as are wanted; it goes on where the last read ended.
async fn read(command: &Command, chunks: &Mutex<Vec<Value>>, mut source: Source<'_>) -> Told {
    let wanted = command.number("chunks").map_or(usize::MAX, |wanted| usize::try_from(wanted).unwrap_or(usize::MAX));
    while lock(chunks).len() < wanted {
        match source.next().await {
            Some(chunk) => lock(chunks).push(telling::chunk(&chunk?)),
            None => return Ok(json!({"end": true})),
        }
    }
    Ok(json!({"end": false}))
}

/// Tells what came of a command; the chunks are those of a read.
fn answer(command: &Command, told: Told, chunks: Option<Vec<Value>>) {
    let mut answer = match told {
        Ok(ok) => json!({"id": command.id, "ok": ok}),
        Err(Problem::Library(error)) => json!({"id": command.id, "error": telling::error(&error)}),
        Err(Problem::Given(code, message)) => {
            json!({"id": command.id, "error": {"code": code, "message": message}})
        }
        Err(Problem::Unsupported(why)) => json!({"id": command.id, "unsupported": why}),
    };
    if let Some(chunks) = chunks {
        let is_ok = answer.get("ok").is_some();
        let to = if is_ok { &mut answer["ok"] } else { &mut answer };
        to["chunks"] = Value::Array(chunks);
    }
    tell(&answer);
}
