package headrace

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	headracev1 "headrace.dev/go/headrace/v1"
)

// A FinishReason says why a choice ended. A reason that is newer than this package has the contract's number.
type FinishReason int

// The reasons. An output that has not ended, such as that of a failed request, has FinishUnknown.
const (
	FinishUnknown   FinishReason = 0
	FinishStop      FinishReason = 1 // a stop string, a stop id or an end-of-sequence token
	FinishLength    FinishReason = 2 // MaxTokens was reached
	FinishContext   FinishReason = 3 // the context is full
	FinishCancelled FinishReason = 4 // it was cancelled
	FinishTimeLimit FinishReason = 5 // TimeLimit was reached
	FinishToolCalls FinishReason = 6 // it stopped after tool calls, whose arguments are whole
)

var reasonNames = [...]string{"unknown", "stop", "length", "context", "cancelled", "time_limit", "tool_calls"}

// String is the reason in words, such as "length"; "unknown" for one that is newer than this package.
func (r FinishReason) String() string {
	if r < 0 || int(r) >= len(reasonNames) {
		return reasonNames[FinishUnknown]
	}
	return reasonNames[r]
}

// A Result is the whole output of a request.
type Result struct {
	// RequestID is the request's id.
	RequestID string
	// InstanceID is the server process that ran it. Empty: not known.
	InstanceID string
	// Choices are the outputs, by their index; there is at least one.
	Choices []Choice
	// Usage is the cost in tokens, of all choices together.
	Usage Usage
	// Accepted has the parameters in force. Nil: they were not received.
	Accepted *Accepted
	// Prompt says how the prompt was processed. Nil: it was not, or that was not received.
	Prompt *Prompt
}

// Text is the text of the first choice.
func (r *Result) Text() string { return r.first().Text }

// TokenIDs are the token ids of the first choice.
func (r *Result) TokenIDs() []uint32 { return r.first().TokenIDs }

// Reasoning is what the model thought before the first choice's text.
func (r *Result) Reasoning() string { return r.first().Reasoning }

// ToolCalls are those of the first choice.
func (r *Result) ToolCalls() []ToolCall { return r.first().ToolCalls }

// FinishReason is why the first choice ended.
func (r *Result) FinishReason() FinishReason { return r.first().FinishReason }

// Message is the first choice as the assistant's message, for the next turn of a conversation.
func (r *Result) Message() Message {
	first := r.first()
	return Message{
		Role: RoleAssistant, Content: first.Text, NoContent: first.Text == "" && len(first.ToolCalls) > 0,
		Reasoning: first.Reasoning, ToolCalls: first.ToolCalls,
	}
}

func (r *Result) first() *Choice {
	if len(r.Choices) == 0 {
		return &Choice{}
	}
	return &r.Choices[0]
}

// A Choice is one of a request's outputs.
type Choice struct {
	// Index is which of the request's choices it is.
	Index int
	// Text is what the model wrote: in the reply to a conversation, without reasoning and tool calls.
	Text string
	// Reasoning is what the model thought before it answered.
	Reasoning string
	// ToolCalls are the tools that it called, in order.
	ToolCalls []ToolCall
	// TokenIDs are the ids of all its tokens.
	TokenIDs []uint32
	// Tokens are the tokens with their details, if they were asked for.
	Tokens []Token
	// FinishReason says why it ended.
	FinishReason FinishReason
	// StopString is what was found, if a stop string ended it.
	StopString string
	// StopTokenID is what was generated, if a stop or end-of-sequence id ended it. Nil: none did.
	StopTokenID *uint32
	// Usage is its cost. Prompt and cached tokens are the request's, and count once.
	Usage Usage
	// Timings say how long it took.
	Timings Timings
}

// A Chunk is a piece of a choice's output. The texts of all its chunks, joined, are the text.
type Chunk struct {
	// Choice is which of the request's choices it belongs to.
	Choice int
	// Seq is the event's number in the request.
	Seq uint64
	// Offset is how many tokens of the choice came before it. An attached stream counts from where it began.
	Offset int
	// Text is the new text. It may be empty: characters are never split.
	Text string
	// Reasoning is new reasoning.
	Reasoning string
	// ToolCalls are parts of tool calls.
	ToolCalls []ToolCallPart
	// TokenIDs are the ids of the new tokens.
	TokenIDs []uint32
	// Tokens are the new tokens with their details, if they were asked for.
	Tokens []Token
}

// A ToolCallPart is a piece of a tool call.
type ToolCallPart struct {
	// Index is which of the reply's calls it belongs to.
	Index int
	// ID is the call's id, in its first part.
	ID string
	// Name is the tool's name, in the call's first part.
	Name string
	// Arguments is the next piece of the arguments' text.
	Arguments string
}

// A Token is one token with its details.
type Token struct {
	// ID is its id.
	ID uint32
	// Text is its own text; a part of a character shows as U+FFFD.
	Text string
	// Bytes are its own bytes. Joined, they are the text in UTF-8.
	Bytes []byte
	// Logprob is its log-probability. Nil: it was not asked for.
	Logprob *float32
	// Rank is its rank by probability, from 1. Nil: not asked for.
	Rank *uint32
	// Candidates are the most likely tokens at its place, then those of LogprobTokenIDs.
	Candidates []Candidate
	// Elapsed is the time from the request's acceptance. Nil: not asked for.
	Elapsed *time.Duration
}

// A Candidate is a token that could have been chosen.
type Candidate struct {
	// ID is its id.
	ID uint32
	// Text is its own text.
	Text string
	// Bytes are its own bytes.
	Bytes []byte
	// Logprob is its log-probability.
	Logprob float32
}

// Usage is a cost in tokens.
type Usage struct {
	// PromptTokens are the prompt's.
	PromptTokens int
	// CachedTokens of them were found in the prefix cache.
	CachedTokens int
	// CompletionTokens were generated and delivered.
	CompletionTokens int
	// ReasoningTokens of them were reasoning.
	ReasoningTokens int
	// DraftTokens were guessed and computed, wrong ones included.
	DraftTokens int
	// AcceptedDraftTokens of them were right, and needed no step of their own.
	AcceptedDraftTokens int
	// PredictionDraftTokens of DraftTokens were guessed from the request's prediction.
	PredictionDraftTokens int
	// AcceptedPredictionDraftTokens of these were right.
	AcceptedPredictionDraftTokens int
}

// Timings are times of a request, from its acceptance. A time is nil if it did not come to that.
type Timings struct {
	// FirstScheduled is when it was first run.
	FirstScheduled *time.Duration
	// FirstToken is when its first token was there.
	FirstToken *time.Duration
	// LastToken is when its last token was there.
	LastToken *time.Duration
	// Finished is when it ended.
	Finished *time.Duration
	// Preemptions is how often it gave up its cache to others.
	Preemptions int
}

// Accepted says that a server took a request, and with which parameters.
type Accepted struct {
	// RequestID is the request's id.
	RequestID string
	// PromptTokens is the prompt's length.
	PromptTokens int
	// QueuePosition is how many requests waited before it.
	QueuePosition int
	// Choices is how many outputs it has.
	Choices int
	// Time is when it was accepted, by the server's clock. Zero: not told.
	Time time.Time
	// Sampling are the values in force, with the seed.
	Sampling *headracev1.SamplingOptions
	// Stop are the limits in force.
	Stop *headracev1.StopOptions
	// AdapterDigest is the digest of its adapter's content, in hexadecimal. Empty: it has none.
	AdapterDigest string
}

// Prompt says how a prompt was processed.
type Prompt struct {
	// Tokens is its length in tokens.
	Tokens int
	// CachedTokens of them were found in the prefix cache.
	CachedTokens int
	// Details are its tokens, if PromptLogprobs was set.
	Details []Token
}

// ---- from the contract's messages ------------------------------------------------------------------------------------

func optionalDuration(told *durationpb.Duration) *time.Duration {
	if told == nil {
		return nil
	}
	return Ptr(told.AsDuration())
}

func tokensFrom(told []*headracev1.TokenInfo) []Token {
	if len(told) == 0 {
		return nil
	}
	tokens := make([]Token, len(told))
	for i, one := range told {
		tokens[i] = Token{
			ID: one.GetId(), Text: one.GetText(), Bytes: one.GetBytes(), Logprob: one.Logprob, Rank: one.Rank,
			Elapsed: optionalDuration(one.GetElapsedDuration()),
		}
		for _, candidate := range one.GetCandidates() {
			tokens[i].Candidates = append(tokens[i].Candidates, Candidate{
				ID: candidate.GetId(), Text: candidate.GetText(), Bytes: candidate.GetBytes(), Logprob: candidate.GetLogprob(),
			})
		}
	}
	return tokens
}

func usageFrom(told *headracev1.Usage) Usage {
	return Usage{
		PromptTokens:                  int(told.GetPromptTokens()),
		CachedTokens:                  int(told.GetCachedTokens()),
		CompletionTokens:              int(told.GetCompletionTokens()),
		ReasoningTokens:               int(told.GetReasoningTokens()),
		DraftTokens:                   int(told.GetDraftTokens()),
		AcceptedDraftTokens:           int(told.GetAcceptedDraftTokens()),
		PredictionDraftTokens:         int(told.GetPredictionDraftTokens()),
		AcceptedPredictionDraftTokens: int(told.GetAcceptedPredictionDraftTokens()),
	}
}

func acceptedFrom(requestID string, told *headracev1.Accepted) *Accepted {
	made := &Accepted{
		RequestID:     requestID,
		PromptTokens:  int(told.GetPromptTokens()),
		QueuePosition: int(told.GetQueuePosition()),
		Choices:       max(int(told.GetN()), 1),
		Sampling:      told.GetSampling(),
		Stop:          told.GetStop(),
		AdapterDigest: told.GetAdapterDigest(),
	}
	if told.GetAcceptTime() != nil {
		made.Time = told.GetAcceptTime().AsTime()
	}
	return made
}

func promptFrom(told *headracev1.PromptProcessed) *Prompt {
	return &Prompt{
		Tokens:       int(told.GetPromptTokens()),
		CachedTokens: int(told.GetCachedTokens()),
		Details:      tokensFrom(told.GetTokens()),
	}
}

// finish puts how a choice ended in it.
func (c *Choice) finish(told *headracev1.Finished) {
	c.FinishReason = FinishReason(told.GetReason())
	c.StopString = told.GetStopString()
	if matched, ok := told.GetMatched().(*headracev1.Finished_StopTokenId); ok {
		c.StopTokenID = &matched.StopTokenId
	}
	c.Usage = usageFrom(told.GetUsage())
	timings := told.GetTimings()
	c.Timings = Timings{
		FirstScheduled: optionalDuration(timings.GetFirstScheduledDuration()),
		FirstToken:     optionalDuration(timings.GetFirstTokenDuration()),
		LastToken:      optionalDuration(timings.GetLastTokenDuration()),
		Finished:       optionalDuration(timings.GetFinishedDuration()),
		Preemptions:    int(timings.GetPreemptions()),
	}
}

// resultFrom is the answer of Generate.
func resultFrom(told *headracev1.GenerateResponse) *Result {
	made := &Result{
		RequestID:  told.GetRequestId(),
		InstanceID: told.GetInstanceId(),
		Usage:      usageFrom(told.GetUsage()),
	}
	if told.GetAccepted() != nil {
		made.Accepted = acceptedFrom(told.GetRequestId(), told.GetAccepted())
	}
	if told.GetPrompt() != nil {
		made.Prompt = promptFrom(told.GetPrompt())
	}
	for _, one := range told.GetChoices() {
		choice := Choice{
			Index:     int(one.GetIndex()),
			Text:      one.GetText(),
			Reasoning: one.GetReasoning(),
			TokenIDs:  one.GetTokenIds(),
			Tokens:    tokensFrom(one.GetTokens()),
		}
		for _, call := range one.GetToolCalls() {
			choice.ToolCalls = append(choice.ToolCalls, ToolCall{call.GetId(), call.GetName(), call.GetArgumentsJson()})
		}
		choice.finish(one.GetFinished())
		made.Choices = append(made.Choices, choice)
	}
	return made
}
