package headrace_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"headrace.dev/go/headrace"
	headracev1 "headrace.dev/go/headrace/v1"
)

// A parrot stands for a server in the examples: its model says what it is told, a word at a time.
type parrot struct{ script }

func newParrot() *parrot {
	p := &parrot{}
	p.session = echo
	p.generate = func(_ context.Context, request *headracev1.GenerateRequest) (*headracev1.GenerateResponse, error) {
		if request.GetSpec().GetText().GetText() == "" {
			return nil, status.Error(codes.InvalidArgument, "spec.text.text: must come to at least one token")
		}
		return generated(request, request.GetSpec().GetText().GetText()), nil
	}
	p.stream = func(request *headracev1.GenerateStreamRequest, stream grpc.ServerStreamingServer[headracev1.GenerateStreamResponse]) error {
		messages := request.GetSpec().GetChat().GetMessages()
		if len(messages) == 1 {
			return streamed(
				toolDelta(&headracev1.ToolCallDelta{Id: "c1", Name: "read_gauge", ArgumentsJson: `{"place": "Ulm"}`}),
				finishedEvent(headracev1.FinishReason_FINISH_REASON_TOOL_CALLS),
			)(request, stream)
		}
		said := request.GetSpec().GetText().GetText()
		if len(messages) > 1 {
			said = "I heard " + messages[2].GetContent()
		}
		return streamed(deltaEvent(said, 1, 2), finishedEvent(headracev1.FinishReason_FINISH_REASON_STOP))(request, stream)
	}
	return p
}

// connect makes a client of a parrot. Elsewhere it is headrace.NewClient("localhost:50051").
func connect() *headrace.Client {
	listener := bufconn.Listen(1 << 16)
	server := grpc.NewServer()
	headracev1.RegisterGenerationServiceServer(server, &newParrot().script)
	go func() { _ = server.Serve(listener) }()
	dial := func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }
	client, err := headrace.NewClient("passthrough:///127.0.0.1:1", headrace.WithDialOptions(grpc.WithContextDialer(dial)))
	if err != nil {
		log.Fatal(err)
	}
	stopParrot = server.Stop
	return client
}

var stopParrot func() // at an example's end

func ExampleClient_Generate() {
	client := connect()
	defer stopParrot()
	defer client.Close()

	result, err := client.Generate(context.Background(), &headrace.Request{
		Text:        "Once upon a time",
		MaxTokens:   headrace.Ptr(32),
		Temperature: headrace.Ptr(0.0), // greedy; nil would be the model's own
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(result.Text(), result.FinishReason())
	// Output: Once upon a time stop
}

func ExampleClient_Stream() {
	client := connect()
	defer stopParrot()
	defer client.Close()

	stream := client.Stream(context.Background(), &headrace.Request{Text: "Once upon a time"})
	for chunk, err := range stream.Chunks() {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(chunk.Text)
	}
	result, err := stream.Result()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("", result.Usage.CompletionTokens)
	// Output: Once upon a time 2
}

func ExampleClient_Session() {
	client := connect()
	defer stopParrot()
	defer client.Close()
	ctx := context.Background()

	session, err := client.Session(ctx, &headrace.SessionOptions{InitialCredit: 64})
	if err != nil {
		log.Fatal(err)
	}
	defer session.Close()
	var handles []*headrace.Handle
	for _, prompt := range []string{"one", "two", "three"} {
		handle, err := session.Submit(ctx, &headrace.Request{Text: prompt, TimeLimit: time.Minute})
		if err != nil {
			log.Fatal(err)
		}
		handles = append(handles, handle)
	}
	for _, handle := range handles {
		for chunk, err := range handle.Chunks(ctx) {
			if err != nil {
				log.Fatal(err)
			}
			fmt.Print(chunk.Text, "|")
		}
	}
	if err := session.Finish(ctx); err != nil {
		log.Fatal(err)
	}
	// Output: o|ne|t|wo|t|hree|
}

func ExampleClient_Batch() {
	client := connect()
	defer stopParrot()
	defer client.Close()

	requests := slices.Values([]*headrace.Request{{Text: "one"}, {Text: "two"}, {Text: "three"}})
	options := &headrace.BatchOptions{MaxInFlight: 2, Ordered: true}
	for outcome := range client.Batch(context.Background(), requests, options) {
		if outcome.Err != nil {
			fmt.Println(outcome.Index, outcome.Err)
			continue
		}
		fmt.Println(outcome.Index, outcome.Result.Text())
	}
	// Output:
	// 0 one
	// 1 two
	// 2 three
}

func ExampleClient_RunTools() {
	client := connect()
	defer stopParrot()
	defer client.Close()

	readGauge := func(_ context.Context, call headrace.ToolCall) (string, error) {
		var given struct{ Place string }
		if err := call.Decode(&given); err != nil {
			return "", err // the model is told
		}
		return given.Place + ": 3 m", nil
	}
	run, err := client.RunTools(context.Background(), &headrace.Request{
		Messages: []headrace.Message{{Role: headrace.RoleUser, Content: "How high is the Danube in Ulm?"}},
		Tools: []headrace.Tool{{
			Name:       "read_gauge",
			Parameters: `{"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}`,
		}},
	}, map[string]headrace.ToolFunc{"read_gauge": readGauge}, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(run.End, run.Result.Text(), len(run.Messages))
	// Output: answered I heard Ulm: 3 m 4
}

func ExampleError() {
	client := connect()
	defer stopParrot()
	defer client.Close()

	_, err := client.Generate(context.Background(), &headrace.Request{Text: ""})
	var failure *headrace.Error
	if errors.As(err, &failure) {
		fmt.Println(failure.Code, failure.Message)
	}
	// Output: InvalidArgument spec.text.text: must come to at least one token
}
