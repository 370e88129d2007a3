//! Requests: what to generate, from which prompt, in which form.

use prost::Message as _;
use ring::rand::{SecureRandom, SystemRandom};
use std::time::Duration;

use crate::chat::{Message, Tool, ToolChoice};
use crate::error::{Error, proto_duration};
use crate::proto;
use crate::proto::generation_spec::Input;
use crate::proto::prediction::Content as Predicted;

/// What to generate: a prompt and its options.
///
/// What is not set is not sent, and the server's default holds: the model's own for sampling. The server checks what
/// values may be. A request without an [id](Request::id) gets an unguessable one each time that it is sent.
///
/// ```
/// # use headrace::{Format, Request};
/// let request = Request::text("Once upon a time").max_tokens(32).temperature(0.7).stop(["\n"]);
/// let answer = Request::text("Yes or no? ").format(Format::OneOf(vec!["yes".into(), "no".into()]));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[must_use]
pub struct Request {
    spec: proto::GenerationSpec,
    seed: Option<u64>,
    /// The first option that is none of its prompt's, and what it needs.
    misplaced: Option<(&'static str, &'static str)>,
}

/// A form that the output must have.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Format {
    /// A JSON value that satisfies a schema: the text of a JSON Schema.
    JsonSchema(String),
    /// Any JSON object.
    JsonObject,
    /// Text that matches a regular expression as a whole.
    Regex(String),
    /// Text of a context-free grammar, in Lark's syntax.
    Grammar(String),
    /// One of some strings.
    OneOf(Vec<String>),
    /// Text made of parts, as a JSON object describes it: `{"type": "structural_tag", "format": …}`.
    StructuralTag(String),
}

macro_rules! options {
    ($($(#[$doc:meta])* $name:ident: $type:ty => $section:ident.$field:ident;)*) => {
        $($(#[$doc])* pub fn $name(mut self, value: $type) -> Self {
            self.spec.$section.get_or_insert_default().$field = value.into();
            self
        })*
    };
}

macro_rules! lists {
    ($($(#[$doc:meta])* $name:ident: $type:ty => $section:ident.$field:ident;)*) => {
        $($(#[$doc])* pub fn $name<I>(mut self, values: I) -> Self
        where
            I: IntoIterator,
            I::Item: Into<$type>,
        {
            self.spec.$section.get_or_insert_default().$field = values.into_iter().map(Into::into).collect();
            self
        })*
    };
}

impl Request {
    /// A request whose prompt is text.
    pub fn text(text: impl Into<String>) -> Self {
        let input = Input::Text(proto::TextInput { text: text.into(), add_special_tokens: None });
        Self::from(proto::GenerationSpec { input: Some(input), ..Default::default() })
    }

    /// A request whose prompt is token ids, used as they are.
    pub fn tokens(ids: impl Into<Vec<u32>>) -> Self {
        let input = Input::Tokens(proto::TokenInput { ids: ids.into() });
        Self::from(proto::GenerationSpec { input: Some(input), ..Default::default() })
    }

    /// A request whose prompt is a conversation, oldest message first.
    pub fn chat(messages: impl IntoIterator<Item = Message>) -> Self {
        let messages = messages.into_iter().map(Message::into_proto).collect();
        let input = Input::Chat(proto::ChatInput { messages, ..Default::default() });
        Self::from(proto::GenerationSpec { input: Some(input), ..Default::default() })
    }

    /// The caller's id for the request: 1 to 128 characters of `[A-Za-z0-9._:/-]`.
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.spec.request_id = id.into();
        self
    }

    /// The model that is meant, by its name or an alias; a server that does not have it refuses the request.
    pub fn model(mut self, name: impl Into<String>) -> Self {
        self.spec.model = name.into();
        self
    }

    /// The name of an adapter to apply, such as a LoRA.
    pub fn adapter(mut self, name: impl Into<String>) -> Self {
        self.spec.adapter = name.into();
        self
    }

    /// A label for accounting: it is in the server's logs and traces.
    pub fn label(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.spec.labels.push(proto::Label { name: name.into(), value: value.into() });
        self
    }

    /// How many independent continuations to make.
    pub fn n(mut self, n: u32) -> Self {
        self.spec.n = Some(n);
        self
    }

    /// Makes the draws repeatable. It is below 2^63.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Whether the tokenizer adds its special tokens to a prompt that is text. It does by default.
    pub fn add_special_tokens(mut self, add: bool) -> Self {
        if let Some(Input::Text(text)) = &mut self.spec.input {
            text.add_special_tokens = Some(add);
        } else {
            self.misplaced.get_or_insert(("add_special_tokens", "belongs to a prompt that is text: Request::text"));
        }
        self
    }

    /// The functions that the model may call in its reply to a conversation.
    pub fn tools(self, tools: impl IntoIterator<Item = Tool>) -> Self {
        self.of_chat("tools", |chat| chat.tools = tools.into_iter().map(Tool::into_proto).collect())
    }

    /// Holds the reply to the tools and their schemas.
    pub fn tool_choice(self, choice: impl Into<ToolChoice>) -> Self {
        self.of_chat("tool_choice", |chat| chat.tool_choice = Some(choice.into().into_proto()))
    }

    /// Whether the conversation ends with the opening of an assistant's turn. It does by default.
    pub fn add_generation_prompt(self, add: bool) -> Self {
        self.of_chat("add_generation_prompt", |chat| chat.add_generation_prompt = Some(add))
    }

    /// Leaves the last message open, to be continued by the model.
    pub fn continue_final_message(self, leave_open: bool) -> Self {
        self.of_chat("continue_final_message", |chat| chat.continue_final_message = leave_open)
    }

    /// More named values for the chat template: the text of a JSON object.
    pub fn template_arguments(self, json: impl Into<String>) -> Self {
        self.of_chat("template_arguments", |chat| chat.template_arguments_json = json.into())
    }

    fn of_chat(mut self, option: &'static str, set: impl FnOnce(&mut proto::ChatInput)) -> Self {
        match self.conversation() {
            Some(chat) => set(chat),
            None => {
                self.misplaced.get_or_insert((option, "belongs to a prompt that is a conversation: Request::chat"));
            }
        }
        self
    }

    /// Cuts a longer prompt to so many tokens, from its beginning, instead of refusing it.
    pub fn truncate_prompt_to(mut self, tokens: u32) -> Self {
        self.spec.truncation.get_or_insert_default().max_prompt_tokens = tokens;
        self
    }

    /// Cuts the newest tokens of a longer prompt, not the oldest. It needs [`truncate_prompt_to`](Self::truncate_prompt_to).
    pub fn truncate_right(mut self) -> Self {
        self.spec.truncation.get_or_insert_default().side = proto::TruncationSide::Right.into();
        self
    }

    options! {
        /// Divides the logits; 0 is greedy.
        temperature: f32 => sampling.temperature;
        /// Keeps the k most likely tokens; 0: all.
        top_k: u32 => sampling.top_k;
        /// Keeps the fewest tokens whose probabilities reach this sum.
        top_p: f32 => sampling.top_p;
        /// Keeps tokens at least this likely, relative to the most likely one.
        min_p: f32 => sampling.min_p;
        /// Keeps the tokens of most typical surprise, up to this sum of probability.
        typical_p: f32 => sampling.typical_p;
        /// Divides the logits of tokens that were seen.
        repetition_penalty: f32 => sampling.repetition_penalty;
        /// Is subtracted from the logits of tokens seen in the output.
        presence_penalty: f32 => sampling.presence_penalty;
        /// Is subtracted for each time that a token was seen in the output.
        frequency_penalty: f32 => sampling.frequency_penalty;
        /// No sequence of so many tokens occurs twice; 0: off.
        no_repeat_ngram_size: u32 => sampling.no_repeat_ngram_size;
        /// The most tokens to generate; 0: the prompt is processed only.
        max_tokens: u32 => stop.max_tokens;
        /// Until so many tokens are generated, nothing stops the output.
        min_tokens: u32 => stop.min_tokens;
        /// Treats end-of-sequence tokens like any other.
        ignore_eos: bool => stop.ignore_eos;
        /// Leaves the text that ended the output in it.
        include_stop: bool => stop.include_stop;
        /// In the reply to a conversation, reasoning is ended after so many tokens.
        max_reasoning_tokens: u32 => stop.max_reasoning_tokens;
        /// A chunk is sent once it has so many tokens.
        min_tokens_per_delta: u32 => output.min_tokens_per_delta;
        /// Asks for each token's log-probability and those of so many candidates; 0: the token's own only.
        logprobs: u32 => output.logprobs;
        /// Asks for the same of the prompt's tokens.
        prompt_logprobs: u32 => output.prompt_logprobs;
        /// Has the text start with the prompt's.
        echo: bool => output.echo;
        /// Asks for each token's text and bytes.
        token_details: bool => output.token_details;
        /// Asks for the time of each token.
        record_timestamps: bool => output.record_timestamps;
        /// Whether special tokens are left out of the text. They are by default.
        skip_special_tokens: bool => output.skip_special_tokens;
        /// Asks for token ids alone.
        omit_text: bool => output.omit_text;
        /// Has reasoning and tool calls stay in the text of the reply, as the model wrote them.
        raw_text: bool => output.raw_text;
        /// Requests of a higher number run first.
        priority: i32 => scheduling.priority;
        /// Neither uses cached prefixes nor caches this request's.
        bypass_prefix_cache: bool => cache.bypass_prefix_cache;
    }

    lists! {
        /// Added to the logits of single tokens, by id.
        logit_bias: (u32, f32) => sampling.logit_bias;
        /// The only ids that may be generated.
        allowed_token_ids: u32 => sampling.allowed_token_ids;
        /// Ids that are never generated.
        banned_token_ids: u32 => sampling.banned_token_ids;
        /// Strings that end the output where they first appear.
        stop: String => stop.stop_strings;
        /// Token ids that end the output.
        stop_token_ids: u32 => stop.stop_token_ids;
        /// Replace the model's own end-of-sequence ids.
        eos_token_ids: u32 => stop.eos_token_ids;
        /// Ids whose log-probabilities follow the candidates of each token.
        logprob_token_ids: u32 => output.logprob_token_ids;
    }

    /// Has the output come in one piece at the end.
    pub fn final_only(mut self) -> Self {
        self.spec.output.get_or_insert_default().delivery = proto::Delivery::Final.into();
        self
    }

    /// A form that the output must have.
    pub fn format(mut self, format: Format) -> Self {
        use proto::structured_output::Format as Contract;
        let made = match format {
            Format::JsonSchema(schema) => Contract::JsonSchema(schema),
            Format::JsonObject => Contract::JsonObject(proto::JsonObjectFormat {}),
            Format::Regex(pattern) => Contract::Regex(pattern),
            Format::Grammar(grammar) => Contract::Grammar(grammar),
            Format::OneOf(choices) => Contract::Choice(proto::ChoiceFormat { choices }),
            Format::StructuralTag(tag) => Contract::StructuralTag(tag),
        };
        self.spec.structured_output.get_or_insert_default().format = Some(made);
        self
    }

    /// Lets the model write blanks and line ends as it likes in the JSON of a [format](Self::format). By default it
    /// writes one line.
    pub fn flexible_whitespace(mut self, flexible: bool) -> Self {
        self.spec.structured_output.get_or_insert_default().flexible_whitespace = flexible;
        self
    }

    /// How long the request may take on the server; then it ends with [`FinishReason::TimeLimit`] and its output so far.
    ///
    /// [`FinishReason::TimeLimit`]: crate::FinishReason::TimeLimit
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.spec.scheduling.get_or_insert_default().time_limit = Some(proto_duration(limit));
        self
    }

    /// Cached prefixes are shared only among requests with the same salt.
    pub fn cache_salt(mut self, salt: impl Into<String>) -> Self {
        self.spec.cache.get_or_insert_default().salt = salt.into();
        self
    }

    /// What the output is expected to be like, such as a file that is to be edited. It changes no token: where the server
    /// speculates and the output goes as expected, several tokens come at a time.
    pub fn prediction(self, text: impl Into<String>) -> Self {
        self.predicted(Predicted::Text(text.into()))
    }

    /// The same as token ids.
    pub fn prediction_tokens(self, ids: impl Into<Vec<u32>>) -> Self {
        self.predicted(Predicted::Tokens(proto::TokenInput { ids: ids.into() }))
    }

    fn predicted(mut self, content: Predicted) -> Self {
        self.spec.prediction = Some(proto::Prediction { content: Some(content) });
        self
    }

    /// The contract's message, with an id.
    pub(crate) fn build(mut self) -> Result<proto::GenerationSpec, Error> {
        if let Some((option, needs)) = self.misplaced {
            return Err(Error::invalid(option, needs));
        }
        if let Some(seed) = self.seed {
            let fitting =
                i64::try_from(seed).map_err(|_| Error::invalid("seed", format!("{seed} is not below 2^63")))?;
            self.spec.sampling.get_or_insert_default().seed = Some(fitting);
        }
        if self.spec.request_id.is_empty() {
            self.spec.request_id = random_id()?;
        }
        if self.spec.input.is_none() {
            self.spec.input = Some(Input::Text(proto::TextInput::default()));
        }
        Ok(self.spec)
    }

    /// The conversation of the request, if it is one.
    pub(crate) fn conversation(&mut self) -> Option<&mut proto::ChatInput> {
        match &mut self.spec.input {
            Some(Input::Chat(chat)) => Some(chat),
            _ => None,
        }
    }
}

/// The contract's message, to begin with: for what this library has no option for.
impl From<proto::GenerationSpec> for Request {
    fn from(spec: proto::GenerationSpec) -> Self {
        Self { spec, seed: None, misplaced: None }
    }
}

impl From<&str> for Request {
    fn from(text: &str) -> Self {
        Self::text(text)
    }
}

impl From<String> for Request {
    fn from(text: String) -> Self {
        Self::text(text)
    }
}

/// How many choices a request has.
pub(crate) fn choices_of(spec: &proto::GenerationSpec) -> usize {
    spec.n.unwrap_or(1) as usize
}

pub(crate) fn size_of(spec: &proto::GenerationSpec) -> usize {
    spec.encoded_len()
}

fn random_id() -> Result<String, Error> {
    let mut bytes = [0; 16];
    let filled = SystemRandom::new().fill(&mut bytes);
    filled.map_err(|_| Error::invalid("request_id", "cannot be made: the system gives no random numbers"))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A random number from 0 to 1, to spread tries; the middle where the system gives none.
pub(crate) fn random() -> f64 {
    let mut bytes = [0; 4];
    match SystemRandom::new().fill(&mut bytes) {
        Ok(()) => f64::from(u32::from_le_bytes(bytes)) / f64::from(u32::MAX),
        Err(_) => 0.5,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_below_2_to_the_63() {
        let largest = Request::text("a").seed(i64::MAX as u64).build().unwrap();
        assert_eq!(largest.sampling.unwrap().seed, Some(i64::MAX));
        let error = Request::text("a").seed(1 << 63).build().unwrap_err();
        assert_eq!(error.fields()[0].field, "seed");
    }

    #[test]
    fn an_id_is_made_each_time() {
        let request = Request::text("a");
        let ids: Vec<_> = (0..2).map(|_| request.clone().build().unwrap().request_id).collect();
        assert_ne!(ids[0], ids[1]);
        assert_eq!(request.id("mine").build().unwrap().request_id, "mine");
    }

    #[test]
    fn an_option_that_is_none_of_the_prompt_s_is_refused() {
        let of_chat = Request::text("a").tools([Tool::new("f")]).build().unwrap_err();
        assert_eq!(of_chat.fields()[0].field, "tools");
        let of_text = Request::tokens([1]).add_special_tokens(false).build().unwrap_err();
        assert_eq!(of_text.fields()[0].field, "add_special_tokens");
        assert!(Request::chat([Message::user("a")]).tools([Tool::new("f")]).build().is_ok());
    }

    #[test]
    fn a_prediction_is_text_or_token_ids() {
        let content = |request: Request| request.build().unwrap().prediction.unwrap().content.unwrap();
        assert_eq!(content(Request::text("a").prediction("b")), Predicted::Text("b".into()));
        let tokens = content(Request::text("a").prediction_tokens([3, 4]));
        assert_eq!(tokens, Predicted::Tokens(proto::TokenInput { ids: vec![3, 4] }));
    }

    #[test]
    fn what_is_not_set_is_not_sent() {
        let spec = Request::text("a").build().unwrap();
        assert!(spec.sampling.is_none() && spec.stop.is_none() && spec.output.is_none() && spec.scheduling.is_none());
    }
}
