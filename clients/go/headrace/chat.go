package headrace

import (
	"encoding/json"

	headracev1 "headrace.dev/go/headrace/v1"
)

// A Role says who speaks in a message of a conversation.
type Role string

// The roles.
const (
	RoleSystem    Role = "system"
	RoleUser      Role = "user"
	RoleAssistant Role = "assistant"
	RoleTool      Role = "tool"
	RoleDeveloper Role = "developer"
)

var roles = map[Role]headracev1.ChatRole{
	RoleSystem:    headracev1.ChatRole_CHAT_ROLE_SYSTEM,
	RoleUser:      headracev1.ChatRole_CHAT_ROLE_USER,
	RoleAssistant: headracev1.ChatRole_CHAT_ROLE_ASSISTANT,
	RoleTool:      headracev1.ChatRole_CHAT_ROLE_TOOL,
	RoleDeveloper: headracev1.ChatRole_CHAT_ROLE_DEVELOPER,
}

// A Message is one message of a conversation.
type Message struct {
	// Role says who speaks.
	Role Role
	// Content is what is said.
	Content string
	// NoContent has the template see a message without content instead of one that is empty, as beside ToolCalls.
	NoContent bool
	// Parts is what is said in several parts, each of them text, for templates that take such. Excludes Content.
	Parts []string
	// Name is the speaker's name, for templates that use it.
	Name string
	// ToolCalls are the calls that the assistant made in this message.
	ToolCalls []ToolCall
	// ToolCallID is the id of the call that this message answers, if its role is RoleTool.
	ToolCallID string
	// Reasoning is what the assistant thought before it answered, for templates that replay it.
	Reasoning string
}

// A ToolCall is a call of a tool that the assistant made.
type ToolCall struct {
	// ID is repeated in the answer's ToolCallID.
	ID string
	// Name is the tool's name. It need not be one of the request's.
	Name string
	// Arguments is the text of a JSON object, as the model wrote it. It may be cut where the output ended.
	Arguments string
}

// Decode reads the call's arguments into what target points to, as [json.Unmarshal] does.
func (c ToolCall) Decode(target any) error {
	text := c.Arguments
	if text == "" {
		text = "{}"
	}
	return json.Unmarshal([]byte(text), target)
}

// A Tool is a function that the model may call.
type Tool struct {
	// Name is the function's name. Required, unless Definition is set.
	Name string
	// Description says what it does, for the model to read.
	Description string
	// Parameters is the text of a JSON Schema.
	Parameters string
	// Definition is the whole tool as the template is to see it, the text of a JSON object. Excludes the other fields.
	Definition string
}

// A ToolMode says whether a reply calls tools.
type ToolMode string

// The modes.
const (
	// ToolAuto lets the model choose.
	ToolAuto ToolMode = "auto"
	// ToolNone has it call none.
	ToolNone ToolMode = "none"
	// ToolRequired has it call at least one, and say nothing else.
	ToolRequired ToolMode = "required"
)

var toolModes = map[ToolMode]headracev1.ToolChoiceMode{
	"":           headracev1.ToolChoiceMode_TOOL_CHOICE_MODE_UNSPECIFIED,
	ToolAuto:     headracev1.ToolChoiceMode_TOOL_CHOICE_MODE_AUTO,
	ToolNone:     headracev1.ToolChoiceMode_TOOL_CHOICE_MODE_NONE,
	ToolRequired: headracev1.ToolChoiceMode_TOOL_CHOICE_MODE_REQUIRED,
}

// A ToolChoice says which tools a reply calls. The model is held to it, whatever the mode: to these tools and their
// schemas.
type ToolChoice struct {
	// Mode says whether the reply calls tools. Empty: ToolAuto.
	Mode ToolMode
	// Names are the only tools that may be called. None: all of the request's.
	Names []string
	// Parallel tells whether a reply may have several calls. Nil: whether the model's format has that.
	Parallel *bool
}

func (b *builder) chat(r *Request, chat *headracev1.ChatInput) {
	for _, message := range r.Messages {
		chat.Messages = append(chat.Messages, b.message(message))
	}
	for _, tool := range r.Tools {
		chat.Tools = append(chat.Tools, b.tool(tool))
	}
	if choice := r.ToolChoice; choice != nil {
		mode, known := toolModes[choice.Mode]
		if !known {
			b.fail("tool_choice", "there is no tool choice %q; use auto, none or required", choice.Mode)
		}
		chat.ToolChoice = &headracev1.ToolChoice{Mode: mode, ToolNames: choice.Names, ParallelCalls: choice.Parallel}
	}
	if r.AddGenerationPrompt != nil {
		chat.AddGenerationPrompt = r.AddGenerationPrompt
	}
	chat.ContinueFinalMessage = chat.ContinueFinalMessage || r.ContinueFinalMessage
	setString(r.TemplateArguments, &chat.TemplateArgumentsJson)
}

func (b *builder) message(m Message) *headracev1.ChatMessage {
	role, known := roles[m.Role]
	if !known {
		b.fail("messages", "there is no role %q", m.Role)
	}
	made := &headracev1.ChatMessage{
		Role:             role,
		Name:             m.Name,
		ToolCallId:       m.ToolCallID,
		ReasoningContent: m.Reasoning,
	}
	for _, call := range m.ToolCalls {
		made.ToolCalls = append(made.ToolCalls, &headracev1.ToolCall{
			Id: call.ID, Name: call.Name, ArgumentsJson: call.Arguments,
		})
	}
	switch {
	case len(m.Parts) > 0 && m.Content != "", m.NoContent && (len(m.Parts) > 0 || m.Content != ""):
		b.fail("messages", "a message has Content, Parts or NoContent, one of them")
	case len(m.Parts) > 0:
		parts := &headracev1.ContentParts{}
		for _, text := range m.Parts {
			parts.Parts = append(parts.Parts, &headracev1.ContentPart{Part: &headracev1.ContentPart_Text{Text: text}})
		}
		made.ContentKind = &headracev1.ChatMessage_ContentParts{ContentParts: parts}
	case !m.NoContent:
		made.ContentKind = &headracev1.ChatMessage_Content{Content: m.Content}
	}
	return made
}

func (b *builder) tool(t Tool) *headracev1.Tool {
	if t.Definition != "" && (t.Name != "" || t.Description != "" || t.Parameters != "") {
		b.fail("tools", "a tool with a Definition has no other fields")
	}
	made := &headracev1.Tool{Name: t.Name, ParametersJson: t.Parameters, DefinitionJson: t.Definition}
	if t.Description != "" {
		made.Description = &t.Description
	}
	return made
}
