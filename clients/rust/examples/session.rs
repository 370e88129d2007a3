//! Runs prompts on one session and prints what comes back, as it comes.
//!
//! ```console
//! cargo run --example session -- --target localhost:50051 --max-tokens 32 'Once upon a time' 'The old mill'
//! ```
//!
//! Ctrl-C cancels the live requests and waits for their ends. The exit code is 1 if a request was refused or failed.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use headrace::{Client, Error, Handle, Request, SessionOptions};

async fn print(handle: &Handle, number: usize) -> Result<(), Error> {
    while let Some(chunk) = handle.next().await {
        println!("[{number}] {:?}", chunk?.text);
    }
    let completion = handle.result().await?;
    println!("[{number}] {}, {} tokens", completion.finish_reason(), completion.usage.completion_tokens);
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode, Error> {
    let (mut target, mut max_tokens, mut prompts) = (String::new(), 32, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--target" => target = arguments.next().unwrap_or_default(),
            "--max-tokens" => max_tokens = arguments.next().and_then(|count| count.parse().ok()).unwrap_or(max_tokens),
            _ => prompts.push(argument),
        }
    }

    let client = Client::connect(target)?;
    let session = client.session(SessionOptions::new().lease(Duration::from_secs(30)))?;
    let mut handles = Vec::new();
    for prompt in prompts {
        handles.push(Arc::new(session.submit(Request::text(prompt).max_tokens(max_tokens))?));
    }
    let printing: Vec<_> = (1..)
        .zip(handles.iter().cloned())
        .map(|(number, handle)| tokio::spawn(async move { (number, print(&handle, number).await) }))
        .collect();
    tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            handles.iter().for_each(|handle| handle.cancel());
        }
    });

    let mut code = ExitCode::SUCCESS;
    for one in printing {
        if let Ok((number, Err(error))) = one.await {
            eprintln!("[{number}] {error}");
            code = ExitCode::FAILURE;
        }
    }
    session.finish().await?;
    Ok(code)
}
