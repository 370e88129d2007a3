package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"math"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/propagation"
	"google.golang.org/genproto/googleapis/rpc/code"

	"headrace.dev/go/headrace"
	headracev1 "headrace.dev/go/headrace/v1"
)

// A command has the members of all commands.
type command struct {
	ID      int64  `json:"id"`
	Op      string `json:"op"`
	Client  string `json:"client"`
	Session string `json:"session"`
	Handle  string `json:"handle"`
	Of      of     `json:"of"`

	Targets         []string          `json:"targets"`
	Token           string            `json:"token"`
	CA              string            `json:"ca"`
	ServerName      string            `json:"server_name"`
	Metadata        map[string]string `json:"metadata"`
	Retries         *int              `json:"retries"`
	MaxMessageBytes *int              `json:"max_message_bytes"`

	Request     *request   `json:"request"`
	Requests    []*request `json:"requests"`
	MaxInFlight int        `json:"max_in_flight"`
	Ordered     bool       `json:"ordered"`
	Traceparent string     `json:"traceparent"`
	DeadlineMS  *int64     `json:"deadline_ms"`

	LeaseMS       int64  `json:"lease_ms"`
	InitialCredit int    `json:"initial_credit"`
	RoomTimeoutMS *int64 `json:"room_timeout_ms"`

	RequestID  string   `json:"request_id"`
	RequestIDs []string `json:"request_ids"`
	FromSeq    uint64   `json:"from_seq"`
	N          int      `json:"n"`
	Chunks     *int     `json:"chunks"`
	TimeoutMS  *int64   `json:"timeout_ms"`
	Cancel     bool     `json:"cancel"`

	Name    string `json:"name"`
	Source  string `json:"source"`
	Pinned  bool   `json:"pinned"`
	Replace bool   `json:"replace"`
}

// of is a command's id, or a handle's name.
type of struct {
	number *int64
	text   string
}

func (o *of) UnmarshalJSON(told []byte) error {
	if len(told) > 0 && told[0] == '"' {
		return json.Unmarshal(told, &o.text)
	}
	return json.Unmarshal(told, &o.number)
}

type request struct {
	ID                 string           `json:"id"`
	Text               string           `json:"text"`
	TokenIDs           []uint32         `json:"token_ids"`
	Messages           []message        `json:"messages"`
	Tools              []headrace.Tool  `json:"tools"`
	ToolChoice         string           `json:"tool_choice"`
	MaxTokens          *int             `json:"max_tokens"`
	N                  int              `json:"n"`
	Logprobs           *int             `json:"logprobs"`
	Priority           int              `json:"priority"`
	MaxReasoningTokens *int             `json:"max_reasoning_tokens"`
	Seed               *json.RawMessage `json:"seed"`
	Stop               []string         `json:"stop"`
	JSONSchema         string           `json:"json_schema"`
	StructuralTag      string           `json:"structural_tag"`
	TimeLimitMS        int64            `json:"time_limit_ms"`
	Prediction         string           `json:"prediction"`
	Adapter            string           `json:"adapter"`
}

type message struct {
	Role       string              `json:"role"`
	Content    *string             `json:"content"`
	ToolCalls  []headrace.ToolCall `json:"tool_calls"`
	ToolCallID string              `json:"tool_call_id"`
}

func milliseconds(count int64) time.Duration { return time.Duration(count) * time.Millisecond }

// context is the one in which the command's call is made.
func (c *command) context() context.Context {
	if c.Traceparent == "" {
		return context.Background()
	}
	carrier := propagation.MapCarrier{"traceparent": c.Traceparent}
	return propagation.TraceContext{}.Extract(context.Background(), carrier)
}

func within(ctx context.Context, limit *int64) (context.Context, context.CancelFunc) {
	if limit == nil {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, milliseconds(*limit))
}

func (c *command) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return within(ctx, c.TimeoutMS)
}

func (c *command) untilDeadline(ctx context.Context) (context.Context, context.CancelFunc) {
	return within(ctx, c.DeadlineMS)
}

func (c *command) connect() (*headrace.Client, error) {
	var options []headrace.Option
	if c.Token != "" {
		options = append(options, headrace.WithToken(c.Token))
	}
	if c.CA != "" {
		options = append(options, headrace.WithCAFile(c.CA))
	}
	if c.ServerName != "" {
		options = append(options, headrace.WithServerName(c.ServerName))
	}
	for key, value := range c.Metadata {
		options = append(options, headrace.WithMetadata(key, value))
	}
	if c.Retries != nil {
		options = append(options, headrace.WithRetries(*c.Retries))
	}
	if c.MaxMessageBytes != nil {
		options = append(options, headrace.WithMaxMessageBytes(*c.MaxMessageBytes))
	}
	return headrace.NewClient(strings.Join(c.Targets, ","), options...)
}

func (c *command) sessionOptions() *headrace.SessionOptions {
	options := &headrace.SessionOptions{Lease: milliseconds(c.LeaseMS), InitialCredit: c.InitialCredit}
	if c.RoomTimeoutMS != nil {
		options.RoomTimeout = milliseconds(*c.RoomTimeoutMS)
		if options.RoomTimeout == 0 {
			options.RoomTimeout = -1 // the first refusal is the end
		}
	}
	return options
}

func (c *command) batchOptions() *headrace.BatchOptions {
	return &headrace.BatchOptions{MaxInFlight: c.MaxInFlight, Ordered: c.Ordered}
}

func (c *command) requests() iter.Seq[*headrace.Request] {
	return func(yield func(*headrace.Request) bool) {
		for _, one := range c.Requests {
			if !yield(one.made()) {
				return
			}
		}
	}
}

// made is the request as a user of the library writes it.
func (r *request) made() *headrace.Request {
	made := &headrace.Request{
		ID: r.ID, Text: r.Text, TokenIDs: r.TokenIDs, Tools: r.Tools, N: r.N, MaxTokens: r.MaxTokens,
		Logprobs: r.Logprobs, Priority: r.Priority, MaxReasoningTokens: r.MaxReasoningTokens, Stop: r.Stop,
		TimeLimit: milliseconds(r.TimeLimitMS), Prediction: r.Prediction, Adapter: r.Adapter,
	}
	for _, one := range r.Messages {
		message := headrace.Message{
			Role: headrace.Role(one.Role), NoContent: one.Content == nil, ToolCalls: one.ToolCalls, ToolCallID: one.ToolCallID,
		}
		if one.Content != nil {
			message.Content = *one.Content
		}
		made.Messages = append(made.Messages, message)
	}
	if r.ToolChoice != "" && r.ToolChoice != "auto" {
		made.ToolChoice = &headrace.ToolChoice{Mode: headrace.ToolMode(r.ToolChoice)}
	}
	if r.Seed != nil {
		if seed, err := strconv.ParseUint(strings.Trim(string(*r.Seed), `"`), 10, 64); err == nil {
			made.Seed = &seed
		}
	}
	if r.JSONSchema != "" {
		made.Format = headrace.JSONSchema{Schema: r.JSONSchema}
	}
	if r.StructuralTag != "" {
		made.Format = headrace.StructuralTag{Tag: r.StructuralTag}
	}
	return made
}

// ---- what the library gave, in the protocol's form -------------------------------------------------------------------

func bits(value float32) string { return fmt.Sprintf("%08x", math.Float32bits(value)) }

func tellTokens(tokens []headrace.Token) []any {
	told := []any{}
	for _, token := range tokens {
		one := map[string]any{"id": token.ID, "text": token.Text, "bytes": notNil(token.Bytes), "logprob": nil, "rank": token.Rank}
		if token.Logprob != nil {
			one["logprob"] = bits(*token.Logprob)
		}
		candidates := []any{}
		for _, other := range token.Candidates {
			candidates = append(candidates, map[string]any{
				"id": other.ID, "text": other.Text, "bytes": notNil(other.Bytes), "logprob": bits(other.Logprob),
			})
		}
		one["candidates"] = candidates
		told = append(told, one)
	}
	return told
}

// notNil has an absent list be told as an empty one.
func notNil[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

func tellChunk(chunk headrace.Chunk) map[string]any {
	calls := []any{}
	for _, part := range chunk.ToolCalls {
		calls = append(calls, map[string]any{"index": part.Index, "id": part.ID, "name": part.Name, "arguments": part.Arguments})
	}
	return map[string]any{
		"choice": chunk.Choice, "text": chunk.Text, "token_ids": notNil(chunk.TokenIDs), "reasoning": chunk.Reasoning,
		"tool_calls": calls, "tokens": tellTokens(chunk.Tokens),
	}
}

func tellUsage(usage headrace.Usage) map[string]any {
	return map[string]any{
		"prompt_tokens": usage.PromptTokens, "cached_tokens": usage.CachedTokens,
		"completion_tokens": usage.CompletionTokens, "reasoning_tokens": usage.ReasoningTokens,
		"draft_tokens": usage.DraftTokens, "accepted_draft_tokens": usage.AcceptedDraftTokens,
		"prediction_draft_tokens":          usage.PredictionDraftTokens,
		"accepted_prediction_draft_tokens": usage.AcceptedPredictionDraftTokens,
	}
}

func tellResult(result *headrace.Result) map[string]any {
	if result == nil {
		return nil
	}
	told := map[string]any{"request_id": result.RequestID, "seed": nil, "usage": tellUsage(result.Usage)}
	if result.Accepted != nil {
		told["adapter_digest"] = result.Accepted.AdapterDigest
	}
	if result.Accepted != nil && result.Accepted.Sampling != nil && result.Accepted.Sampling.Seed != nil {
		told["seed"] = strconv.FormatInt(*result.Accepted.Sampling.Seed, 10)
	}
	choices := []any{}
	for _, one := range result.Choices {
		calls := []any{}
		for _, call := range one.ToolCalls {
			calls = append(calls, map[string]any{"id": call.ID, "name": call.Name, "arguments": call.Arguments})
		}
		choice := map[string]any{
			"index": one.Index, "text": one.Text, "token_ids": notNil(one.TokenIDs), "reasoning": one.Reasoning,
			"tool_calls": calls, "tokens": tellTokens(one.Tokens), "usage": tellUsage(one.Usage),
			"finish_reason": one.FinishReason.String(), "stop_string": nil, "stop_token_id": one.StopTokenID,
		}
		if one.StopString != "" {
			choice["stop_string"] = one.StopString
		}
		choices = append(choices, choice)
	}
	told["choices"] = choices
	return told
}

func tellAdapter(adapter *headracev1.Adapter) map[string]any {
	state := strings.ToLower(strings.TrimPrefix(adapter.GetState().String(), "ADAPTER_STATE_"))
	return map[string]any{
		"name": adapter.GetName(), "digest": adapter.GetDigest(), "rank": adapter.GetRank(), "bytes": adapter.GetSizeBytes(),
		"modules": adapter.GetModules(), "state": state, "pinned": adapter.GetPinned(), "live": adapter.GetLiveRequests(),
		"base_model": adapter.GetBaseModel(),
	}
}

func tellError(err error) map[string]any {
	var failure *headrace.Error
	if !errors.As(err, &failure) {
		return map[string]any{"foreign": err.Error()}
	}
	fields := []any{}
	for _, one := range failure.Fields {
		fields = append(fields, map[string]any{"field": one.Field, "description": one.Description})
	}
	metadata := failure.Metadata
	if metadata == nil {
		metadata = map[string]string{}
	}
	told := map[string]any{
		"code": code.Code(failure.Code).String(), "reason": failure.Reason, "message": failure.Message, //nolint:gosec // below 17
		"metadata": metadata, "fields": fields, "retry_after_ms": nil, "request_id": failure.RequestID, "partial": nil,
	}
	if delay, has := failure.RetryAfter(); has {
		told["retry_after_ms"] = delay.Milliseconds()
	}
	if failure.Partial != nil {
		told["partial"] = tellResult(failure.Partial)
	}
	return told
}

func tellOutcomes(outcomes iter.Seq[headrace.Outcome]) []any {
	told := []any{}
	for one := range outcomes {
		if one.Err != nil {
			told = append(told, map[string]any{"index": one.Index, "error": tellError(one.Err)})
		} else {
			told = append(told, map[string]any{"index": one.Index, "result": tellResult(one.Result)})
		}
	}
	return told
}
