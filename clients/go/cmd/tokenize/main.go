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

	"headrace.dev/go/headrace"
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

func main() {
	target := flag.String("target", "", "the server's `address` (default: HEADRACE_TARGET, else "+headrace.DefaultTarget+")")
	flag.Parse()
	if err := run(*target); err != nil {
		fmt.Fprintln(os.Stderr, "tokenize:", err)
		os.Exit(1)
	}
}

func run(target string) error {
	client, err := headrace.NewClient(target)
	if err != nil {
		return err
	}
	defer client.Close()
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
func tokenize(client *headrace.Client, line []byte) ([]uint32, error) {
	var read conversation
	if err := json.Unmarshal(line, &read); err != nil {
		return nil, err
	}
	request, err := read.request()
	if err != nil {
		return nil, err
	}
	return client.Tokenize(context.Background(), request)
}

func (c *conversation) request() (*headrace.Request, error) {
	made := &headrace.Request{
		TemplateArguments:    string(c.TemplateArguments),
		AddGenerationPrompt:  c.AddGenerationPrompt,
		ContinueFinalMessage: c.ContinueFinalMessage,
	}
	for _, tool := range c.Tools {
		made.Tools = append(made.Tools, headrace.Tool{Definition: string(tool)})
	}
	for _, one := range c.Messages {
		message, err := one.message()
		if err != nil {
			return nil, err
		}
		made.Messages = append(made.Messages, message)
	}
	return made, nil
}

func (m *message) message() (headrace.Message, error) {
	made := headrace.Message{
		Role: headrace.Role(m.Role), Name: m.Name, ToolCallID: m.ToolCallID, Reasoning: m.ReasoningContent,
	}
	for _, call := range m.ToolCalls {
		arguments, err := objectText(call.Function.Arguments)
		if err != nil {
			return made, err
		}
		made.ToolCalls = append(made.ToolCalls, headrace.ToolCall{ID: call.ID, Name: call.Function.Name, Arguments: arguments})
	}
	err := m.setContent(&made)
	return made, err
}

// setContent sets what is said: nothing, text, or parts of text.
func (m *message) setContent(made *headrace.Message) error {
	if len(m.Content) == 0 || string(m.Content) == "null" {
		made.NoContent = true
		return nil
	}
	if m.Content[0] == '"' {
		return json.Unmarshal(m.Content, &made.Content)
	}
	var parts []struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	if err := json.Unmarshal(m.Content, &parts); err != nil {
		return err
	}
	for _, part := range parts {
		if part.Type != "text" {
			return fmt.Errorf("a part of type %q is not supported", part.Type)
		}
		made.Parts = append(made.Parts, part.Text)
	}
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
