//! Asks a question that the model may answer with a tool, which is a function of this program.
//!
//! ```console
//! cargo run --example tools -- --target localhost:50051 'How high is the Danube in Ulm?'
//! cargo run --example tools -- --tool-choice required 'How high is the Danube in Ulm?'
//! ```
//!
//! The replies' text is printed as it comes, the calls on the standard error. The exit code is 1 if a request was refused
//! or failed, or a reply was cut within a call.

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use headrace::{Client, Message, Request, Tool, ToolCall, ToolMode, ToolRunEnd, ToolRunner};
use serde::Deserialize;

/// The tool's parameters, as the chat template shows them to the model.
const PARAMETERS: &str = r#"{"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}"#;

#[derive(Deserialize)]
struct Given {
    place: String,
}

/// The tool itself. Its error is told to the model, which may try again.
fn read_gauge(call: &ToolCall) -> Result<String, Box<dyn Error + Send + Sync>> {
    let Given { place } = call.decode()?;
    let answer = format!("{} m", place.len());
    eprintln!("{} {}: {answer}", call.name, call.arguments);
    Ok(answer)
}

async fn run() -> Result<(), Box<dyn Error>> {
    let (mut target, mut choice, mut question) = (String::new(), None, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--target" => target = arguments.next().unwrap_or_default(),
            "--tool-choice" => {
                choice = Some(match arguments.next().unwrap_or_default().as_str() {
                    "auto" => ToolMode::Auto,
                    "none" => ToolMode::None,
                    "required" => ToolMode::Required,
                    other => return Err(format!("there is no tool choice {other:?}").into()),
                });
            }
            _ => question.push(argument),
        }
    }

    let client = Client::connect(target)?;
    let tool = Tool::new("read_gauge").description("How high a river is.").parameters(PARAMETERS);
    let mut request =
        Request::chat([Message::user(question.join(" "))]).tools([tool]).max_tokens(1024).temperature(0.0);
    if let Some(choice) = choice {
        request = request.tool_choice(choice);
    }
    // A reply's text is a line.
    let wrote = Arc::new(AtomicBool::new(false));
    let (by_chunk, by_call) = (Arc::clone(&wrote), Arc::clone(&wrote));
    let runner = ToolRunner::new()
        .on_chunk(move |chunk| {
            print!("{}", chunk.text);
            by_chunk.fetch_or(!chunk.text.is_empty(), Ordering::Relaxed);
        })
        .tool("read_gauge", move |call| {
            if by_call.swap(false, Ordering::Relaxed) {
                println!();
            }
            async move { read_gauge(&call) }
        });
    let run = client.run_tools(request, &runner).await;
    if wrote.load(Ordering::Relaxed) {
        println!();
    }
    match run?.end {
        ToolRunEnd::Cut => Err("the reply was cut: its calls may not be whole".into()),
        ToolRunEnd::MaxReplies => Err("the model calls tools again and again".into()),
        _ => Ok(()),
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tools: {error}");
            ExitCode::FAILURE
        }
    }
}
