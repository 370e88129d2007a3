//! What a request gives: chunks of output as they come, and the whole completion.

use std::fmt;
use std::time::{Duration, SystemTime};

use crate::chat::{Message, Role, ToolCall};
use crate::proto;

/// Why a choice ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FinishReason {
    /// It has not ended, as in a request that failed; or the reason is newer than this library.
    #[default]
    Unknown,
    /// A stop string, a stop id or an end-of-sequence token.
    Stop,
    /// `max_tokens` was reached.
    Length,
    /// The context is full.
    Context,
    /// It was cancelled.
    Cancelled,
    /// The time limit was reached.
    TimeLimit,
    /// It stopped after tool calls, whose arguments are whole.
    ToolCalls,
}

impl FinishReason {
    /// The reason in words, such as `"length"`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Context => "context",
            Self::Cancelled => "cancelled",
            Self::TimeLimit => "time_limit",
            Self::ToolCalls => "tool_calls",
        }
    }

    fn from_proto(told: i32) -> Self {
        match proto::FinishReason::try_from(told) {
            Ok(proto::FinishReason::Stop) => Self::Stop,
            Ok(proto::FinishReason::Length) => Self::Length,
            Ok(proto::FinishReason::Context) => Self::Context,
            Ok(proto::FinishReason::Cancelled) => Self::Cancelled,
            Ok(proto::FinishReason::TimeLimit) => Self::TimeLimit,
            Ok(proto::FinishReason::ToolCalls) => Self::ToolCalls,
            Ok(proto::FinishReason::Unspecified) | Err(_) => Self::Unknown,
        }
    }
}

impl fmt::Display for FinishReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The whole output of a request.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Completion {
    /// The request's id.
    pub request_id: String,
    /// The server process that ran it. Empty: not known.
    pub instance_id: String,
    /// The outputs, by their index; there is at least one.
    pub choices: Vec<Choice>,
    /// The cost in tokens, of all choices together.
    pub usage: Usage,
    /// The parameters in force, if they were received.
    pub accepted: Option<Accepted>,
    /// How the prompt was processed, if that was received.
    pub prompt: Option<Prompt>,
}

impl Completion {
    /// The text of the first choice.
    pub fn text(&self) -> &str {
        self.choices.first().map_or("", |first| &first.text)
    }

    /// The token ids of the first choice.
    pub fn token_ids(&self) -> &[u32] {
        self.choices.first().map_or(&[], |first| &first.token_ids)
    }

    /// What the model thought before the first choice's text.
    pub fn reasoning(&self) -> &str {
        self.choices.first().map_or("", |first| &first.reasoning)
    }

    /// The tool calls of the first choice.
    pub fn tool_calls(&self) -> &[ToolCall] {
        self.choices.first().map_or(&[], |first| &first.tool_calls)
    }

    /// Why the first choice ended.
    pub fn finish_reason(&self) -> FinishReason {
        self.choices.first().map_or(FinishReason::Unknown, |first| first.finish_reason)
    }

    /// The first choice as the assistant's message, for the next turn of a conversation.
    pub fn message(&self) -> Message {
        let text = self.text();
        Message {
            role: Role::Assistant,
            content: (!text.is_empty() || self.tool_calls().is_empty()).then(|| text.to_owned()),
            reasoning: self.reasoning().to_owned(),
            tool_calls: self.tool_calls().to_vec(),
            ..Message::default()
        }
    }

    /// The answer of Generate.
    pub(crate) fn from_proto(told: proto::GenerateResponse) -> Self {
        let choices = told.choices.into_iter().map(Choice::from_proto).collect();
        Self {
            accepted: told.accepted.map(|accepted| Accepted::from_proto(&told.request_id, accepted)),
            request_id: told.request_id,
            instance_id: told.instance_id,
            choices,
            usage: Usage::from_proto(told.usage.unwrap_or_default()),
            prompt: told.prompt.map(Prompt::from_proto),
        }
    }
}

/// One of a request's outputs.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Choice {
    /// Which of the request's choices it is.
    pub index: usize,
    /// What the model wrote: in the reply to a conversation, without reasoning and tool calls.
    pub text: String,
    /// What the model thought before it answered.
    pub reasoning: String,
    /// The tools that it called, in order.
    pub tool_calls: Vec<ToolCall>,
    /// The ids of all its tokens.
    pub token_ids: Vec<u32>,
    /// The tokens with their details, if they were asked for.
    pub tokens: Vec<Token>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// What was found, if a stop string ended it.
    pub stop_string: Option<String>,
    /// What was generated, if a stop or end-of-sequence id ended it.
    pub stop_token_id: Option<u32>,
    /// Its cost. Prompt and cached tokens are the request's, and count once.
    pub usage: Usage,
    /// How long it took.
    pub timings: Timings,
}

impl Choice {
    fn from_proto(told: proto::GeneratedChoice) -> Self {
        let mut made = Self {
            index: told.index as usize,
            text: told.text,
            reasoning: told.reasoning,
            tool_calls: told.tool_calls.into_iter().map(ToolCall::from_proto).collect(),
            token_ids: told.token_ids,
            tokens: told.tokens.into_iter().map(Token::from_proto).collect(),
            ..Self::default()
        };
        made.finish(told.finished.unwrap_or_default());
        made
    }

    /// Puts how it ended in it.
    pub(crate) fn finish(&mut self, told: proto::Finished) {
        self.finish_reason = FinishReason::from_proto(told.reason);
        match told.matched {
            Some(proto::finished::Matched::StopString(text)) => self.stop_string = Some(text),
            Some(proto::finished::Matched::StopTokenId(id)) => self.stop_token_id = Some(id),
            None => {}
        }
        self.usage = Usage::from_proto(told.usage.unwrap_or_default());
        let timings = told.timings.unwrap_or_default();
        self.timings = Timings {
            first_scheduled: timings.first_scheduled_duration.and_then(duration),
            first_token: timings.first_token_duration.and_then(duration),
            last_token: timings.last_token_duration.and_then(duration),
            finished: timings.finished_duration.and_then(duration),
            preemptions: timings.preemptions,
        };
    }
}

/// A piece of a choice's output. The texts of all its chunks, joined, are the text.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Chunk {
    /// Which of the request's choices it belongs to.
    pub choice: usize,
    /// The event's number in the request.
    pub seq: u64,
    /// How many tokens of the choice came before it. An attached request counts from where it began.
    pub offset: usize,
    /// The new text. It may be empty: characters are never split.
    pub text: String,
    /// New reasoning.
    pub reasoning: String,
    /// Parts of tool calls.
    pub tool_calls: Vec<ToolCallPart>,
    /// The ids of the new tokens.
    pub token_ids: Vec<u32>,
    /// The new tokens with their details, if they were asked for.
    pub tokens: Vec<Token>,
}

/// A piece of a tool call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ToolCallPart {
    /// Which of the reply's calls it belongs to.
    pub index: usize,
    /// The call's id, in its first part.
    pub id: String,
    /// The tool's name, in the call's first part.
    pub name: String,
    /// The next piece of the arguments' text.
    pub arguments: String,
}

/// One token with its details.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Its own text; a part of a character shows as U+FFFD.
    pub text: String,
    /// Its own bytes. Joined, they are the text in UTF-8.
    pub bytes: Vec<u8>,
    /// Its log-probability, if that was asked for.
    pub logprob: Option<f32>,
    /// Its rank by probability, from 1, if that was asked for.
    pub rank: Option<u32>,
    /// The most likely tokens at its place, then those of `logprob_token_ids`.
    pub candidates: Vec<Candidate>,
    /// The time from the request's acceptance, if that was asked for.
    pub elapsed: Option<Duration>,
}

impl Token {
    pub(crate) fn from_proto(told: proto::TokenInfo) -> Self {
        let candidate = |one: proto::TokenCandidate| Candidate {
            id: one.id,
            text: one.text,
            bytes: one.bytes,
            logprob: one.logprob,
        };
        Self {
            id: told.id,
            text: told.text,
            bytes: told.bytes,
            logprob: told.logprob,
            rank: told.rank,
            candidates: told.candidates.into_iter().map(candidate).collect(),
            elapsed: told.elapsed_duration.and_then(duration),
        }
    }
}

/// A token that could have been chosen.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Candidate {
    /// Its id.
    pub id: u32,
    /// Its own text.
    pub text: String,
    /// Its own bytes.
    pub bytes: Vec<u8>,
    /// Its log-probability.
    pub logprob: f32,
}

/// A cost in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// The prompt's.
    pub prompt_tokens: u32,
    /// Those of them that were found in the prefix cache.
    pub cached_tokens: u32,
    /// Generated and delivered.
    pub completion_tokens: u32,
    /// Those of them that were reasoning.
    pub reasoning_tokens: u32,
    /// Guessed and computed, wrong ones included.
    pub draft_tokens: u32,
    /// Those of them that were right, and needed no step of their own.
    pub accepted_draft_tokens: u32,
    /// Those of `draft_tokens` that were guessed from the request's prediction.
    pub prediction_draft_tokens: u32,
    /// Those of these that were right.
    pub accepted_prediction_draft_tokens: u32,
}

impl Usage {
    pub(crate) fn from_proto(told: proto::Usage) -> Self {
        Self {
            prompt_tokens: told.prompt_tokens,
            cached_tokens: told.cached_tokens,
            completion_tokens: told.completion_tokens,
            reasoning_tokens: told.reasoning_tokens,
            draft_tokens: told.draft_tokens,
            accepted_draft_tokens: told.accepted_draft_tokens,
            prediction_draft_tokens: told.prediction_draft_tokens,
            accepted_prediction_draft_tokens: told.accepted_prediction_draft_tokens,
        }
    }
}

/// Times of a request, from its acceptance. A time is `None` if it did not come to that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Timings {
    /// When it was first run.
    pub first_scheduled: Option<Duration>,
    /// When its first token was there.
    pub first_token: Option<Duration>,
    /// When its last token was there.
    pub last_token: Option<Duration>,
    /// When it ended.
    pub finished: Option<Duration>,
    /// How often it gave up its cache to others.
    pub preemptions: u32,
}

/// A server took a request, with these parameters.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Accepted {
    /// The request's id.
    pub request_id: String,
    /// The prompt's length.
    pub prompt_tokens: u32,
    /// How many requests waited before it.
    pub queue_position: u32,
    /// How many outputs it has.
    pub choices: usize,
    /// When it was accepted, by the server's clock.
    pub time: Option<SystemTime>,
    /// The values of sampling in force, with the seed.
    pub sampling: Option<proto::SamplingOptions>,
    /// The limits in force.
    pub stop: Option<proto::StopOptions>,
    /// The digest of its adapter's content, in hexadecimal. Empty: it has none.
    pub adapter_digest: String,
}

impl Accepted {
    pub(crate) fn from_proto(request_id: &str, told: proto::Accepted) -> Self {
        Self {
            request_id: request_id.to_owned(),
            prompt_tokens: told.prompt_tokens,
            queue_position: told.queue_position,
            choices: told.n.max(1) as usize,
            time: told.accept_time.and_then(|time| SystemTime::try_from(time).ok()),
            sampling: told.sampling,
            stop: told.stop,
            adapter_digest: told.adapter_digest,
        }
    }
}

/// How a prompt was processed.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Prompt {
    /// Its length in tokens.
    pub tokens: u32,
    /// Those of them that were found in the prefix cache.
    pub cached_tokens: u32,
    /// Its tokens, if `prompt_logprobs` was set.
    pub details: Vec<Token>,
}

impl Prompt {
    pub(crate) fn from_proto(told: proto::PromptProcessed) -> Self {
        Self {
            tokens: told.prompt_tokens,
            cached_tokens: told.cached_tokens,
            details: told.tokens.into_iter().map(Token::from_proto).collect(),
        }
    }
}

pub(crate) fn duration(told: prost_types::Duration) -> Option<Duration> {
    Duration::try_from(told).ok()
}
