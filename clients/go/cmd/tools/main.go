// Command tools asks a question that the model may answer with a tool, which is a function of this program.
//
//	tools --target localhost:50051 'How high is the Danube in Ulm?'
//	tools --tool-choice required 'How high is the Danube in Ulm?'
//
// The replies' text is printed as it comes, the calls on the standard error. The exit code is 1 if a request was refused
// or failed, or a reply was cut within a call.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"

	"headrace.dev/go/headrace"
)

// The tool as the chat template shows it to the model.
const definition = `{"type": "function", "function": {"name": "read_gauge", "description": "How high a river is.",
"parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}}`

// readGauge is the tool itself.
func readGauge(_ context.Context, call headrace.ToolCall) (string, error) {
	var given struct{ Place string }
	if err := call.Decode(&given); err != nil {
		return "", err // the model is told, and may try again
	}
	answer := fmt.Sprintf("%d m", len(given.Place))
	fmt.Fprintf(os.Stderr, "%s %s: %s\n", call.Name, call.Arguments, answer)
	return answer, nil
}

func main() {
	target := flag.String("target", "", "the server's `address` (default: HEADRACE_TARGET, else "+headrace.DefaultTarget+")")
	choice := flag.String("tool-choice", "", "auto, none, or required; held by the server (default: nothing holds the model)")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *target, *choice, strings.Join(flag.Args(), " ")); err != nil {
		fmt.Fprintln(os.Stderr, "tools:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, target, choice, question string) error {
	client, err := headrace.NewClient(target)
	if err != nil {
		return err
	}
	defer client.Close()

	request := &headrace.Request{
		Messages:    []headrace.Message{{Role: headrace.RoleUser, Content: question}},
		Tools:       []headrace.Tool{{Definition: definition}},
		MaxTokens:   headrace.Ptr(1024),
		Temperature: headrace.Ptr(0.0), // the likeliest tokens: a call is right or wrong
	}
	if choice != "" {
		request.ToolChoice = &headrace.ToolChoice{Mode: headrace.ToolMode(choice)}
	}
	// A reply's text is a line.
	wrote := false
	done, err := client.RunTools(ctx, request, map[string]headrace.ToolFunc{
		"read_gauge": func(ctx context.Context, call headrace.ToolCall) (string, error) {
			if wrote {
				fmt.Println()
			}
			wrote = false
			return readGauge(ctx, call)
		},
	}, &headrace.ToolRunOptions{OnChunk: func(chunk headrace.Chunk) {
		fmt.Print(chunk.Text)
		wrote = wrote || chunk.Text != ""
	}})
	if wrote {
		fmt.Println()
	}
	switch {
	case err != nil:
		return err
	case done.End == headrace.ToolsCut:
		return fmt.Errorf("the reply ended with %s: its calls may not be whole", done.Result.FinishReason())
	case done.End == headrace.ToolsMaxReplies:
		return errors.New("the model calls tools again and again")
	}
	return nil
}
