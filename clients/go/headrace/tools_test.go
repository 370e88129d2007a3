package headrace_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"google.golang.org/grpc"

	"headrace.dev/go/headrace"
	headracev1 "headrace.dev/go/headrace/v1"
)

func TestARunTellsTheModelWhatWentWrong(t *testing.T) {
	var turns []*headracev1.GenerateStreamRequest
	client := serve(t, &script{stream: func(request *headracev1.GenerateStreamRequest, stream grpc.ServerStreamingServer[headracev1.GenerateStreamResponse]) error {
		turns = append(turns, request)
		if len(turns) > 1 {
			return streamed(deltaEvent("done", 1), finishedEvent(headracev1.FinishReason_FINISH_REASON_STOP))(request, stream)
		}
		return streamed(
			toolDelta(
				&headracev1.ToolCallDelta{Id: "a", Name: "fails", ArgumentsJson: `{}`},
				&headracev1.ToolCallDelta{Index: 1, Id: "b", Name: "unknown", ArgumentsJson: `{}`},
				&headracev1.ToolCallDelta{Index: 2, Id: "c", Name: "fails", ArgumentsJson: `[1]`},
			),
			finishedEvent(headracev1.FinishReason_FINISH_REASON_STOP), // as arguments are no JSON object
		)(request, stream)
	}})
	var text string
	run, err := client.RunTools(soon(t), &headrace.Request{
		ID:         "first",
		Messages:   []headrace.Message{{Role: headrace.RoleUser, Content: "go"}},
		Tools:      []headrace.Tool{{Name: "fails"}},
		ToolChoice: &headrace.ToolChoice{Mode: headrace.ToolRequired, Names: []string{"fails"}},
	}, map[string]headrace.ToolFunc{
		"fails": func(context.Context, headrace.ToolCall) (string, error) { return "", errors.New("no luck") },
	}, &headrace.ToolRunOptions{OnChunk: func(chunk headrace.Chunk) { text += chunk.Text }})
	if err != nil || run.End != headrace.ToolsAnswered || text != "done" {
		t.Fatalf("%+v %v %q", run, err, text)
	}
	if !slices.Contains(turns[0].GetRequiredCapabilities(), "typed_replies") {
		t.Errorf("requires %v", turns[0].GetRequiredCapabilities())
	}
	second := turns[1].GetSpec()
	if second.GetRequestId() == "first" || second.GetChat().GetToolChoice().GetMode() != headracev1.ToolChoiceMode_TOOL_CHOICE_MODE_AUTO ||
		len(second.GetChat().GetToolChoice().GetToolNames()) != 0 {
		t.Errorf("the second turn is %v", second)
	}
	messages := second.GetChat().GetMessages()
	want := []string{
		"error: no luck", `error: there is no tool "unknown"; there are fails`, "error: the arguments are no JSON object; they were [1]",
	}
	for i, text := range want {
		if got := messages[2+i]; got.GetContent() != text || got.GetToolCallId() != string("abc"[i]) {
			t.Errorf("told %v, want %q", got, text)
		}
	}
	if got := messages[1].GetToolCalls()[2].GetArgumentsJson(); got != "{}" {
		t.Errorf("the conversation has the arguments %s", got)
	}
}

func TestARunStopsWhereItsCallsMayNotBeWhole(t *testing.T) {
	call := &headracev1.ToolCallDelta{Id: "a", Name: "f", ArgumentsJson: `{`}
	atAStopString := finishedEvent(headracev1.FinishReason_FINISH_REASON_STOP)
	atAStopString.GetFinished().Matched = &headracev1.Finished_StopString{StopString: "}"}
	for name, want := range map[string]struct {
		end  headrace.ToolRunEnd
		last *headracev1.ResultEvent
	}{
		"length":      {headrace.ToolsCut, finishedEvent(headracev1.FinishReason_FINISH_REASON_LENGTH)},
		"stop string": {headrace.ToolsCut, atAStopString},
		"last reply":  {headrace.ToolsMaxReplies, finishedEvent(headracev1.FinishReason_FINISH_REASON_TOOL_CALLS)},
	} {
		t.Run(name, func(t *testing.T) {
			client := serve(t, &script{stream: streamed(toolDelta(call), want.last)})
			run, err := client.RunTools(soon(t), &headrace.Request{
				Messages: []headrace.Message{{Role: headrace.RoleUser, Content: "go"}},
				Tools:    []headrace.Tool{{Name: "f"}},
			}, map[string]headrace.ToolFunc{"f": func(context.Context, headrace.ToolCall) (string, error) {
				t.Error("it was run")
				return "", nil
			}}, &headrace.ToolRunOptions{MaxReplies: 1})
			if err != nil || run.End != want.end || len(run.Messages) != 1 {
				t.Errorf("%+v %v", run, err)
			}
		})
	}
}
