//! What the runner asks for, in the library's forms.

use std::time::Duration;

use headrace::{
    BatchOptions, Client, Error, Format, LoadOptions, Message, Request, Role, SessionOptions, Tool, ToolCall, ToolMode,
};
use opentelemetry::Context;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState};
use serde_json::Value;

/// The members that this driver knows; another one is of a newer protocol.
const MEMBERS: [&str; 35] = [
    "id",
    "op",
    "client",
    "session",
    "handle",
    "of",
    "targets",
    "token",
    "ca",
    "server_name",
    "metadata",
    "retries",
    "max_message_bytes",
    "request",
    "requests",
    "max_in_flight",
    "ordered",
    "traceparent",
    "deadline_ms",
    "lease_ms",
    "initial_credit",
    "room_timeout_ms",
    "request_id",
    "request_ids",
    "from_seq",
    "n",
    "chunks",
    "timeout_ms",
    "cancel",
    "statuses",
    "patiently",
    "name",
    "source",
    "pinned",
    "replace",
];

/// One line.
pub(crate) struct Command {
    pub(crate) id: i64,
    pub(crate) op: String,
    members: Value,
}

impl Command {
    /// Reads a line; else the command's id, and what is wrong.
    pub(crate) fn parse(line: &[u8]) -> Result<Self, (i64, String)> {
        let members: Value = serde_json::from_slice(line).map_err(|error| (0, error.to_string()))?;
        let id = members["id"].as_i64().unwrap_or_default();
        let known = members.as_object().into_iter().flatten();
        if let Some((unknown, _)) = known.into_iter().find(|(name, _)| !MEMBERS.contains(&name.as_str())) {
            return Err((id, format!("there is no member {unknown:?}")));
        }
        let op = members["op"].as_str().unwrap_or_default().to_owned();
        Ok(Self { id, op, members })
    }

    pub(crate) fn text(&self, member: &str) -> Option<String> {
        text(&self.members, member)
    }

    pub(crate) fn number(&self, member: &str) -> Option<u64> {
        self.members[member].as_u64()
    }

    pub(crate) fn flag(&self, member: &str) -> bool {
        self.members[member].as_bool().unwrap_or_default()
    }

    pub(crate) fn texts(&self, member: &str) -> Vec<String> {
        texts(&self.members, member)
    }

    /// The context in which the command's call is made.
    pub(crate) fn trace(&self) -> Context {
        let Some(given) = self.text("traceparent") else { return Context::new() };
        let parts: Vec<&str> = given.split('-').collect();
        let [_, trace, span, flags] = parts[..] else { return Context::new() };
        let flags = TraceFlags::new(u8::from_str_radix(flags, 16).unwrap_or_default());
        let (Ok(trace), Ok(span)) = (TraceId::from_hex(trace), SpanId::from_hex(span)) else { return Context::new() };
        Context::new().with_remote_span_context(SpanContext::new(trace, span, flags, true, TraceState::default()))
    }

    pub(crate) fn connect(&self) -> Result<Client, Error> {
        let mut builder = Client::builder();
        if let Some(token) = self.text("token") {
            builder = builder.token(token);
        }
        if let Some(path) = self.text("ca") {
            builder = builder.ca_file(path);
        }
        if let Some(name) = self.text("server_name") {
            builder = builder.server_name(name);
        }
        for (key, value) in self.members["metadata"].as_object().into_iter().flatten() {
            builder = builder.metadata(key, value.as_str().unwrap_or_default());
        }
        if let Some(retries) = self.number("retries") {
            builder = builder.retries(u32::try_from(retries).unwrap_or(u32::MAX));
        }
        if let Some(size) = self.number("max_message_bytes") {
            builder = builder.max_message_bytes(usize::try_from(size).unwrap_or(usize::MAX));
        }
        builder.connect(self.texts("targets"))
    }

    pub(crate) fn session_options(&self) -> SessionOptions {
        let mut options = SessionOptions::new();
        if let Some(lease) = self.number("lease_ms") {
            options = options.lease(Duration::from_millis(lease));
        }
        if let Some(credit) = self.number("initial_credit") {
            options = options.initial_credit(u32::try_from(credit).unwrap_or(u32::MAX));
        }
        if let Some(limit) = self.number("room_timeout_ms") {
            options = options.room_timeout(Duration::from_millis(limit));
        }
        options
    }

    pub(crate) fn batch_options(&self) -> BatchOptions {
        let options = BatchOptions::new().ordered(self.flag("ordered"));
        match self.number("max_in_flight") {
            Some(most) => options.max_in_flight(usize::try_from(most).unwrap_or(usize::MAX)),
            None => options,
        }
    }

    pub(crate) fn load_options(&self) -> LoadOptions {
        LoadOptions::new().pinned(self.flag("pinned")).replace(self.flag("replace"))
    }

    pub(crate) fn request(&self) -> Request {
        request(&self.members["request"])
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.members["requests"].as_array().into_iter().flatten().map(request).collect()
    }
}

fn text(of: &Value, member: &str) -> Option<String> {
    of[member].as_str().map(str::to_owned)
}

fn texts(of: &Value, member: &str) -> Vec<String> {
    of[member].as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

fn small(of: &Value, member: &str) -> Option<u32> {
    of[member].as_u64().and_then(|number| u32::try_from(number).ok())
}

/// The request as a user of the library writes it.
fn request(given: &Value) -> Request {
    let mut made = if let Some(ids) = given["token_ids"].as_array() {
        let ids = ids.iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok());
        Request::tokens(ids.collect::<Vec<_>>())
    } else if let Some(messages) = given["messages"].as_array() {
        Request::chat(messages.iter().map(message))
    } else {
        Request::text(text(given, "text").unwrap_or_default())
    };
    if let Some(tools) = given["tools"].as_array() {
        made = made.tools(tools.iter().map(|tool| Tool {
            name: text(tool, "name").unwrap_or_default(),
            description: text(tool, "description"),
            parameters: text(tool, "parameters").unwrap_or_default(),
            ..Tool::default()
        }));
    }
    match given["tool_choice"].as_str() {
        Some("none") => made = made.tool_choice(ToolMode::None),
        Some("required") => made = made.tool_choice(ToolMode::Required),
        _ => {} // auto is what holds without a choice
    }
    type Set = fn(Request, u32) -> Request;
    let numbers: [(&str, Set); 4] = [
        ("max_tokens", Request::max_tokens),
        ("n", Request::n),
        ("logprobs", Request::logprobs),
        ("max_reasoning_tokens", Request::max_reasoning_tokens),
    ];
    for (member, set) in numbers {
        if let Some(value) = small(given, member) {
            made = set(made, value);
        }
    }
    if let Some(id) = text(given, "id") {
        made = made.id(id);
    }
    if let Some(priority) = given["priority"].as_i64().and_then(|number| i32::try_from(number).ok()) {
        made = made.priority(priority);
    }
    if let Some(seed) = text(given, "seed").and_then(|seed| seed.parse().ok()) {
        made = made.seed(seed);
    }
    if given["stop"].is_array() {
        made = made.stop(texts(given, "stop"));
    }
    if let Some(schema) = text(given, "json_schema") {
        made = made.format(Format::JsonSchema(schema));
    }
    if let Some(tag) = text(given, "structural_tag") {
        made = made.format(Format::StructuralTag(tag));
    }
    if let Some(limit) = given["time_limit_ms"].as_u64() {
        made = made.time_limit(Duration::from_millis(limit));
    }
    if let Some(name) = text(given, "adapter") {
        made = made.adapter(name);
    }
    if let Some(expected) = text(given, "prediction") {
        made = made.prediction(expected);
    }
    made
}

fn message(given: &Value) -> Message {
    let calls = given["tool_calls"].as_array().into_iter().flatten().map(|call| ToolCall {
        id: text(call, "id").unwrap_or_default(),
        name: text(call, "name").unwrap_or_default(),
        arguments: text(call, "arguments").unwrap_or_default(),
    });
    Message {
        role: match given["role"].as_str() {
            Some("system") => Role::System,
            Some("assistant") => Role::Assistant,
            Some("tool") => Role::Tool,
            _ => Role::User,
        },
        content: text(given, "content"),
        tool_calls: calls.collect(),
        tool_call_id: text(given, "tool_call_id").unwrap_or_default(),
        ..Message::default()
    }
}
