package headrace_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"headrace.dev/go/headrace"
	headracev1 "headrace.dev/go/headrace/v1"
)

func generated(request *headracev1.GenerateRequest, texts ...string) *headracev1.GenerateResponse {
	answer := &headracev1.GenerateResponse{
		RequestId: request.GetSpec().GetRequestId(), InstanceId: instance, Usage: &headracev1.Usage{CompletionTokens: 2},
	}
	for i, text := range texts {
		answer.Choices = append(answer.Choices, &headracev1.GeneratedChoice{
			Index: uint32(i), Text: text, TokenIds: []uint32{1, 4294967295},
			Finished: &headracev1.Finished{Reason: headracev1.FinishReason_FINISH_REASON_STOP, Matched: &headracev1.Finished_StopTokenId{StopTokenId: 0}},
		})
	}
	return answer
}

func TestGenerateSendsWhatTheRequestSays(t *testing.T) {
	var got *headracev1.GenerateRequest
	client := serve(t, &script{generate: func(_ context.Context, request *headracev1.GenerateRequest) (*headracev1.GenerateResponse, error) {
		got = request
		return generated(request, "a", "b"), nil
	}})
	result, err := client.Generate(soon(t), &headrace.Request{
		Messages:    []headrace.Message{{Role: headrace.RoleUser, Content: "hi"}},
		Tools:       []headrace.Tool{{Name: "look", Parameters: `{"b": 1, "a": 2}`}},
		ToolChoice:  &headrace.ToolChoice{Mode: headrace.ToolRequired},
		Temperature: headrace.Ptr(0.0),
		MaxTokens:   headrace.Ptr(0),
		Seed:        headrace.Ptr(uint64(9223372036854775807)),
		N:           2,
		Priority:    -3,
		TimeLimit:   1500 * time.Millisecond,

		PredictionTokenIDs: []uint32{3, 4},
	})
	if err != nil {
		t.Fatal(err)
	}
	spec := got.GetSpec()
	if spec.GetSampling().Temperature == nil || spec.GetStop().MaxTokens == nil || spec.GetSampling().GetSeed() != 9223372036854775807 ||
		spec.GetN() != 2 || spec.GetScheduling().GetPriority() != -3 || spec.GetScheduling().GetTimeLimit().AsDuration() != 1500*time.Millisecond ||
		spec.GetChat().GetTools()[0].GetParametersJson() != `{"b": 1, "a": 2}` || spec.GetOutput() != nil ||
		!slices.Equal(spec.GetPrediction().GetTokens().GetIds(), []uint32{3, 4}) {
		t.Errorf("sent %v", spec)
	}
	if want := []string{"chat", "prediction", "priorities", "tool_choice", "tools"}; !slices.Equal(got.GetRequiredCapabilities(), want) {
		t.Errorf("requires %v, want %v", got.GetRequiredCapabilities(), want)
	}
	if result.RequestID != spec.GetRequestId() || len(result.RequestID) < 20 || len(result.Choices) != 2 || result.Choices[1].Text != "b" ||
		*result.Choices[0].StopTokenID != 0 || result.TokenIDs()[1] != 4294967295 {
		t.Errorf("%+v", result)
	}
}

func TestACallIsTriedAgainWhereItMayBe(t *testing.T) {
	refusal := func(code codes.Code) error {
		made, _ := status.New(code, "no").WithDetails(&errdetails.ErrorInfo{Reason: "R"})
		return made.Err()
	}
	roomy := status.ErrorProto(full(time.Millisecond))
	for name, one := range map[string]struct {
		err   error
		tries int32
	}{
		"unavailable":             {refusal(codes.Unavailable), 4},
		"full, with advice":       {roomy, 4},
		"full, without advice":    {refusal(codes.ResourceExhausted), 1},
		"wrong":                   {refusal(codes.InvalidArgument), 1},
		"a defect":                {refusal(codes.Internal), 1},
		"gone":                    {refusal(codes.NotFound), 1},
		"too late, by its server": {refusal(codes.DeadlineExceeded), 1},
	} {
		t.Run(name, func(t *testing.T) {
			var tries atomic.Int32
			ids := make(map[string]bool)
			client := serve(t, &script{generate: func(_ context.Context, request *headracev1.GenerateRequest) (*headracev1.GenerateResponse, error) {
				tries.Add(1)
				ids[request.GetSpec().GetRequestId()] = true
				return nil, one.err
			}})
			_, err := client.Generate(soon(t), &headrace.Request{Text: "x"})
			if asError(t, err).Code != status.Code(one.err) || tries.Load() != one.tries || len(ids) != 1 {
				t.Errorf("%d tries of %d ids ended with %v", tries.Load(), len(ids), err)
			}
		})
	}
}

func TestAPushbackIsHeeded(t *testing.T) {
	for pushback, want := range map[string]int32{"-1": 1, "5": 4} {
		t.Run(pushback, func(t *testing.T) {
			var tries atomic.Int32
			client := serve(t, &script{generate: func(ctx context.Context, _ *headracev1.GenerateRequest) (*headracev1.GenerateResponse, error) {
				tries.Add(1)
				_ = grpc.SetTrailer(ctx, metadata.Pairs("grpc-retry-pushback-ms", pushback))
				return nil, status.Error(codes.Unavailable, "no")
			}})
			_, err := client.Generate(soon(t), &headrace.Request{Text: "x"})
			if asError(t, err).Code != codes.Unavailable || tries.Load() != want {
				t.Errorf("%d tries ended with %v", tries.Load(), err)
			}
		})
	}
}

func TestTheContextEndsACall(t *testing.T) {
	client := serve(t, &script{generate: func(ctx context.Context, _ *headracev1.GenerateRequest) (*headracev1.GenerateResponse, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}})
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	_, err := client.Generate(ctx, &headrace.Request{Text: "x"})
	if !errors.Is(err, context.DeadlineExceeded) || asError(t, err).Code != codes.DeadlineExceeded {
		t.Errorf("got %v", err)
	}
}

func TestCallsCarryTokenMetadataAndTraceContext(t *testing.T) {
	var got metadata.MD
	client := serve(t, &script{generate: func(ctx context.Context, request *headracev1.GenerateRequest) (*headracev1.GenerateResponse, error) {
		got, _ = metadata.FromIncomingContext(ctx)
		return generated(request, ""), nil
	}}, headrace.WithToken("secret"), headrace.WithMetadata("x-tenant", "t"))
	span := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled})
	ctx := trace.ContextWithSpanContext(soon(t), span)
	if _, err := client.Generate(ctx, &headrace.Request{Text: "x"}); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"authorization": "Bearer secret",
		"x-tenant":      "t",
		"traceparent":   "00-01000000000000000000000000000000-0200000000000000-01",
	}
	for key, value := range want {
		if !slices.Equal(got.Get(key), []string{value}) {
			t.Errorf("%s: got %v, want %q", key, got.Get(key), value)
		}
	}
	if !strings.HasPrefix(got.Get("user-agent")[0], "headrace-go/"+headrace.Version) {
		t.Errorf("user agent %v", got.Get("user-agent"))
	}
}

func streamed(events ...*headracev1.ResultEvent) func(*headracev1.GenerateStreamRequest, grpc.ServerStreamingServer[headracev1.GenerateStreamResponse]) error {
	return func(request *headracev1.GenerateStreamRequest, stream grpc.ServerStreamingServer[headracev1.GenerateStreamResponse]) error {
		accepted := &headracev1.ResultEvent{Event: &headracev1.ResultEvent_Accepted{Accepted: &headracev1.Accepted{
			RequestId: request.GetSpec().GetRequestId(), N: 1,
		}}}
		for i, event := range append([]*headracev1.ResultEvent{accepted}, events...) {
			event.Seq = uint64(i + 1)
			if err := stream.Send(&headracev1.GenerateStreamResponse{Events: []*headracev1.ResultEvent{event}, InstanceId: instance}); err != nil {
				return err
			}
		}
		return nil
	}
}

func toolDelta(parts ...*headracev1.ToolCallDelta) *headracev1.ResultEvent {
	return &headracev1.ResultEvent{Event: &headracev1.ResultEvent_Delta{Delta: &headracev1.Delta{Reasoning: "hm", ToolCalls: parts, TokenIds: []uint32{1}}}}
}

func TestAStreamGivesItsChunksAndItsResult(t *testing.T) {
	client := serve(t, &script{stream: streamed(
		deltaEvent("né ", 1),
		toolDelta(&headracev1.ToolCallDelta{Id: "c1", Name: "look", ArgumentsJson: `{"at`}),
		toolDelta(&headracev1.ToolCallDelta{ArgumentsJson: `": 1}`}, &headracev1.ToolCallDelta{Index: 1, Id: "c2", Name: "go"}),
		&headracev1.ResultEvent{}, // newer than this package
		finishedEvent(headracev1.FinishReason_FINISH_REASON_TOOL_CALLS),
	)})
	stream := client.Stream(soon(t), &headrace.Request{Text: "x"})
	var found strings.Builder
	for chunk, err := range stream.Chunks() {
		if err != nil {
			t.Fatal(err)
		}
		found.WriteString(chunk.Text + chunk.Reasoning)
	}
	result, err := stream.Result()
	if err != nil || found.String() != "né hmhm" || result.FinishReason() != headrace.FinishToolCalls {
		t.Fatalf("%q %+v %v", found.String(), result, err)
	}
	calls := result.ToolCalls()
	if len(calls) != 2 || calls[0] != (headrace.ToolCall{ID: "c1", Name: "look", Arguments: `{"at": 1}`}) || calls[1].Name != "go" {
		t.Errorf("%+v", calls)
	}
	var arguments struct{ At int }
	if err := calls[0].Decode(&arguments); err != nil || arguments.At != 1 || calls[1].Decode(&arguments) != nil {
		t.Errorf("%+v %v", arguments, err)
	}
}

func TestALoopThatIsLeftEndsTheRequest(t *testing.T) {
	ended := make(chan struct{})
	client := serve(t, &script{stream: func(request *headracev1.GenerateStreamRequest, stream grpc.ServerStreamingServer[headracev1.GenerateStreamResponse]) error {
		if err := streamed(deltaEvent("a", 1))(request, stream); err != nil {
			return err
		}
		<-stream.Context().Done()
		close(ended)
		return stream.Context().Err()
	}})
	stream := client.Stream(soon(t), &headrace.Request{Text: "x"})
	for range stream.Chunks() {
		break
	}
	<-ended
	result, err := stream.Result()
	if err != nil || result.Text() != "a" || result.FinishReason() != headrace.FinishUnknown {
		t.Errorf("%+v %v", result, err)
	}
}

func TestAStreamThatIsNotStartedIsNotSent(t *testing.T) {
	client := serve(t, &script{stream: func(*headracev1.GenerateStreamRequest, grpc.ServerStreamingServer[headracev1.GenerateStreamResponse]) error {
		t.Error("it was sent")
		return nil
	}})
	_ = client.Stream(soon(t), &headrace.Request{Text: "x"})
}

func TestALostStreamTellsItsOutput(t *testing.T) {
	client := serve(t, &script{stream: func(request *headracev1.GenerateStreamRequest, stream grpc.ServerStreamingServer[headracev1.GenerateStreamResponse]) error {
		_ = streamed(deltaEvent("a", 1))(request, stream)
		return status.Error(codes.Unavailable, "going away")
	}})
	_, err := client.Stream(soon(t), &headrace.Request{Text: "x"}).Result()
	if told := asError(t, err); told.Code != codes.Unavailable || told.Partial.Text() != "a" {
		t.Errorf("%+v", told)
	}
}

func TestWhatCannotBeSentIsRefusedHere(t *testing.T) {
	client := serve(t, &script{})
	for field, request := range map[string]*headrace.Request{
		"request":    nil,
		"input":      {Text: "x", TokenIDs: []uint32{1}},
		"max_tokens": {Text: "x", MaxTokens: headrace.Ptr(-1)},
		"prediction": {Text: "x", Prediction: "y", PredictionTokenIDs: []uint32{1}},
		"messages":   {Text: "x", Tools: []headrace.Tool{{Name: "look"}}},
		"tools":      {Messages: []headrace.Message{{Role: headrace.RoleUser}}, Tools: []headrace.Tool{{Name: "a", Definition: "{}"}}},
	} {
		_, err := client.Generate(soon(t), request)
		if told := asError(t, err); told.Code != codes.InvalidArgument || len(told.Fields) != 1 || told.Fields[0].Field != field {
			t.Errorf("%s: %+v", field, told)
		}
		if _, err := client.Stream(soon(t), request).Result(); asError(t, err).Code != codes.InvalidArgument {
			t.Errorf("%s: %v", field, err)
		}
	}
}

func TestABatchKeepsItsBound(t *testing.T) {
	for _, ordered := range []bool{false, true} {
		t.Run(fmt.Sprintf("ordered %t", ordered), func(t *testing.T) {
			var atOnce, most atomic.Int32
			client := serve(t, &script{session: func(c *conversation) error {
				var waiting []uint32
				for {
					command, err := c.command()
					if errors.Is(err, errHalfClosed) {
						return nil
					}
					if err != nil {
						return err
					}
					if command.GetAdd() == nil {
						continue
					}
					if command.GetAdd().GetSpec().GetText().GetText() == "bad" {
						refusal := status.New(codes.InvalidArgument, "bad")
						c.refuse(command, refusal.Proto())
						continue
					}
					waiting = append(waiting, c.accept(command))
					most.Store(max(most.Load(), atOnce.Add(1)))
					if len(waiting) == 3 { // the newest ends first
						for _, number := range slices.Backward(waiting) {
							atOnce.Add(-1)
							c.finish(number, headracev1.FinishReason_FINISH_REASON_STOP)
						}
						waiting = nil
					}
				}
			}})
			requests := slices.Values(append(slices.Repeat([]*headrace.Request{{Text: "x"}}, 30), &headrace.Request{Text: "bad"}))
			var indexes []int
			failed := 0
			for outcome := range client.Batch(soon(t), requests, &headrace.BatchOptions{MaxInFlight: 3, Ordered: ordered}) {
				indexes = append(indexes, outcome.Index)
				if outcome.Err != nil {
					failed++
				}
			}
			if ordered != slices.IsSorted(indexes) || len(indexes) != 31 || most.Load() != 3 || failed != 1 {
				t.Errorf("ordered %t: %d at most, %d failed, %v", ordered, most.Load(), failed, indexes)
			}
			slices.Sort(indexes)
			if len(slices.Compact(indexes)) != 31 {
				t.Errorf("outcomes came twice: %v", indexes)
			}
		})
	}
}

func TestABatchThatIsLeftCancelsWhatRuns(t *testing.T) {
	var cancelled atomic.Int32
	client := serve(t, &script{session: func(c *conversation) error {
		numbers := make(map[string]uint32)
		for {
			command, err := c.command()
			if errors.Is(err, errHalfClosed) {
				return nil
			}
			if err != nil {
				return err
			}
			if add := command.GetAdd(); add != nil {
				numbers[add.GetSpec().GetRequestId()] = c.accept(command)
				if len(numbers) == 2 { // another runs when the batch is left
					c.finish(1, headracev1.FinishReason_FINISH_REASON_STOP)
				}
			}
			if cancel := command.GetCancel(); cancel != nil {
				cancelled.Add(1)
				c.finish(numbers[cancel.GetRequestId()], headracev1.FinishReason_FINISH_REASON_CANCELLED)
			}
		}
	}})
	endless := func(yield func(*headrace.Request) bool) {
		for yield(&headrace.Request{Text: "x"}) {
		}
	}
	for outcome := range client.Batch(soon(t), endless, &headrace.BatchOptions{MaxInFlight: 4}) {
		if outcome.Err != nil {
			t.Error(outcome.Err)
		}
		break
	}
	if cancelled.Load() == 0 {
		t.Error("nothing was cancelled")
	}
}

func TestABatchTriesWhatIsRefusedAgain(t *testing.T) {
	for _, refusal := range []*status.Status{status.New(codes.Unavailable, "loading"), status.FromProto(full(time.Millisecond))} {
		t.Run(refusal.Code().String(), func(t *testing.T) {
			client := serve(t, &script{session: func(c *conversation) error {
				for range 2 {
					command, err := c.command()
					if err != nil {
						return err
					}
					c.refuse(command, refusal.Proto())
				}
				return echo(c)
			}})
			for outcome := range client.Batch(soon(t), slices.Values([]*headrace.Request{{Text: "again"}}), nil) {
				if outcome.Err != nil || outcome.Result.Text() != "again" {
					t.Errorf("%+v", outcome)
				}
			}
		})
	}
}

func TestABatchWithoutItsSessionTellsEveryRequest(t *testing.T) {
	client := serve(t, &script{session: func(c *conversation) error {
		if _, err := c.command(); err != nil {
			return err
		}
		return status.Error(codes.Unavailable, "going away")
	}})
	failed := 0
	requests := slices.Values(slices.Repeat([]*headrace.Request{{Text: "x"}}, 5))
	for outcome := range client.Batch(soon(t), requests, &headrace.BatchOptions{MaxInFlight: 1}) {
		if asError(t, outcome.Err).Code == codes.Unavailable {
			failed++
		}
	}
	if failed != 5 {
		t.Errorf("%d requests were told as failed", failed)
	}
}

func TestTheContextEndsABatch(t *testing.T) {
	client := serve(t, &script{session: echo})
	ctx, cancel := context.WithCancel(soon(t))
	defer cancel()
	asked, told := 0, 0
	endless := func(yield func(*headrace.Request) bool) {
		for yield(&headrace.Request{Text: "xyz"}) {
			asked++
		}
	}
	for outcome := range client.Batch(ctx, endless, &headrace.BatchOptions{MaxInFlight: 2}) {
		told++
		if outcome.Err != nil && asError(t, outcome.Err).Code != codes.Canceled {
			t.Errorf("got %v", outcome.Err)
		}
		if told == 10 {
			cancel()
		}
		if told > 1000 {
			t.Fatal("it goes on")
		}
	}
	if told < 10 {
		t.Errorf("%d outcomes of %d requests", told, asked)
	}
}
