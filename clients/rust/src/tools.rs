//! Runs of tools: conversations in which the model calls functions of the caller's.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use serde::de::DeserializeOwned;

use crate::chat::{Message, ToolCall};
use crate::client::Client;
use crate::error::Error;
use crate::proto;
use crate::request::Request;
use crate::result::{Chunk, Completion, FinishReason};

const DEFAULT_REPLIES: usize = 8;
/// How much of arguments that are no object the answer quotes.
const QUOTED: usize = 1000;

type Answer = Result<String, Box<dyn StdError + Send + Sync>>;
type Run = Arc<dyn Fn(ToolCall) -> Pin<Box<dyn Future<Output = Answer> + Send>> + Send + Sync>;
type OnChunk = Arc<dyn Fn(&Chunk) + Send + Sync>;

impl ToolCall {
    /// Reads the call's arguments.
    ///
    /// # Errors
    ///
    /// They are not JSON of this type: the error's message is for the model to read.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, Error> {
        let text = if self.arguments.is_empty() { "{}" } else { &self.arguments };
        serde_json::from_str(text).map_err(|error| Error::invalid("arguments", error.to_string()))
    }
}

/// The functions of a run, by their tools' names, and how it is run.
///
/// ```no_run
/// # async fn example(client: headrace::Client) -> Result<(), headrace::Error> {
/// use headrace::{Message, Request, Tool, ToolRunner};
///
/// let parameters = r#"{"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}"#;
/// let request = Request::chat([Message::user("How high is the Danube in Ulm?")])
///     .tools([Tool::new("read_gauge").description("How high a river is.").parameters(parameters)]);
/// let runner = ToolRunner::new().tool("read_gauge", |call| async move {
///     let given: serde_json::Value = call.decode()?; // an error is told to the model, which may try again
///     Ok(format!("{}: 3 m", given["place"]))
/// });
/// let run = client.run_tools(request, &runner).await?;
/// println!("{}", run.completion.text());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct ToolRunner {
    functions: BTreeMap<String, Run>,
    max_replies: usize,
    on_chunk: Option<OnChunk>,
}

impl Default for ToolRunner {
    fn default() -> Self {
        Self { functions: BTreeMap::new(), max_replies: DEFAULT_REPLIES, on_chunk: None }
    }
}

impl fmt::Debug for ToolRunner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ToolRunner").field("tools", &self.functions.keys()).finish_non_exhaustive()
    }
}

impl ToolRunner {
    /// A runner without functions.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the function of a tool: it returns what the model is told. An error is told to the model too.
    pub fn tool<F, A>(mut self, name: impl Into<String>, function: F) -> Self
    where
        F: Fn(ToolCall) -> A + Send + Sync + 'static,
        A: Future<Output = Result<String, Box<dyn StdError + Send + Sync>>> + Send + 'static,
    {
        self.functions.insert(name.into(), Arc::new(move |call| Box::pin(function(call))));
        self
    }

    /// How many replies the model may make; default 8. Calls in the last one are not run.
    pub fn max_replies(mut self, replies: usize) -> Self {
        self.max_replies = replies.max(1);
        self
    }

    /// Calls this with each piece of output as it comes.
    pub fn on_chunk(mut self, told: impl Fn(&Chunk) + Send + Sync + 'static) -> Self {
        self.on_chunk = Some(Arc::new(told));
        self
    }

    /// Runs a reply's calls, one after the other.
    async fn answer(&self, calls: &[ToolCall]) -> Vec<Message> {
        let mut answers = Vec::with_capacity(calls.len());
        for call in calls {
            let told = match self.functions.get(&call.name) {
                None => {
                    let known: Vec<&str> = self.functions.keys().map(String::as_str).collect();
                    Err(format!("there is no tool {:?}; there are {}", call.name, known.join(", ")).into())
                }
                Some(_) if !is_object(&call.arguments) => {
                    let quoted: String = call.arguments.chars().take(QUOTED).collect();
                    Err(format!("the arguments are no JSON object; they were {quoted}").into())
                }
                Some(run) => run(call.clone()).await,
            };
            answers.push(Message::tool(call, told.unwrap_or_else(|error| format!("error: {error}"))));
        }
        answers
    }
}

/// Why a run of tools ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ToolRunEnd {
    /// The last reply calls no tool.
    Answered,
    /// The last reply was cut. Its calls were not run: they may not be whole.
    Cut,
    /// The last reply allowed has calls, which were not run.
    MaxReplies,
}

/// A conversation in which the model called tools.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ToolRun {
    /// Why it ended.
    pub end: ToolRunEnd,
    /// The model's last reply.
    pub completion: Completion,
    /// What the run adds to the conversation of the request: the replies, and the answers of the tools. A last reply whose
    /// calls were not run is not in it.
    pub messages: Vec<Message>,
}

impl Client {
    /// Holds a conversation in which the model calls tools: it streams a reply, runs its calls one after the other, adds
    /// the reply and the answers to the conversation, and asks again, until a reply calls none. The request has the
    /// conversation and the tools. A call that is [required](crate::ToolMode::Required) is so once. Dropping the future ends the
    /// request that runs.
    ///
    /// # Errors
    ///
    /// The request has no conversation or no tools, or one of the replies failed; see [`Error`].
    pub async fn run_tools(&self, request: impl Into<Request>, runner: &ToolRunner) -> Result<ToolRun, Error> {
        let mut turn = request.into();
        if turn.conversation().is_none_or(|chat| chat.messages.is_empty() || chat.tools.is_empty()) {
            return Err(Error::invalid("messages", "and tools are needed for a run of tools"));
        }
        let mut messages = Vec::new();
        let mut reply = 0;
        loop {
            reply += 1;
            // Without the capability calls would come as text.
            let mut stream = self.stream_needing(turn.clone(), &["typed_replies"]);
            if let Some(told) = &runner.on_chunk {
                while let Some(chunk) = stream.next().await {
                    told(&chunk?);
                }
            }
            let completion = stream.result().await?;
            let calls = completion.tool_calls();
            let end = match completion.finish_reason() {
                FinishReason::Stop if calls.is_empty() => ToolRunEnd::Answered,
                _ if !ended_by_itself(&completion) => ToolRunEnd::Cut,
                _ if reply >= runner.max_replies => ToolRunEnd::MaxReplies,
                _ => {
                    let mut more = vec![as_taken(completion.message())];
                    more.extend(runner.answer(calls).await);
                    turn = next_turn(turn, &more);
                    messages.extend(more);
                    continue;
                }
            };
            if end == ToolRunEnd::Answered {
                messages.push(completion.message());
            }
            return Ok(ToolRun { end, completion, messages });
        }
    }
}

/// The next reply's request, which is one of its own.
fn next_turn(mut turn: Request, more: &[Message]) -> Request {
    if let Some(chat) = turn.conversation() {
        chat.messages.extend(more.iter().cloned().map(Message::into_proto));
        if let Some(choice) = &mut chat.tool_choice
            && choice.mode == i32::from(proto::ToolChoiceMode::Required)
        {
            choice.mode = proto::ToolChoiceMode::Auto.into();
            if choice.tool_names.len() == 1 {
                choice.tool_names.clear(); // it was to be called; it is not the only one
            }
        }
    }
    turn.id("")
}

/// Nothing cut the reply. One with `Stop` has a call whose arguments are no JSON: the model is told.
fn ended_by_itself(completion: &Completion) -> bool {
    match completion.finish_reason() {
        FinishReason::ToolCalls => true,
        FinishReason::Stop => completion.choices.first().is_some_and(|first| first.stop_string.is_none()),
        _ => false,
    }
}

fn is_object(arguments: &str) -> bool {
    arguments.is_empty() || serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(arguments).is_ok()
}

/// A reply as templates take it back: arguments that are no object are left out, the answer quotes them.
fn as_taken(mut reply: Message) -> Message {
    for call in &mut reply.tool_calls {
        if !is_object(&call.arguments) {
            "{}".clone_into(&mut call.arguments);
        }
    }
    reply
}
