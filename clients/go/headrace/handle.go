package headrace

import (
	"context"
	"iter"
	"sync"
	"time"

	headracev1 "headrace.dev/go/headrace/v1"
)

// A Handle is one request of a session.
type Handle struct {
	session *Session
	id      string
	ended   chan struct{} // closed at the end
	wake    chan struct{} // has something in it when the reader is to look
	onEnd   func(*Handle) // called at the end, with the session's lock held

	// The session's lock guards these.
	spec        *headracev1.GenerationSpec // what to send; nil: another stream started it
	keys        *prefixKeys
	wire        *wire  // where it is; nil: it waits, or has ended
	number      uint32 // by which its events there name it; 0: not known yet
	command     uint64 // the number of the command that brought it there
	attaching   bool   // whether it was attached there, not added
	unlimited   bool   // whether everything that arrives is paid for at once
	cancelled   bool
	wantsServer bool      // whether it waits for a server to be ready
	giveUpAt    time.Time // until when it is sent again for want of room; zero: no bound
	instance    string    // the process that has it
	losses      int       // how often it was sent again
	reattached  int
	lostUntil   time.Time // until when the server that it was lost with may have it: how long its lease is
	asked       map[*server]bool
	lacking     map[*server]bool // those that have said that they lack its adapter
	askUntil    time.Time
	turn        int // grows when it is sent or begins to wait: what was to be done before is void
	unwatch     func() bool

	mu      sync.Mutex
	fold    *fold
	chunks  []queued // the output, all of it: who resumes the request elsewhere wants it from its beginning
	read    int      // how many of them the reader has taken
	discard bool     // whether nobody will read it
	closed  bool
}

// A queued chunk has arrived by a stream, which is paid for it when it is read.
type queued struct {
	chunk Chunk
	wire  *wire
}

func newHandle(s *Session, f *fold) *Handle {
	return &Handle{session: s, id: f.id, fold: f, ended: make(chan struct{}), wake: make(chan struct{}, 1)}
}

// RequestID is the request's id.
func (h *Handle) RequestID() string { return h.id }

// Done is closed when the request has ended.
func (h *Handle) Done() <-chan struct{} { return h.ended }

// NextSeq is the number of the event that comes next: from where [Session.Attach] would continue.
func (h *Handle) NextSeq() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.fold.next
}

// Accepted has the parameters in force; nil before the server has accepted the request.
func (h *Handle) Accepted() *Accepted {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.fold.accepted
}

// Cancel asks for the request's end. It does not wait for it: the handle then ends with FinishCancelled and the output
// so far. It does nothing if the request has ended.
func (h *Handle) Cancel() {
	h.session.mu.Lock()
	defer h.session.mu.Unlock()
	h.session.cancelLive(h)
}

// Chunks gives the output as it comes, each chunk once: a loop that was left goes on with another call. It ends with the
// request; if that failed, an error comes last, an [*Error] with the output in Partial. The context ends the wait alone,
// not the request.
//
// One goroutine at a time may range over it.
func (h *Handle) Chunks(ctx context.Context) iter.Seq2[Chunk, error] {
	return func(yield func(Chunk, error) bool) {
		for {
			next, found, err := h.next()
			switch {
			case found:
				h.pay(next)
				if !yield(next.chunk, nil) {
					return
				}
				continue
			case err != nil:
				yield(Chunk{}, err)
				return
			}
			select {
			case <-h.wake:
			case <-h.ended:
				if h.isOver() {
					return
				}
			case <-ctx.Done():
				yield(Chunk{}, contextError(ctx, h.id))
				return
			}
		}
	}
}

// next takes the next chunk; the error is the end's.
func (h *Handle) next() (one queued, found bool, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.read < len(h.chunks) {
		h.read++
		return h.chunks[h.read-1], true, nil
	}
	if h.closed && h.fold.err != nil {
		return queued{}, false, h.fold.err
	}
	return queued{}, false, nil
}

func (h *Handle) isOver() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.read == len(h.chunks) && h.fold.err == nil
}

// Result waits for the end and returns the whole result. A cancelled request has one too. It needs no reader of chunks.
// The context ends the wait alone, not the request.
func (h *Handle) Result(ctx context.Context) (*Result, error) {
	h.session.mu.Lock()
	h.session.payAll(h)
	h.session.mu.Unlock()
	select {
	case <-h.ended:
	case <-ctx.Done():
		return nil, contextError(ctx, h.id)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.fold.result()
}

// pay lets the server send more for what the reader has taken.
func (h *Handle) pay(read queued) {
	if read.wire == nil {
		return // it is paid for
	}
	h.session.mu.Lock()
	defer h.session.mu.Unlock()
	h.session.pay(h, read.wire, len(read.chunk.TokenIDs))
}

// takeOwed counts the tokens that a stream has sent and nobody has paid for; they count as paid from now on. The
// handle's lock is held.
func (h *Handle) takeOwed() (tokens int) {
	for i := h.read; i < len(h.chunks); i++ {
		if one := &h.chunks[i]; one.wire != nil && one.wire == h.wire {
			tokens += len(one.chunk.TokenIDs)
			one.wire = nil
		}
	}
	return tokens
}

// take adds an event. It tells whether the request has ended, and how many tokens are to be paid for at once. The
// session's lock is held.
func (h *Handle) take(w *wire, event *headracev1.ResultEvent) (over bool, tokens int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fold.instance = w.instance
	chunk, hasOutput := h.fold.add(event)
	if hasOutput {
		one := queued{chunk: chunk}
		switch {
		case h.session.options.InitialCredit == 0:
		case h.unlimited:
			tokens = len(chunk.TokenIDs)
		default:
			one.wire = w
		}
		if !h.discard {
			h.chunks = append(h.chunks, one)
			h.signal()
		}
	}
	return h.fold.done, tokens
}

func (h *Handle) signal() {
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// close tells the readers of the end. The session's lock is held, or nobody else has the handle yet.
func (h *Handle) close() {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return
	}
	h.closed = true
	h.mu.Unlock()
	if h.unwatch != nil {
		h.unwatch()
	}
	close(h.ended)
	if h.onEnd != nil {
		h.onEnd(h)
	}
}

// restart forgets all output: the request is sent again. The session's lock is held.
func (h *Handle) restart() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fold.restart()
	h.chunks, h.read = nil, 0
}

// hasBegun tells whether output has arrived. The session's lock is held.
func (h *Handle) hasBegun() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.fold.hasBegun
}

// dropChunks has output not kept for a reader: there is none.
func (h *Handle) dropChunks() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.discard, h.chunks = true, nil
}
