package headrace

import (
	"crypto/rand"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	headracev1 "headrace.dev/go/headrace/v1"
)

// A Request says what to generate. What is left at its zero value (or nil) is not sent, and the server's default holds:
// the model's own for sampling. The server checks what values may be; here a value is refused only if the contract's
// message cannot have it.
//
// A Request is only read, so one may be used for several calls. Without an ID each of them is a request of its own.
type Request struct {
	// Spec is the contract's message to begin with: the other fields are set on a copy of it. Nil: an empty one.
	Spec *headracev1.GenerationSpec

	// ID is the caller's id for the request: 1 to 128 characters of [A-Za-z0-9._:/-]. Empty: an unguessable one is made.
	ID string
	// Model is the model that is meant, by its name or an alias; a server that does not have it refuses the request.
	Model string
	// Adapter is the name of an adapter to apply, such as a LoRA.
	Adapter string
	// Labels are for accounting: they are in the server's logs and traces.
	Labels map[string]string
	// N is how many independent continuations to make. 0: one.
	N int

	// Text is the prompt as text. One of Text, TokenIDs and Messages is set.
	Text string
	// AddSpecialTokens tells whether the tokenizer adds its special tokens to Text. Nil: it does.
	AddSpecialTokens *bool
	// TokenIDs is the prompt as token ids, used as they are.
	TokenIDs []uint32
	// Messages is the prompt as a conversation, oldest message first.
	Messages []Message
	// Tools are the functions that the model may call in its reply to Messages.
	Tools []Tool
	// ToolChoice holds the reply to the tools and their schemas. Nil: nothing holds it.
	ToolChoice *ToolChoice
	// AddGenerationPrompt tells whether the conversation ends with the opening of an assistant's turn. Nil: it does.
	AddGenerationPrompt *bool
	// ContinueFinalMessage leaves the last message open, to be continued by the model.
	ContinueFinalMessage bool
	// TemplateArguments are more named values for the chat template: the text of a JSON object.
	TemplateArguments string
	// TruncatePromptTo cuts a longer prompt to so many tokens. 0: it is refused instead.
	TruncatePromptTo int
	// TruncateRight cuts the newest tokens, not the oldest.
	TruncateRight bool
	// Prediction is what the output is expected to be like, such as a file that is to be edited. It changes no token:
	// where the server speculates and the output goes as expected, several tokens come at a time.
	Prediction string
	// PredictionTokenIDs is the same as token ids. One of the two may be set.
	PredictionTokenIDs []uint32

	// Temperature divides the logits; 0 is greedy.
	Temperature *float64
	// TopK keeps the k most likely tokens; 0: all.
	TopK *int
	// TopP keeps the fewest tokens whose probabilities reach this sum.
	TopP *float64
	// MinP keeps tokens at least this likely, relative to the most likely one.
	MinP *float64
	// TypicalP keeps the tokens of most typical surprise, up to this sum of probability.
	TypicalP *float64
	// RepetitionPenalty divides the logits of tokens that were seen.
	RepetitionPenalty *float64
	// PresencePenalty is subtracted from the logits of tokens seen in the output.
	PresencePenalty *float64
	// FrequencyPenalty is subtracted for each time that a token was seen in the output.
	FrequencyPenalty *float64
	// NoRepeatNGramSize: no sequence of so many tokens occurs twice; 0: off.
	NoRepeatNGramSize *int
	// LogitBias is added to the logits of single tokens, by id.
	LogitBias map[uint32]float32
	// AllowedTokenIDs are the only ids that may be generated, if there are some.
	AllowedTokenIDs []uint32
	// BannedTokenIDs are never generated.
	BannedTokenIDs []uint32
	// Seed makes the draws repeatable. It is below 2^63.
	Seed *uint64

	// MaxTokens is the most tokens to generate; 0: the prompt is processed only.
	MaxTokens *int
	// MinTokens: until so many tokens are generated, nothing stops the output.
	MinTokens int
	// Stop are strings that end the output where they first appear.
	Stop []string
	// StopTokenIDs are token ids that end the output.
	StopTokenIDs []uint32
	// EOSTokenIDs replace the model's own end-of-sequence ids.
	EOSTokenIDs []uint32
	// IgnoreEOS treats end-of-sequence tokens like any other.
	IgnoreEOS bool
	// IncludeStop leaves the text that ended the output in it.
	IncludeStop bool
	// MaxReasoningTokens: in the reply to a conversation, reasoning is ended after so many tokens.
	MaxReasoningTokens *int

	// Format is a form that the output must have, such as [JSONSchema]. Nil: none.
	Format Format

	// FinalOnly has the output come in one piece at the end.
	FinalOnly bool
	// MinTokensPerDelta: a chunk is sent once it has so many tokens. 0: every step's.
	MinTokensPerDelta int
	// Logprobs asks for each token's log-probability and those of so many candidates; 0: the token's own only.
	Logprobs *int
	// PromptLogprobs asks for the same of the prompt's tokens.
	PromptLogprobs *int
	// LogprobTokenIDs are ids whose log-probabilities follow the candidates of each token.
	LogprobTokenIDs []uint32
	// Echo has the text start with the prompt's.
	Echo bool
	// TokenDetails asks for each token's text and bytes.
	TokenDetails bool
	// RecordTimestamps asks for the time of each token.
	RecordTimestamps bool
	// SkipSpecialTokens tells whether special tokens are left out of the text. Nil: they are.
	SkipSpecialTokens *bool
	// OmitText asks for token ids alone.
	OmitText bool
	// RawText has reasoning and tool calls stay in the text of the reply, as the model wrote them.
	RawText bool

	// Priority: requests of a higher number run first.
	Priority int
	// TimeLimit is how long the request may take on the server; then it ends with FinishTimeLimit and its output so
	// far. 0: the server's limit.
	TimeLimit time.Duration
	// CacheSalt: cached prefixes are shared only among requests with the same salt.
	CacheSalt string
	// BypassPrefixCache neither uses cached prefixes nor caches this request's.
	BypassPrefixCache bool
}

// Ptr makes a pointer to a value, for the optional fields of [Request].
func Ptr[T any](value T) *T { return &value }

// A Format is a form that the output must have: [JSONSchema], [JSONObject], [Regex], [Grammar], [OneOf] or
// [StructuralTag].
type Format interface {
	set(*headracev1.StructuredOutput)
}

// JSONSchema asks for a JSON value that satisfies a schema.
type JSONSchema struct {
	// Schema is the text of a JSON Schema.
	Schema string
	// FlexibleWhitespace lets the model write blanks and line ends as it likes. By default it writes one line.
	FlexibleWhitespace bool
}

// JSONObject asks for any JSON object.
type JSONObject struct {
	// FlexibleWhitespace lets the model write blanks and line ends as it likes. By default it writes one line.
	FlexibleWhitespace bool
}

// Regex asks for text that matches a regular expression as a whole.
type Regex string

// Grammar asks for text of a context-free grammar, in Lark's syntax.
type Grammar string

// OneOf asks for one of some strings.
type OneOf []string

// StructuralTag asks for text made of parts, as a JSON object describes it.
type StructuralTag struct {
	// Tag is the text of the object, {"type": "structural_tag", "format": …}.
	Tag string
	// FlexibleWhitespace lets the model write blanks and line ends in JSON as it likes.
	FlexibleWhitespace bool
}

func (f JSONSchema) set(made *headracev1.StructuredOutput) {
	made.Format = &headracev1.StructuredOutput_JsonSchema{JsonSchema: f.Schema}
	made.FlexibleWhitespace = f.FlexibleWhitespace
}

func (f JSONObject) set(made *headracev1.StructuredOutput) {
	made.Format = &headracev1.StructuredOutput_JsonObject{JsonObject: &headracev1.JsonObjectFormat{}}
	made.FlexibleWhitespace = f.FlexibleWhitespace
}

func (f Regex) set(made *headracev1.StructuredOutput) {
	made.Format = &headracev1.StructuredOutput_Regex{Regex: string(f)}
}

func (f Grammar) set(made *headracev1.StructuredOutput) {
	made.Format = &headracev1.StructuredOutput_Grammar{Grammar: string(f)}
}

func (f OneOf) set(made *headracev1.StructuredOutput) {
	made.Format = &headracev1.StructuredOutput_Choice{Choice: &headracev1.ChoiceFormat{Choices: f}}
}

func (f StructuralTag) set(made *headracev1.StructuredOutput) {
	made.Format = &headracev1.StructuredOutput_StructuralTag{StructuralTag: f.Tag}
	made.FlexibleWhitespace = f.FlexibleWhitespace
}

// build makes the contract's message, with an id.
func (r *Request) build() (*headracev1.GenerationSpec, error) {
	if r == nil {
		return nil, invalid("request", "is nil")
	}
	spec := &headracev1.GenerationSpec{}
	if r.Spec != nil {
		spec = proto.CloneOf(r.Spec)
	}
	b := builder{}
	b.identity(r, spec)
	b.input(r, spec)
	b.sampling(r, spec)
	b.stop(r, spec)
	b.output(r, spec)
	b.rest(r, spec)
	if b.err != nil {
		return nil, b.err
	}
	// A message that cannot be sent would end a session for all of its requests.
	if _, err := proto.Marshal(spec); err != nil {
		return nil, invalid("request", err.Error())
	}
	return spec, nil
}

// A builder keeps the first value that does not fit.
type builder struct{ err error }

func (b *builder) fail(field, format string, arguments ...any) {
	if b.err == nil {
		b.err = invalid(field, fmt.Sprintf(format, arguments...))
	}
}

// count is a number that the contract has in 32 bits.
func (b *builder) count(field string, value int) uint32 {
	if value < 0 || value > math.MaxUint32 {
		b.fail(field, "%d is not from 0 to %d", value, uint32(math.MaxUint32))
		return 0
	}
	return uint32(value)
}

func (b *builder) optional(field string, value *int, target **uint32) {
	if value != nil {
		*target = proto.Uint32(b.count(field, *value))
	}
}

func fraction(value *float64, target **float32) {
	if value != nil {
		*target = proto.Float32(float32(*value))
	}
}

func setString(value string, target *string) {
	if value != "" {
		*target = value
	}
}

func (b *builder) identity(r *Request, spec *headracev1.GenerationSpec) {
	setString(r.ID, &spec.RequestId)
	if spec.GetRequestId() == "" {
		spec.RequestId = strings.ToLower(rand.Text())
	}
	setString(r.Model, &spec.Model)
	setString(r.Adapter, &spec.Adapter)
	for _, name := range slices.Sorted(maps.Keys(r.Labels)) {
		spec.Labels = append(spec.Labels, &headracev1.Label{Name: name, Value: r.Labels[name]})
	}
	if r.N != 0 {
		spec.N = proto.Uint32(b.count("n", r.N))
	}
}

func (b *builder) input(r *Request, spec *headracev1.GenerationSpec) {
	set := 0
	for _, given := range []bool{r.Text != "", len(r.TokenIDs) > 0, len(r.Messages) > 0} {
		if given {
			set++
		}
	}
	if set > 1 {
		b.fail("input", "only one of Text, TokenIDs and Messages may be set")
	}
	switch {
	case len(r.TokenIDs) > 0:
		spec.Input = &headracev1.GenerationSpec_Tokens{Tokens: &headracev1.TokenInput{Ids: r.TokenIDs}}
	case len(r.Messages) > 0:
		spec.Input = &headracev1.GenerationSpec_Chat{Chat: &headracev1.ChatInput{}}
	case r.Text != "" || spec.Input == nil:
		spec.Input = &headracev1.GenerationSpec_Text{Text: &headracev1.TextInput{Text: r.Text}}
	}
	if r.AddSpecialTokens != nil {
		if text := spec.GetText(); text != nil {
			text.AddSpecialTokens = r.AddSpecialTokens
		} else {
			b.fail("add_special_tokens", "belongs to a prompt that is text")
		}
	}
	if chat := spec.GetChat(); chat != nil {
		b.chat(r, chat)
	} else if len(r.Tools) > 0 || r.ToolChoice != nil || r.AddGenerationPrompt != nil || r.ContinueFinalMessage ||
		r.TemplateArguments != "" {
		b.fail("messages", "are needed for tools and for options of the chat template")
	}
	if r.TruncatePromptTo != 0 {
		spec.Truncation = &headracev1.TruncationOptions{MaxPromptTokens: b.count("truncate_prompt_to", r.TruncatePromptTo)}
		if r.TruncateRight {
			spec.Truncation.Side = headracev1.TruncationSide_TRUNCATION_SIDE_RIGHT
		}
	} else if r.TruncateRight {
		b.fail("truncate_right", "needs TruncatePromptTo")
	}
}

func (b *builder) sampling(r *Request, spec *headracev1.GenerationSpec) {
	own := spec.GetSampling()
	if own == nil {
		own = &headracev1.SamplingOptions{}
	}
	fraction(r.Temperature, &own.Temperature)
	b.optional("top_k", r.TopK, &own.TopK)
	fraction(r.TopP, &own.TopP)
	fraction(r.MinP, &own.MinP)
	fraction(r.TypicalP, &own.TypicalP)
	fraction(r.RepetitionPenalty, &own.RepetitionPenalty)
	fraction(r.PresencePenalty, &own.PresencePenalty)
	fraction(r.FrequencyPenalty, &own.FrequencyPenalty)
	b.optional("no_repeat_ngram_size", r.NoRepeatNGramSize, &own.NoRepeatNgramSize)
	if len(r.LogitBias) > 0 {
		own.LogitBias = r.LogitBias
	}
	setIDs(r.AllowedTokenIDs, &own.AllowedTokenIds)
	setIDs(r.BannedTokenIDs, &own.BannedTokenIds)
	if r.Seed != nil {
		if *r.Seed > math.MaxInt64 {
			b.fail("seed", "%d is not below 2^63", *r.Seed)
		}
		own.Seed = proto.Int64(int64(*r.Seed)) //nolint:gosec // checked
	}
	if proto.Size(own) > 0 {
		spec.Sampling = own
	}
}

func setIDs(ids []uint32, target *[]uint32) {
	if len(ids) > 0 {
		*target = ids
	}
}

func (b *builder) stop(r *Request, spec *headracev1.GenerationSpec) {
	own := spec.GetStop()
	if own == nil {
		own = &headracev1.StopOptions{}
	}
	b.optional("max_tokens", r.MaxTokens, &own.MaxTokens)
	if r.MinTokens != 0 {
		own.MinTokens = b.count("min_tokens", r.MinTokens)
	}
	if len(r.Stop) > 0 {
		own.StopStrings = r.Stop
	}
	setIDs(r.StopTokenIDs, &own.StopTokenIds)
	setIDs(r.EOSTokenIDs, &own.EosTokenIds)
	own.IgnoreEos = own.IgnoreEos || r.IgnoreEOS
	own.IncludeStop = own.IncludeStop || r.IncludeStop
	b.optional("max_reasoning_tokens", r.MaxReasoningTokens, &own.MaxReasoningTokens)
	if proto.Size(own) > 0 {
		spec.Stop = own
	}
}

func (b *builder) output(r *Request, spec *headracev1.GenerationSpec) {
	own := spec.GetOutput()
	if own == nil {
		own = &headracev1.OutputOptions{}
	}
	if r.FinalOnly {
		own.Delivery = headracev1.Delivery_DELIVERY_FINAL
	}
	if r.MinTokensPerDelta != 0 {
		own.MinTokensPerDelta = proto.Uint32(b.count("min_tokens_per_delta", r.MinTokensPerDelta))
	}
	b.optional("logprobs", r.Logprobs, &own.Logprobs)
	b.optional("prompt_logprobs", r.PromptLogprobs, &own.PromptLogprobs)
	setIDs(r.LogprobTokenIDs, &own.LogprobTokenIds)
	own.Echo = own.Echo || r.Echo
	own.TokenDetails = own.TokenDetails || r.TokenDetails
	own.RecordTimestamps = own.RecordTimestamps || r.RecordTimestamps
	if r.SkipSpecialTokens != nil {
		own.SkipSpecialTokens = r.SkipSpecialTokens
	}
	own.OmitText = own.OmitText || r.OmitText
	own.RawText = own.RawText || r.RawText
	if proto.Size(own) > 0 {
		spec.Output = own
	}
}

func (b *builder) rest(r *Request, spec *headracev1.GenerationSpec) {
	if r.Format != nil {
		spec.StructuredOutput = &headracev1.StructuredOutput{}
		r.Format.set(spec.StructuredOutput)
	}
	if r.Priority != 0 || r.TimeLimit != 0 {
		if spec.Scheduling == nil {
			spec.Scheduling = &headracev1.SchedulingOptions{}
		}
		if r.Priority < math.MinInt32 || r.Priority > math.MaxInt32 {
			b.fail("priority", "%d does not fit in 32 bits", r.Priority)
		} else if r.Priority != 0 {
			spec.Scheduling.Priority = int32(r.Priority)
		}
		if r.TimeLimit != 0 {
			spec.Scheduling.TimeLimit = durationpb.New(r.TimeLimit)
		}
	}
	if r.Prediction != "" && len(r.PredictionTokenIDs) > 0 {
		b.fail("prediction", "only one of Prediction and PredictionTokenIDs may be set")
	} else if r.Prediction != "" {
		spec.Prediction = &headracev1.Prediction{Content: &headracev1.Prediction_Text{Text: r.Prediction}}
	} else if len(r.PredictionTokenIDs) > 0 {
		tokens := &headracev1.TokenInput{Ids: r.PredictionTokenIDs}
		spec.Prediction = &headracev1.Prediction{Content: &headracev1.Prediction_Tokens{Tokens: tokens}}
	}
	if r.CacheSalt != "" || r.BypassPrefixCache {
		if spec.Cache == nil {
			spec.Cache = &headracev1.CacheOptions{}
		}
		setString(r.CacheSalt, &spec.Cache.Salt)
		spec.Cache.BypassPrefixCache = spec.Cache.BypassPrefixCache || r.BypassPrefixCache
	}
}

// choicesOf is how many choices a request has.
func choicesOf(spec *headracev1.GenerationSpec) int {
	if spec.N == nil {
		return 1
	}
	return int(spec.GetN())
}
