//! Conversations: messages, tools and tool calls.

use crate::proto;
use crate::proto::chat_message::ContentKind;

/// Who speaks in a message of a conversation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Role {
    /// Whoever set the assistant up.
    System,
    /// Who asks.
    #[default]
    User,
    /// The model.
    Assistant,
    /// A tool, which answers a call.
    Tool,
    /// The application's developer, for templates that tell this from the system.
    Developer,
}

/// One message of a conversation. [`Message::user`] and its like make the ordinary ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said. `None`: the template sees a message without content, as beside tool calls.
    pub content: Option<String>,
    /// What is said in several parts, each of them text, for templates that take such. They take the place of the content.
    pub parts: Vec<String>,
    /// The speaker's name, for templates that use it.
    pub name: String,
    /// The calls that the assistant made in this message.
    pub tool_calls: Vec<ToolCall>,
    /// The id of the call that this message answers, if its role is [`Role::Tool`].
    pub tool_call_id: String,
    /// What the assistant thought before it answered, for templates that replay it.
    pub reasoning: String,
}

impl Message {
    /// A message of this role.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: Some(content.into()), ..Self::default() }
    }

    /// What the system says.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new(Role::System, content)
    }

    /// What the user says.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new(Role::User, content)
    }

    /// What the assistant said.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new(Role::Assistant, content)
    }

    /// The answer to a call.
    pub fn tool(call: &ToolCall, content: impl Into<String>) -> Self {
        Self { name: call.name.clone(), tool_call_id: call.id.clone(), ..Self::new(Role::Tool, content) }
    }

    pub(crate) fn into_proto(self) -> proto::ChatMessage {
        let role = match self.role {
            Role::System => proto::ChatRole::System,
            Role::User => proto::ChatRole::User,
            Role::Assistant => proto::ChatRole::Assistant,
            Role::Tool => proto::ChatRole::Tool,
            Role::Developer => proto::ChatRole::Developer,
        };
        let part = |text| proto::ContentPart { part: Some(proto::content_part::Part::Text(text)) };
        let content_kind = if self.parts.is_empty() {
            self.content.map(ContentKind::Content)
        } else {
            let parts = self.parts.into_iter().map(part).collect();
            Some(ContentKind::ContentParts(proto::ContentParts { parts }))
        };
        proto::ChatMessage {
            role: role.into(),
            name: self.name,
            tool_calls: self.tool_calls.into_iter().map(ToolCall::into_proto).collect(),
            tool_call_id: self.tool_call_id,
            reasoning_content: self.reasoning,
            content_kind,
        }
    }
}

/// A call of a tool that the assistant made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolCall {
    /// Repeated in the answer's `tool_call_id`.
    pub id: String,
    /// The tool's name. It need not be one of the request's.
    pub name: String,
    /// The text of a JSON object, as the model wrote it. It may be cut where the output ended.
    pub arguments: String,
}

impl ToolCall {
    fn into_proto(self) -> proto::ToolCall {
        proto::ToolCall { id: self.id, name: self.name, arguments_json: self.arguments }
    }

    pub(crate) fn from_proto(told: proto::ToolCall) -> Self {
        Self { id: told.id, name: told.name, arguments: told.arguments_json }
    }
}

/// A function that the model may call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tool {
    /// The function's name. Needed, unless there is a definition.
    pub name: String,
    /// What it does, for the model to read.
    pub description: Option<String>,
    /// Its parameters: the text of a JSON Schema.
    pub parameters: String,
    /// The whole tool as the template is to see it, the text of a JSON object, in place of the other fields.
    pub definition: String,
}

impl Tool {
    /// A tool of this name.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// What the tool does, for the model to read.
    #[must_use]
    pub fn description(mut self, text: impl Into<String>) -> Self {
        self.description = Some(text.into());
        self
    }

    /// The tool's parameters: the text of a JSON Schema.
    #[must_use]
    pub fn parameters(mut self, schema: impl Into<String>) -> Self {
        self.parameters = schema.into();
        self
    }

    /// A tool as the template is to see it: the text of a JSON object.
    pub fn definition(json: impl Into<String>) -> Self {
        Self { definition: json.into(), ..Self::default() }
    }

    pub(crate) fn into_proto(self) -> proto::Tool {
        proto::Tool {
            name: self.name,
            description: self.description,
            parameters_json: self.parameters,
            definition_json: self.definition,
        }
    }
}

/// Whether a reply calls tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ToolMode {
    /// The model chooses.
    #[default]
    Auto,
    /// It calls none.
    None,
    /// It calls at least one, and says nothing else.
    Required,
}

/// Which tools a reply calls. The model is held to it, whatever the mode: to these tools and their schemas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolChoice {
    /// Whether the reply calls tools.
    pub mode: ToolMode,
    /// The only tools that may be called. None: all of the request's.
    pub names: Vec<String>,
    /// Whether a reply may have several calls. `None`: whether the model's format has that.
    pub parallel: Option<bool>,
}

impl From<ToolMode> for ToolChoice {
    fn from(mode: ToolMode) -> Self {
        Self { mode, ..Self::default() }
    }
}

impl ToolChoice {
    pub(crate) fn into_proto(self) -> proto::ToolChoice {
        let mode = match self.mode {
            ToolMode::Auto => proto::ToolChoiceMode::Auto,
            ToolMode::None => proto::ToolChoiceMode::None,
            ToolMode::Required => proto::ToolChoiceMode::Required,
        };
        proto::ToolChoice { mode: mode.into(), tool_names: self.names, parallel_calls: self.parallel }
    }
}
