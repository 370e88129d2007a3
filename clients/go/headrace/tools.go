package headrace

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// A ToolFunc runs a call of a tool, and returns what the model is told. An error is told to the model too, which may try
// again.
type ToolFunc func(ctx context.Context, call ToolCall) (string, error)

// ToolRunOptions set up a run of tools.
type ToolRunOptions struct {
	// MaxReplies is how many replies the model may make; calls in the last one are not run. 0: 8.
	MaxReplies int
	// OnChunk is called with each piece of output as it comes, if it is set.
	OnChunk func(Chunk)
}

// A ToolRunEnd says why a run of tools ended.
type ToolRunEnd string

// The ends of a run.
const (
	// ToolsAnswered: the last reply calls no tool.
	ToolsAnswered ToolRunEnd = "answered"
	// ToolsCut: the last reply was cut. Its calls were not run: they may not be whole.
	ToolsCut ToolRunEnd = "cut"
	// ToolsMaxReplies: the last reply allowed has calls, which were not run.
	ToolsMaxReplies ToolRunEnd = "max_replies"
)

// A ToolRun is a conversation in which the model called tools.
type ToolRun struct {
	// End says why it ended.
	End ToolRunEnd
	// Result is the model's last reply.
	Result *Result
	// Messages is the whole conversation, to be continued. A last reply whose calls were not run is not in it.
	Messages []Message
}

const defaultReplies = 8

// RunTools holds a conversation in which the model calls tools: it streams a reply, runs its calls one after the other,
// adds the reply and the answers to the conversation, and asks again, until a reply calls none. The functions are by
// their tools' names; the request has the conversation and the tools. A call that is required is so once.
//
// If it fails in between, the run until then is returned with the error.
func (c *Client) RunTools(
	ctx context.Context, request *Request, functions map[string]ToolFunc, options *ToolRunOptions,
) (*ToolRun, error) {
	var o ToolRunOptions
	if options != nil {
		o = *options
	}
	if o.MaxReplies <= 0 {
		o.MaxReplies = defaultReplies
	}
	if request == nil || len(request.Messages) == 0 || len(request.Tools) == 0 {
		return nil, invalid("messages", "and tools are needed for a run of tools")
	}
	turn := *request
	turn.Messages = slices.Clone(request.Messages)
	run := &ToolRun{Messages: turn.Messages}
	for reply := 1; ; reply++ {
		stream := c.stream(ctx, &turn, "typed_replies") // without it calls would come as text
		result, err := read(stream, o.OnChunk)
		if err != nil {
			return run, err
		}
		run.Result = result
		switch {
		case len(result.ToolCalls()) == 0 && result.FinishReason() == FinishStop:
			run.End = ToolsAnswered
			run.Messages = append(run.Messages, result.Message())
			return run, nil
		case !endedByItself(result):
			run.End = ToolsCut
			return run, nil
		case reply >= o.MaxReplies:
			run.End = ToolsMaxReplies
			return run, nil
		}
		answers, err := answer(ctx, result.ToolCalls(), functions)
		if err != nil {
			return run, err
		}
		run.Messages = append(append(run.Messages, asTaken(result.Message())), answers...)
		turn.Messages = run.Messages
		turn.ID = "" // the next reply is a request of its own
		if choice := turn.ToolChoice; choice != nil && choice.Mode == ToolRequired {
			turn.ToolChoice = &ToolChoice{Mode: ToolAuto, Names: choice.Names, Parallel: choice.Parallel}
			if len(choice.Names) == 1 { // it was to be called; it is not the only one
				turn.ToolChoice.Names = nil
			}
		}
	}
}

// endedByItself tells whether nothing cut the reply. One with STOP has a call whose arguments are no JSON: the model is told.
func endedByItself(result *Result) bool {
	switch result.FinishReason() {
	case FinishToolCalls:
		return true
	case FinishStop:
		return result.first().StopString == ""
	default:
		return false
	}
}

func read(stream *Stream, onChunk func(Chunk)) (*Result, error) {
	if onChunk != nil {
		for chunk, err := range stream.Chunks() {
			if err != nil {
				return nil, err
			}
			onChunk(chunk)
		}
	}
	return stream.Result()
}

// answer runs a reply's calls. An error is the context's: nobody waits for the rest.
func answer(ctx context.Context, calls []ToolCall, functions map[string]ToolFunc) ([]Message, error) {
	var answers []Message
	for _, call := range calls {
		told, err := "", error(nil)
		if run := functions[call.Name]; run == nil {
			known := strings.Join(slices.Sorted(maps.Keys(functions)), ", ")
			err = fmt.Errorf("there is no tool %q; there are %s", call.Name, known)
		} else if !isObject(call.Arguments) {
			err = fmt.Errorf("the arguments are no JSON object; they were %.1000s", call.Arguments)
		} else {
			told, err = run(ctx, call)
		}
		if ctx.Err() != nil {
			return nil, contextError(ctx, "")
		}
		if err != nil {
			told = "error: " + err.Error()
		}
		answers = append(answers, Message{Role: RoleTool, Content: told, Name: call.Name, ToolCallID: call.ID})
	}
	return answers, nil
}

func isObject(arguments string) bool {
	var members map[string]json.RawMessage
	return arguments == "" || json.Unmarshal([]byte(arguments), &members) == nil && members != nil
}

// asTaken is a reply as templates take it back: arguments that are no object are left out, the answer quotes them.
func asTaken(reply Message) Message {
	reply.ToolCalls = slices.Clone(reply.ToolCalls)
	for i, call := range reply.ToolCalls {
		if !isObject(call.Arguments) {
			reply.ToolCalls[i].Arguments = "{}"
		}
	}
	return reply
}
