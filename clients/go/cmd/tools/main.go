// Command tools asks a question that the model may answer with a tool, which is a function of this program.
//
//	tools --target localhost:50051 'How high is the Danube in Ulm?'
//	tools --tool-choice required 'How high is the Danube in Ulm?'
//
// The question is sent with the tool's definition. The reply is streamed: its text is printed as it comes, and the
// fragments of its tool calls are joined. The calls are run, the reply and what they returned are added to the
// conversation, and it is sent again, until a reply calls no tool. The answer's text goes to the standard output, the
// calls to the standard error. The exit code is 1 if a request was refused or failed, or a reply was cut within a call.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	headracev1 "headrace.dev/go/headrace/v1"
)

// How often the model may call tools before the program gives up.
const maxReplies = 5

// The tool as the chat template shows it to the model.
const definition = `{"type": "function", "function": {"name": "read_gauge", "description": "How high a river is.",
"parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}}`

// readGauge is the tool itself: from the JSON text of a call's arguments to what the model is told.
func readGauge(arguments string) string {
	var given struct {
		Place string `json:"place"`
	}
	if err := json.Unmarshal([]byte(arguments), &given); err != nil {
		return "error: " + err.Error() // the model may try again
	}
	return fmt.Sprintf("%s: %d m", given.Place, len(given.Place))
}

func main() {
	target := flag.String("target", "localhost:50051", "the server's `address`: host:port or unix:/path")
	choice := flag.String("tool-choice", "", "auto, none, or required; held by the server (default: nothing holds the model)")
	flag.Parse()
	if err := run(*target, *choice, strings.Join(flag.Args(), " ")); err != nil {
		fmt.Fprintln(os.Stderr, "tools:", err)
		os.Exit(1)
	}
}

func run(target, choice, question string) error {
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	client := headracev1.NewGenerationServiceClient(conn)

	chat := &headracev1.ChatInput{
		Messages: []*headracev1.ChatMessage{{
			Role:        headracev1.ChatRole_CHAT_ROLE_USER,
			ContentKind: &headracev1.ChatMessage_Content{Content: question},
		}},
		Tools: []*headracev1.Tool{{DefinitionJson: definition}},
	}
	// A server that cannot do this refuses the request by the capability's name, instead of doing something else.
	capabilities := []string{"chat", "tools", "typed_replies"}
	if choice != "" {
		mode, ok := headracev1.ToolChoiceMode_value["TOOL_CHOICE_MODE_"+strings.ToUpper(choice)]
		if !ok {
			return fmt.Errorf("there is no tool choice %q", choice)
		}
		chat.ToolChoice = &headracev1.ToolChoice{Mode: headracev1.ToolChoiceMode(mode)}
		capabilities = append(capabilities, "tool_choice")
	}
	for range maxReplies {
		reply, reason, err := generate(client, chat, capabilities)
		if err != nil {
			return err
		}
		if len(reply.GetToolCalls()) == 0 {
			return nil
		}
		if reason != headracev1.FinishReason_FINISH_REASON_TOOL_CALLS {
			return fmt.Errorf("the reply ended with %s: its calls may not be whole", reason)
		}
		chat.Messages = append(chat.Messages, reply)
		for _, call := range reply.GetToolCalls() {
			answer := readGauge(call.GetArgumentsJson())
			fmt.Fprintf(os.Stderr, "%s %s: %s\n", call.GetName(), call.GetArgumentsJson(), answer)
			chat.Messages = append(chat.Messages, &headracev1.ChatMessage{
				Role:        headracev1.ChatRole_CHAT_ROLE_TOOL,
				ToolCallId:  call.GetId(),
				ContentKind: &headracev1.ChatMessage_Content{Content: answer},
			})
		}
		if chat.GetToolChoice().GetMode() == headracev1.ToolChoiceMode_TOOL_CHOICE_MODE_REQUIRED {
			chat.ToolChoice.Mode = headracev1.ToolChoiceMode_TOOL_CHOICE_MODE_AUTO // it was called; now it may answer
		}
	}
	return fmt.Errorf("the model calls tools again after %d replies", maxReplies)
}

// generate streams one reply: it prints the text, and returns the whole as a message for the conversation's next turn.
func generate(
	client headracev1.GenerationServiceClient, chat *headracev1.ChatInput, capabilities []string,
) (*headracev1.ChatMessage, headracev1.FinishReason, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel() // where the stream has not ended, this cancels the request
	stream, err := client.GenerateStream(ctx, &headracev1.GenerateStreamRequest{
		Spec: &headracev1.GenerationSpec{
			Input: &headracev1.GenerationSpec_Chat{Chat: chat},
			Stop:  &headracev1.StopOptions{MaxTokens: proto.Uint32(1024)},
		},
		RequiredCapabilities: capabilities,
	})
	if err != nil {
		return nil, 0, err
	}
	reply := &headracev1.ChatMessage{Role: headracev1.ChatRole_CHAT_ROLE_ASSISTANT}
	var text strings.Builder
	var reason headracev1.FinishReason
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, 0, err
		}
		for _, event := range message.GetEvents() {
			delta := event.GetDelta()
			fmt.Print(delta.GetText())
			text.WriteString(delta.GetText())
			reply.ReasoningContent += delta.GetReasoning()
			for _, part := range delta.GetToolCalls() {
				if int(part.GetIndex()) == len(reply.ToolCalls) { // its first part, with the id and the name
					reply.ToolCalls = append(reply.ToolCalls, &headracev1.ToolCall{Id: part.GetId(), Name: part.GetName()})
				}
				reply.ToolCalls[part.GetIndex()].ArgumentsJson += part.GetArgumentsJson()
			}
			if finished := event.GetFinished(); finished != nil {
				reason = finished.GetReason()
			}
		}
	}
	if text.Len() > 0 {
		fmt.Println()
		reply.ContentKind = &headracev1.ChatMessage_Content{Content: text.String()}
	}
	return reply, reason, nil
}
