//! Plays turns of load for the comparison of the client libraries; `benchmarks/languages` says what a turn is.
//!
//! ```text
//! load TARGET SESSIONS REQUESTS TOKENS
//! ```

use std::error::Error;
use std::io::{BufRead as _, Write as _};

use headrace::{Client, Handle, Request, SessionOptions};
use tokio::task::JoinSet;

type Failure = Box<dyn Error + Send + Sync>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let [target, numbers @ ..] = &std::env::args().skip(1).collect::<Vec<_>>()[..] else {
        return Err("wanted: TARGET SESSIONS REQUESTS TOKENS".into());
    };
    let numbers = numbers.iter().map(|one| one.parse()).collect::<Result<Vec<u32>, _>>()?;
    let [sessions, requests, tokens] = numbers[..] else {
        return Err("wanted: TARGET SESSIONS REQUESTS TOKENS".into());
    };
    let client = Client::connect(target.as_str())?;
    // Waiting for the next line stops this thread, but between turns nothing else runs.
    for line in std::io::stdin().lock().lines() {
        line?;
        let told = turn(&client, sessions, requests, tokens).await?;
        writeln!(std::io::stdout(), "{{\"tokens\": {told}}}")?;
    }
    client.close().await;
    Ok(())
}

/// Plays one turn; gives how many tokens came.
async fn turn(client: &Client, sessions: u32, requests: u32, tokens: u32) -> Result<usize, Failure> {
    let mut opened = Vec::new();
    let mut reading = JoinSet::new();
    for _ in 0..sessions {
        let session = client.session(SessionOptions::new())?;
        for _ in 0..requests {
            let request = Request::text("Once upon a time").temperature(0.0).max_tokens(tokens).ignore_eos(true);
            reading.spawn(count(session.submit(request)?));
        }
        opened.push(session);
    }
    let mut told = 0;
    while let Some(own) = reading.join_next().await {
        told += own??;
    }
    for session in opened {
        session.finish().await?;
    }
    Ok(told)
}

/// Reads a request to its end.
async fn count(handle: Handle) -> Result<usize, headrace::Error> {
    let mut tokens = 0;
    while let Some(chunk) = handle.next().await {
        tokens += chunk?.token_ids.len();
    }
    Ok(tokens)
}
