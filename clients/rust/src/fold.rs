//! Joins the events of one request. Each number is taken once and in order: an event that is missing, repeated or out of
//! place ends the request with an error, so that output is never silently wrong.

use tonic::Code;

use crate::chat::ToolCall;
use crate::error::{Error, ErrorKind};
use crate::proto;
use crate::proto::result_event::Event;
use crate::result::{Accepted, Choice, Chunk, Completion, Prompt, Token, ToolCallPart, Usage};

/// Beyond every server's limit: an index that is wrong must not take memory.
const MAX_CHOICES: usize = 1 << 16;

#[derive(Clone, Debug, Default)]
pub(crate) struct Fold {
    pub(crate) id: String,
    pub(crate) instance: String,
    /// How many choices it has; 0: not known, Accepted tells it.
    n: usize,
    /// The number of the event that comes next.
    pub(crate) next: u64,
    /// Whether there was output.
    pub(crate) has_begun: bool,
    pub(crate) accepted: Option<Accepted>,
    prompt: Option<Prompt>,
    choices: Vec<Folded>,
    finished: usize,
    pub(crate) error: Option<Error>,
    /// Whether the request has ended.
    pub(crate) done: bool,
    /// Whether its events told the end: nothing follows.
    pub(crate) was_told: bool,
}

#[derive(Clone, Debug, Default)]
struct Folded {
    choice: Choice,
    has_ended: bool,
}

impl Fold {
    pub(crate) fn new(id: impl Into<String>, n: usize, from: u64) -> Self {
        Self { id: id.into(), n, next: from.max(1), ..Self::default() }
    }

    /// Takes the next event, and gives its output, if it has some.
    pub(crate) fn add(&mut self, event: proto::ResultEvent) -> Option<Chunk> {
        if let Some(problem) = self.problem(&event) {
            let told = format!("the server broke the contract: {problem}");
            self.fail(Error::new(ErrorKind::Protocol, Code::DataLoss, told));
            return None;
        }
        self.next += 1;
        let index = event.choice_index as usize;
        match event.event {
            Some(Event::Delta(delta)) => {
                self.has_begun = true;
                return Some(self.choice(index).add(index, event.seq, delta));
            }
            Some(Event::Accepted(told)) => {
                if told.n > 0 {
                    self.n = told.n as usize;
                }
                self.n = self.n.max(1);
                self.accepted = Some(Accepted::from_proto(&self.id, told));
            }
            Some(Event::Prompt(told)) => self.prompt = Some(Prompt::from_proto(told)),
            Some(Event::Finished(told)) => {
                let folded = self.choice(index);
                folded.choice.finish(told);
                folded.has_ended = true;
                self.finished += 1;
                if self.n > 0 && self.finished >= self.n {
                    (self.done, self.was_told) = (true, true);
                }
            }
            Some(Event::Failed(told)) => {
                self.fail(Error::from_rpc(&told.status.unwrap_or_default()));
                self.was_told = true;
            }
            None => {} // newer than this library: it is counted and passed over
        }
        None
    }

    fn problem(&self, event: &proto::ResultEvent) -> Option<String> {
        let index = event.choice_index as usize;
        let has_ended = self.choices.get(index).is_some_and(|folded| folded.has_ended);
        let is_failed = matches!(event.event, Some(Event::Failed(_)));
        match &event.event {
            Some(Event::Accepted(told)) if told.request_id != self.id => {
                return Some(format!("{:?} was accepted where {:?} was due", told.request_id, self.id));
            }
            _ => {}
        }
        if event.seq != self.next {
            Some(format!("event {} came where {} was due", event.seq, self.next))
        } else if self.done || (has_ended && !is_failed) {
            Some(format!("event {} came after the end", event.seq))
        } else if (self.n > 0 && index >= self.n) || index >= MAX_CHOICES {
            Some(format!("event {} is of choice {index}, out of {}", event.seq, self.n))
        } else {
            None
        }
    }

    fn choice(&mut self, index: usize) -> &mut Folded {
        if self.choices.len() <= index {
            self.choices.resize_with(index + 1, Folded::default);
        }
        &mut self.choices[index]
    }

    /// Ends the request with an error; the first one stays.
    pub(crate) fn fail(&mut self, error: Error) {
        if self.error.is_none() {
            let mut made = if error.request_id().is_empty() { error.of(&self.id) } else { error };
            if self.accepted.is_some() {
                made = made.with_partial(self.partial());
            }
            self.error = Some(made);
        }
        self.done = true;
    }

    /// Forgets all events: the request is sent again, and they begin anew.
    pub(crate) fn restart(&mut self) {
        *self = Self::new(std::mem::take(&mut self.id), self.n, 1);
    }

    /// The whole output, or why there is none.
    pub(crate) fn result(&self) -> Result<Completion, Error> {
        match &self.error {
            Some(error) => Err(error.clone()),
            None => Ok(self.partial()),
        }
    }

    /// The output so far.
    fn partial(&self) -> Completion {
        let mut usage = Usage::default();
        if let Some(prompt) = &self.prompt {
            (usage.prompt_tokens, usage.cached_tokens) = (prompt.tokens, prompt.cached_tokens);
        }
        let count = self.n.max(self.choices.len()).max(1);
        let choices: Vec<Choice> = (0..count)
            .map(|index| {
                let mut choice = self.choices.get(index).map(|folded| folded.choice.clone()).unwrap_or_default();
                choice.index = index;
                choice
            })
            .collect();
        for choice in &choices {
            usage.prompt_tokens = usage.prompt_tokens.max(choice.usage.prompt_tokens);
            usage.cached_tokens = usage.cached_tokens.max(choice.usage.cached_tokens);
            usage.completion_tokens += choice.usage.completion_tokens;
            usage.reasoning_tokens += choice.usage.reasoning_tokens;
            usage.draft_tokens += choice.usage.draft_tokens;
            usage.accepted_draft_tokens += choice.usage.accepted_draft_tokens;
            usage.prediction_draft_tokens += choice.usage.prediction_draft_tokens;
            usage.accepted_prediction_draft_tokens += choice.usage.accepted_prediction_draft_tokens;
        }
        Completion {
            request_id: self.id.clone(),
            instance_id: self.instance.clone(),
            choices,
            usage,
            accepted: self.accepted.clone(),
            prompt: self.prompt.clone(),
        }
    }

    /// A fold that continues where this one was interrupted, with all its output. If the request's end had arrived, it
    /// has that too.
    pub(crate) fn reopened(&self) -> Self {
        let mut made = self.clone();
        if !made.was_told {
            (made.done, made.error) = (false, None);
        }
        made
    }
}

impl Folded {
    fn add(&mut self, index: usize, seq: u64, delta: proto::Delta) -> Chunk {
        let own = &mut self.choice;
        let tokens: Vec<Token> = delta.tokens.into_iter().map(Token::from_proto).collect();
        let token_ids = if tokens.is_empty() { delta.token_ids } else { tokens.iter().map(|token| token.id).collect() };
        let offset = own.token_ids.len();
        own.text.push_str(&delta.text);
        own.reasoning.push_str(&delta.reasoning);
        own.token_ids.extend_from_slice(&token_ids);
        own.tokens.extend_from_slice(&tokens);
        let mut tool_calls = Vec::with_capacity(delta.tool_calls.len());
        for told in delta.tool_calls {
            let part = ToolCallPart {
                index: told.index as usize,
                id: told.id,
                name: told.name,
                arguments: told.arguments_json,
            };
            // The parts of calls come in order: the first part of a call has its id and name.
            if part.index >= own.tool_calls.len() {
                own.tool_calls.push(ToolCall {
                    id: part.id.clone(),
                    name: part.name.clone(),
                    arguments: String::new(),
                });
            }
            let last = own.tool_calls.len() - 1;
            own.tool_calls[part.index.min(last)].arguments.push_str(&part.arguments);
            tool_calls.push(part);
        }
        Chunk {
            choice: index,
            seq,
            offset,
            text: delta.text,
            reasoning: delta.reasoning,
            tool_calls,
            token_ids,
            tokens,
        }
    }
}
