// Command tokenize prints the token ids of conversations, as a Headrace server's chat template lays them out.
//
//	tokenize --target localhost:50051 < conversations.jsonl
//
// Each line of the standard input is a conversation, a JSON object of the shape that OpenAI's API and transformers'
// chat templates have:
//
//	{"messages": [{"role": "user", "content": "hi"}], "tools": [...], "template_arguments": {...},
//	 "add_generation_prompt": true, "continue_final_message": false}
//
// Tools, template arguments and the arguments of tool calls are sent as they stand in the line: their members keep
// their order, and numbers their digits. Each line of the output is {"token_ids": [...]}, or {"error": "..."} for a
// conversation that was refused; then the exit code is 1.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	headracev1 "headrace.dev/go/headrace/v1"
)

// The longest line of the standard input.
const maxLineBytes = 4 << 20

// conversation is a line of the input. What is JSON on the wire stays the text that it is here.
type conversation struct {
	Messages             []message         `json:"messages"`
	Tools                []json.RawMessage `json:"tools"`
	TemplateArguments    json.RawMessage   `json:"template_arguments"`
	AddGenerationPrompt  *bool             `json:"add_generation_prompt"`
	ContinueFinalMessage bool              `json:"continue_final_message"`
}

type message struct {
	Role             string          `json:"role"`
	Content          json.RawMessage `json:"content"`
	Name             string          `json:"name"`
	ToolCalls        []toolCall      `json:"tool_calls"`
	ToolCallID       string          `json:"tool_call_id"`
	ReasoningContent string          `json:"reasoning_content"`
}

type toolCall struct {
	ID       string `json:"id"`
	Function struct {
		Name      string          `json:"name"`
		Arguments json.RawMessage `json:"arguments"`
	} `json:"function"`
}

var roles = map[string]headracev1.ChatRole{
	"system":    headracev1.ChatRole_CHAT_ROLE_SYSTEM,
	"user":      headracev1.ChatRole_CHAT_ROLE_USER,
	"assistant": headracev1.ChatRole_CHAT_ROLE_ASSISTANT,
	"tool":      headracev1.ChatRole_CHAT_ROLE_TOOL,
	"developer": headracev1.ChatRole_CHAT_ROLE_DEVELOPER,
}

func main() {
	target := flag.String("target", "localhost:50051", "the server's `address`: host:port or unix:/path")
	flag.Parse()
	if err := run(*target); err != nil {
		fmt.Fprintln(os.Stderr, "tokenize:", err)
		os.Exit(1)
	}
}

func run(target string) error {
	connection, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	client := headracev1.NewModelServiceClient(connection)
	out := json.NewEncoder(os.Stdout)
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, maxLineBytes)
	refused := 0
	for lines.Scan() {
		ids, err := tokenize(client, lines.Bytes())
		if err != nil {
			refused++
			err = out.Encode(map[string]string{"error": err.Error()})
		} else {
			err = out.Encode(map[string][]uint32{"token_ids": ids})
		}
		if err != nil {
			return err
		}
	}
	if lines.Err() != nil {
		return lines.Err()
	}
	if refused > 0 {
		return fmt.Errorf("%d conversations were refused", refused)
	}
	return nil
}

// tokenize asks for the token ids of the conversation in a line.
func tokenize(client headracev1.ModelServiceClient, line []byte) ([]uint32, error) {
	var read conversation
	if err := json.Unmarshal(line, &read); err != nil {
		return nil, err
	}
	chat, err := read.input()
	if err != nil {
		return nil, err
	}
	answer, err := client.Tokenize(context.Background(), &headracev1.TokenizeRequest{
		Input: &headracev1.TokenizeRequest_Chat{Chat: chat},
	})
	if err != nil {
		return nil, fmt.Errorf("%s", status.Convert(err).Message())
	}
	return answer.GetTokenIds(), nil
}

func (c *conversation) input() (*headracev1.ChatInput, error) {
	chat := &headracev1.ChatInput{
		TemplateArgumentsJson: string(c.TemplateArguments),
		AddGenerationPrompt:   c.AddGenerationPrompt,
		ContinueFinalMessage:  c.ContinueFinalMessage,
	}
	for _, tool := range c.Tools {
		chat.Tools = append(chat.Tools, &headracev1.Tool{DefinitionJson: string(tool)})
	}
	for _, one := range c.Messages {
		made, err := one.proto()
		if err != nil {
			return nil, err
		}
		chat.Messages = append(chat.Messages, made)
	}
	return chat, nil
}

func (m *message) proto() (*headracev1.ChatMessage, error) {
	role, ok := roles[m.Role]
	if !ok {
		return nil, fmt.Errorf("there is no role %q", m.Role)
	}
	made := &headracev1.ChatMessage{
		Role:             role,
		Name:             m.Name,
		ToolCallId:       m.ToolCallID,
		ReasoningContent: m.ReasoningContent,
	}
	for _, call := range m.ToolCalls {
		arguments, err := objectText(call.Function.Arguments)
		if err != nil {
			return nil, err
		}
		made.ToolCalls = append(made.ToolCalls, &headracev1.ToolCall{
			Id: call.ID, Name: call.Function.Name, ArgumentsJson: arguments,
		})
	}
	if err := m.setContent(made); err != nil {
		return nil, err
	}
	return made, nil
}

// setContent sets what is said: nothing, text, or parts of text.
func (m *message) setContent(made *headracev1.ChatMessage) error {
	if len(m.Content) == 0 || string(m.Content) == "null" {
		return nil
	}
	if m.Content[0] == '"' {
		content := new(headracev1.ChatMessage_Content)
		made.ContentKind = content
		return json.Unmarshal(m.Content, &content.Content)
	}
	var parts []struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	if err := json.Unmarshal(m.Content, &parts); err != nil {
		return err
	}
	content := &headracev1.ContentParts{}
	for _, part := range parts {
		if part.Type != "text" {
			return fmt.Errorf("a part of type %q is not supported", part.Type)
		}
		content.Parts = append(content.Parts, &headracev1.ContentPart{Part: &headracev1.ContentPart_Text{Text: part.Text}})
	}
	made.ContentKind = &headracev1.ChatMessage_ContentParts{ContentParts: content}
	return nil
}

// objectText is the JSON text of a call's arguments: an object, or the string with its text that OpenAI's API has.
func objectText(raw json.RawMessage) (string, error) {
	if len(raw) == 0 || raw[0] != '"' {
		return string(raw), nil
	}
	var text string
	err := json.Unmarshal(raw, &text)
	return text, err
}
