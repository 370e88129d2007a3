package headrace

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"

	headracev1 "headrace.dev/go/headrace/v1"
)

// A fold joins the events of one request. It takes each number once and in order: an event that is missing, repeated or
// out of place ends the request with ErrProtocol, so that output is never silently wrong.
type fold struct {
	id       string
	instance string
	n        int    // how many choices it has; 0: not known, Accepted tells it
	next     uint64 // the number of the event that comes next
	hasBegun bool   // whether there was output
	accepted *Accepted
	prompt   *Prompt
	choices  []*choiceFold
	finished int
	err      *Error
	done     bool // whether the request has ended
	wasTold  bool // whether its events told the end: nothing follows
}

type choiceFold struct {
	text, reasoning strings.Builder
	ids             []uint32
	tokens          []Token
	calls           []*callFold
	end             *headracev1.Finished
}

type callFold struct {
	id, name  string
	arguments strings.Builder
}

func newFold(id string, n int, from uint64) *fold {
	return &fold{id: id, n: n, next: max(from, 1)}
}

// add takes the next event. It returns its output, if it has some.
func (f *fold) add(event *headracev1.ResultEvent) (chunk Chunk, hasOutput bool) {
	if accepted := event.GetAccepted(); accepted != nil && f.id == "" {
		f.id = accepted.GetRequestId()
	}
	if problem := f.problem(event); problem != "" {
		f.fail(newError(codes.DataLoss, ErrProtocol, "the server broke the contract: %s", problem))
		return Chunk{}, false
	}
	f.next++
	switch kind := event.GetEvent().(type) {
	case *headracev1.ResultEvent_Delta:
		f.hasBegun = true
		return f.choice(event).add(event, kind.Delta), true
	case *headracev1.ResultEvent_Accepted:
		f.accepted = acceptedFrom(f.id, kind.Accepted)
		if told := int(kind.Accepted.GetN()); told > 0 {
			f.n = told
		}
		f.n = max(f.n, 1)
	case *headracev1.ResultEvent_Prompt:
		f.prompt = promptFrom(kind.Prompt)
	case *headracev1.ResultEvent_Finished:
		f.choice(event).end = kind.Finished
		f.finished++
		if f.n > 0 && f.finished >= f.n {
			f.done, f.wasTold = true, true
		}
	case *headracev1.ResultEvent_Failed:
		f.fail(fromStatus(kind.Failed.GetStatus(), f.id))
		f.wasTold = true
	}
	return Chunk{}, false // an event that is newer than this package is counted and passed over
}

func (f *fold) problem(event *headracev1.ResultEvent) string {
	if accepted := event.GetAccepted(); accepted != nil && accepted.GetRequestId() != f.id {
		return fmt.Sprintf("%q was accepted where %q was due", accepted.GetRequestId(), f.id)
	}
	index := int(event.GetChoiceIndex())
	switch {
	case event.GetSeq() != f.next:
		return fmt.Sprintf("event %d came where %d was due", event.GetSeq(), f.next)
	case f.done, event.GetFailed() == nil && index < len(f.choices) && f.choices[index] != nil && f.choices[index].end != nil:
		return fmt.Sprintf("event %d came after the end", event.GetSeq())
	case f.n > 0 && index >= f.n, index >= maxChoices:
		return fmt.Sprintf("event %d is of choice %d, out of %d", event.GetSeq(), index, f.n)
	}
	return ""
}

// Beyond every server's limit: an index that is wrong must not take memory.
const maxChoices = 1 << 16

func (f *fold) choice(event *headracev1.ResultEvent) *choiceFold {
	index := int(event.GetChoiceIndex())
	for len(f.choices) <= index {
		f.choices = append(f.choices, nil)
	}
	if f.choices[index] == nil {
		f.choices[index] = &choiceFold{}
	}
	return f.choices[index]
}

func (c *choiceFold) add(event *headracev1.ResultEvent, delta *headracev1.Delta) Chunk {
	chunk := Chunk{
		Choice:    int(event.GetChoiceIndex()),
		Seq:       event.GetSeq(),
		Offset:    len(c.ids),
		Text:      delta.GetText(),
		Reasoning: delta.GetReasoning(),
		TokenIDs:  delta.GetTokenIds(),
		Tokens:    tokensFrom(delta.GetTokens()),
	}
	if len(chunk.Tokens) > 0 {
		chunk.TokenIDs = make([]uint32, len(chunk.Tokens))
		for i, token := range chunk.Tokens {
			chunk.TokenIDs[i] = token.ID
		}
	}
	c.text.WriteString(chunk.Text)
	c.reasoning.WriteString(chunk.Reasoning)
	c.ids = append(c.ids, chunk.TokenIDs...)
	c.tokens = append(c.tokens, chunk.Tokens...)
	for _, told := range delta.GetToolCalls() {
		part := ToolCallPart{int(told.GetIndex()), told.GetId(), told.GetName(), told.GetArgumentsJson()}
		chunk.ToolCalls = append(chunk.ToolCalls, part)
		c.addCall(part)
	}
	return chunk
}

// addCall joins the parts of calls, which come in order: the first part of a call has its id and name.
func (c *choiceFold) addCall(part ToolCallPart) {
	if part.Index >= len(c.calls) {
		c.calls = append(c.calls, &callFold{id: part.ID, name: part.Name})
	}
	call := c.calls[min(part.Index, len(c.calls)-1)]
	call.arguments.WriteString(part.Arguments)
}

// fail ends the request with an error; the first one stays.
func (f *fold) fail(err *Error) {
	if f.err == nil {
		made := *err
		if made.RequestID == "" {
			made.RequestID = f.id
		}
		if made.Partial == nil && f.accepted != nil {
			made.Partial = f.partial()
		}
		f.err = &made
	}
	f.done = true
}

// restart forgets all events: the request is sent again, and they begin anew.
func (f *fold) restart() { *f = *newFold(f.id, f.n, 1) }

// result is the whole output, or why there is none.
func (f *fold) result() (*Result, error) {
	if f.err != nil {
		return nil, f.err
	}
	return f.partial(), nil
}

// partial is the output so far.
func (f *fold) partial() *Result {
	made := &Result{RequestID: f.id, InstanceID: f.instance, Accepted: f.accepted, Prompt: f.prompt}
	if f.prompt != nil {
		made.Usage = Usage{PromptTokens: f.prompt.Tokens, CachedTokens: f.prompt.CachedTokens}
	}
	for index := range max(f.n, len(f.choices), 1) {
		choice := Choice{Index: index}
		if index < len(f.choices) && f.choices[index] != nil {
			f.choices[index].put(&choice)
		}
		made.Usage.PromptTokens = max(made.Usage.PromptTokens, choice.Usage.PromptTokens)
		made.Usage.CachedTokens = max(made.Usage.CachedTokens, choice.Usage.CachedTokens)
		made.Usage.CompletionTokens += choice.Usage.CompletionTokens
		made.Usage.ReasoningTokens += choice.Usage.ReasoningTokens
		made.Usage.DraftTokens += choice.Usage.DraftTokens
		made.Usage.AcceptedDraftTokens += choice.Usage.AcceptedDraftTokens
		made.Usage.PredictionDraftTokens += choice.Usage.PredictionDraftTokens
		made.Usage.AcceptedPredictionDraftTokens += choice.Usage.AcceptedPredictionDraftTokens
		made.Choices = append(made.Choices, choice)
	}
	return made
}

func (c *choiceFold) put(choice *Choice) {
	choice.Text, choice.Reasoning = c.text.String(), c.reasoning.String()
	choice.TokenIDs, choice.Tokens = c.ids[:len(c.ids):len(c.ids)], c.tokens[:len(c.tokens):len(c.tokens)]
	for _, call := range c.calls {
		choice.ToolCalls = append(choice.ToolCalls, ToolCall{call.id, call.name, call.arguments.String()})
	}
	if c.end != nil {
		choice.finish(c.end)
	}
}

// reopened is a fold that continues where this one was interrupted, with all its output. If the request's end had
// arrived, it has that too.
func (f *fold) reopened() *fold {
	made := newFold(f.id, f.n, f.next)
	made.instance, made.hasBegun = f.instance, f.hasBegun
	made.accepted, made.prompt, made.finished = f.accepted, f.prompt, f.finished
	for _, choice := range f.choices {
		made.choices = append(made.choices, choice.clone())
	}
	if f.wasTold {
		made.done, made.wasTold, made.err = true, true, f.err
	}
	return made
}

func (c *choiceFold) clone() *choiceFold {
	if c == nil {
		return nil
	}
	made := &choiceFold{ids: slices.Clone(c.ids), tokens: slices.Clone(c.tokens), end: c.end}
	made.text.WriteString(c.text.String())
	made.reasoning.WriteString(c.reasoning.String())
	for _, call := range c.calls {
		copied := &callFold{id: call.id, name: call.name}
		copied.arguments.WriteString(call.arguments.String())
		made.calls = append(made.calls, copied)
	}
	return made
}
