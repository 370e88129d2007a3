package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"

	"google.golang.org/genproto/googleapis/rpc/status"

	headracev1 "headrace.dev/go/headrace/v1"
)

// A ledger knows the session's requests: it gives them their names, takes their events, prints what they say, and
// checks that they are complete. Its methods may be called by the sender and the receiver at the same time.
type ledger struct {
	idPrefix string
	json     bool
	out, err io.Writer

	mu       sync.Mutex
	requests []*request // in the order of sending; the command_id of a request's add is its index + 1
	byID     map[string]*request
	byNumber map[uint32]*request // by the number that the server gave it
	faults   int                 // what was refused, failed or broke the contract
}

// A request is what has been told about one request.
type request struct {
	number   int // counted from 1
	id       string
	lastSeq  uint64
	ended    bool
	text     strings.Builder
	tokenIDs []uint32
	finished *headracev1.Finished // at its end, if it finished
	failure  *status.Status       // at its end, if it was refused or failed
	usage    *headracev1.Usage    // at its end, unless it was refused
}

func newLedger(idPrefix string, json bool, out, err io.Writer) *ledger {
	return &ledger{idPrefix: idPrefix, json: json, out: out, err: err, byID: make(map[string]*request),
		byNumber: make(map[uint32]*request)}
}

// add makes a new request and returns the command_id of its add, and its id.
func (l *ledger) add() (uint64, string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	number := len(l.requests) + 1
	r := &request{number: number, id: fmt.Sprintf("%s-%d", l.idPrefix, number), tokenIDs: []uint32{}}
	l.requests = append(l.requests, r)
	l.byID[r.id] = r
	return uint64(number), r.id
}

// live returns the ids of the requests that have not ended.
func (l *ledger) live() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var ids []string
	for _, r := range l.requests {
		if !r.ended {
			ids = append(ids, r.id)
		}
	}
	return ids
}

// take enters one message of the server. Answers to `cancel` are not looked at: the end of the request tells.
func (l *ledger) take(response *headracev1.StreamResultResponse) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, rejection := range response.GetRejections() {
		l.takeRejection(rejection)
	}
	for _, event := range response.GetEvents() {
		l.takeEvent(event)
	}
}

func (l *ledger) takeRejection(rejection *headracev1.CommandRejection) {
	number := rejection.GetCommandId()
	if number < 1 || number > uint64(len(l.requests)) {
		l.fault("a command was refused: %s", describeStatus(rejection.GetStatus()))
		return
	}
	r := l.requests[number-1]
	if r.lastSeq > 0 || r.ended {
		l.fault("[%d] refused after it was accepted, or twice", r.number)
		return
	}
	r.failure = rejection.GetStatus()
	r.ended = true
	l.fault("[%d] refused: %s", r.number, describeStatus(r.failure))
}

func (l *ledger) takeEvent(event *headracev1.ResultEvent) {
	if accepted := event.GetAccepted(); accepted != nil {
		// The id is said once; the number stands in every event.
		if r, known := l.byID[accepted.GetRequestId()]; known {
			l.byNumber[event.GetRequestNumber()] = r
		}
	}
	r, known := l.byNumber[event.GetRequestNumber()]
	if !known {
		l.fault("an event of number %d, which is no request of this session", event.GetRequestNumber())
		return
	}
	switch seq := event.GetSeq(); {
	case r.ended:
		l.fault("[%d] event %d after its end", r.number, seq)
		return
	case seq <= r.lastSeq:
		l.fault("[%d] event %d came again", r.number, seq)
		return
	case seq > r.lastSeq+1:
		l.fault("[%d] event %d follows %d: some are missing", r.number, seq, r.lastSeq)
	}
	r.lastSeq = event.GetSeq()
	if choice := event.GetChoiceIndex(); choice != 0 {
		// Its tokens belong to another text, and its end is not the request's.
		l.fault("[%d] event %d is of choice %d, one choice was asked for", r.number, r.lastSeq, choice)
		return
	}

	switch kind := event.GetEvent().(type) {
	case *headracev1.ResultEvent_Delta:
		delta := kind.Delta
		r.tokenIDs = append(r.tokenIDs, delta.GetTokenIds()...)
		r.text.WriteString(delta.GetText())
		if delta.GetText() != "" {
			l.print("[%d] %s", r.number, quote(delta.GetText()))
		}
	case *headracev1.ResultEvent_Finished:
		r.finished = kind.Finished
		r.ended = true
		r.usage = kind.Finished.GetUsage()
		l.print("[%d] finished: %s (%d prompt tokens, %d of them cached; %d tokens)", r.number,
			reasonName(r.finished.GetReason()),
			r.usage.GetPromptTokens(), r.usage.GetCachedTokens(), r.usage.GetCompletionTokens())
	case *headracev1.ResultEvent_Failed:
		r.failure = kind.Failed.GetStatus()
		r.ended = true
		r.usage = kind.Failed.GetUsage()
		l.fault("[%d] failed: %s", r.number, describeStatus(r.failure))
	}
}

// close is called when the stream has ended. It checks that every request has, prints the JSON lines if they are
// wanted, and returns whether all went well.
func (l *ledger) close() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.requests {
		if !r.ended {
			l.fault("[%d] the stream ended before the request", r.number)
		}
	}
	if l.json {
		lines := json.NewEncoder(l.out)
		lines.SetEscapeHTML(false)
		for _, r := range l.requests {
			l.written(lines.Encode(r.line()))
		}
	}
	return l.faults == 0
}

// print writes a line of progress.
func (l *ledger) print(format string, arguments ...any) {
	if !l.json {
		_, err := fmt.Fprintf(l.out, format+"\n", arguments...)
		l.written(err)
	}
}

// written ends the program if something could not be written to its output: nobody would learn what follows.
func (l *ledger) written(err error) {
	if err != nil {
		fmt.Fprintln(l.err, "session: standard output:", err)
		os.Exit(1)
	}
}

// broken is fault for those who do not hold the lock.
func (l *ledger) broken(format string, arguments ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fault(format, arguments...)
}

// fault writes a line about what went wrong, and remembers that something did.
func (l *ledger) fault(format string, arguments ...any) {
	l.faults++
	fmt.Fprintf(l.err, format+"\n", arguments...)
}

// resultLine is a request's line with --json.
type resultLine struct {
	RequestID    string       `json:"request_id"`
	Text         string       `json:"text"`
	TokenIDs     []uint32     `json:"token_ids"`
	FinishReason *string      `json:"finish_reason"`
	Usage        *usageFields `json:"usage"`
	Error        *errorFields `json:"error,omitempty"`
}

type usageFields struct {
	PromptTokens     uint32 `json:"prompt_tokens"`
	CachedTokens     uint32 `json:"cached_tokens"`
	CompletionTokens uint32 `json:"completion_tokens"`
}

type errorFields struct {
	Code    string   `json:"code"`
	Message string   `json:"message"`
	Details []string `json:"details"`
}

func (r *request) line() resultLine {
	line := resultLine{RequestID: r.id, Text: r.text.String(), TokenIDs: r.tokenIDs}
	if r.finished != nil {
		reason := reasonName(r.finished.GetReason())
		line.FinishReason = &reason
	}
	if r.usage != nil {
		line.Usage = &usageFields{r.usage.GetPromptTokens(), r.usage.GetCachedTokens(), r.usage.GetCompletionTokens()}
	}
	if r.failure != nil {
		line.Error = &errorFields{codeName(r.failure), r.failure.GetMessage(), detailLines(r.failure)}
	}
	return line
}

// reasonName is a reason as the contract's prose calls it: LENGTH for FINISH_REASON_LENGTH, and a number for one that
// this program does not know.
func reasonName(reason headracev1.FinishReason) string {
	return strings.TrimPrefix(reason.String(), "FINISH_REASON_")
}

// quote keeps a piece of text on one line.
func quote(text string) string {
	var quoted strings.Builder
	encoder := json.NewEncoder(&quoted)
	encoder.SetEscapeHTML(false)
	if encoder.Encode(text) != nil {
		return text
	}
	return strings.TrimSuffix(quoted.String(), "\n")
}
