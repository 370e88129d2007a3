package headrace

import (
	"context"
	"sync"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	headracev1 "headrace.dev/go/headrace/v1"
)

// commandBytes is what a command has beside its request, with the names of the most capabilities that one may need.
const commandBytes = 4096

// closePatience is how long a close that cancels waits for the servers' answers.
const closePatience = 5 * time.Second

// SessionOptions set up a session. The zero value is a session without lease and credits.
type SessionOptions struct {
	// Lease is how long requests go on, and their results are kept, after the connection was lost; the server may grant
	// less. With a lease a lost session resumes by itself: what has output is attached again where it lives until the
	// lease has passed, what has none is sent again. 0: the requests of a lost session end with UNAVAILABLE.
	Lease time.Duration
	// InitialCredit is how many tokens of each request the server may send ahead of its reader; so a request that is
	// not read takes no more memory than that. 0: what is not read is kept here.
	InitialCredit int
	// RoomTimeout is for how long a request for which the server has no room is sent again, each time when the server
	// said that it may have some. 0: as long as it takes. Negative: the first refusal is the request's error.
	RoomTimeout time.Duration
}

// A Session carries many requests on one stream (one for each server, if there are several). It has two goroutines for
// each stream, and none for a request. A request that is not read delays no other.
//
// A session must be ended, by Finish or Close.
type Session struct {
	client   *Client
	pool     *pool
	options  SessionOptions
	context  context.Context
	cancel   context.CancelFunc
	unwatch  func() bool
	resumes  bool // whether a lost request goes on by itself
	restarts bool // whether nothing counts as delivered before a request's end

	running sync.WaitGroup // the goroutines of its streams

	mu      sync.Mutex
	live    map[string]*Handle // the requests that have not ended, by id
	wires   map[*server]*wire
	orphans map[string]map[string]bool // by instance: what was sent elsewhere since
	timers  map[*time.Timer]struct{}
	closing bool   // whether it takes no more requests
	ended   *Error // why it takes none, if it was lost or closed
	quiet   chan struct{}
	isQuiet bool
}

// Session opens a session; nil options are the defaults. It does not wait for the server: the stream opens with the
// first request.
//
// The context is the session's: when it ends, all streams are cut. The server takes that as a lost connection, so
// requests go on there for the lease; Close cancels them.
func (c *Client) Session(ctx context.Context, options *SessionOptions) (*Session, error) {
	return c.session(ctx, options, false)
}

func (c *Client) session(ctx context.Context, options *SessionOptions, restarts bool) (*Session, error) {
	s := &Session{
		client:   c,
		pool:     c.pool,
		restarts: restarts,
		live:     make(map[string]*Handle),
		wires:    make(map[*server]*wire),
		orphans:  make(map[string]map[string]bool),
		timers:   make(map[*time.Timer]struct{}),
		quiet:    make(chan struct{}),
	}
	if options != nil {
		s.options = *options
	}
	if s.options.Lease < 0 || s.options.InitialCredit < 0 {
		return nil, invalid("session", "its lease and its initial credit are at least 0")
	}
	s.resumes = s.options.Lease > 0 || c.pool.many
	s.context, s.cancel = context.WithCancel(ctx)

	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		s.cancel()
		return nil, closedError("the client")
	}
	c.sessions[s] = struct{}{}
	c.pool.mu.Lock()
	c.pool.listeners[s] = struct{}{}
	c.pool.mu.Unlock()
	s.mu.Lock() // an abort waits until it can be unwatched
	defer s.mu.Unlock()
	s.unwatch = context.AfterFunc(ctx, func() { s.abort(contextError(ctx, "")) })
	return s, nil
}

// Submit starts a request, and returns without waiting for the server. What the server refuses is told by the handle. An
// error here is of the request itself, or of the session: it was closed, or lost without a lease.
//
// The context is the request's: if it ends first, the request is cancelled, as by [Handle.Cancel].
func (s *Session) Submit(ctx context.Context, request *Request) (*Handle, error) {
	spec, err := request.build()
	if err != nil {
		return nil, err
	}
	return s.submit(ctx, spec, nil)
}

func (s *Session) submit(ctx context.Context, spec *headracev1.GenerationSpec, onEnd func(*Handle)) (*Handle, error) {
	label(ctx, spec)
	// gRPC would end the whole stream for it.
	if size, most := proto.Size(spec)+commandBytes, s.client.settings.maxMessageBytes; size > most {
		err := newError(codes.ResourceExhausted, nil, "the request takes %d bytes, and messages may have %d; see WithMaxMessageBytes", size, most)
		err.RequestID = spec.GetRequestId()
		return nil, err
	}
	h := newHandle(s, newFold(spec.GetRequestId(), choicesOf(spec), 1))
	h.onEnd = onEnd
	h.spec, h.keys = spec, keysOf(spec)
	if s.options.RoomTimeout > 0 {
		h.giveUpAt = time.Now().Add(s.options.RoomTimeout)
	}
	if err := s.register(ctx, h, func() { s.place(h, nil) }); err != nil {
		return nil, err
	}
	return h, nil
}

// AttachOptions say from where a request is continued.
type AttachOptions struct {
	// From is the number of the first event wanted. 0: the first. The handle has only what follows.
	From uint64
	// Choices is how many outputs the request has. It is needed if From is above 1: event 1 has it.
	Choices int
}

// Attach continues a request of another session, or of [Client.Add], on this one; nil options begin at the first event.
// The end of the context cancels the request, as with Submit.
func (s *Session) Attach(ctx context.Context, id string, options *AttachOptions) (*Handle, error) {
	var o AttachOptions
	if options != nil {
		o = *options
	}
	if o.From > 1 && o.Choices == 0 {
		return nil, invalid("choices", "are needed: event 1 tells them, which does not come again from there")
	}
	if !utf8.ValidString(id) {
		return nil, invalid("request_id", "is not UTF-8")
	}
	if o.Choices < 0 {
		return nil, invalid("choices", "a request has at least one")
	}
	return s.attach(ctx, newHandle(s, newFold(id, o.Choices, o.From)))
}

// Resume continues a request whose session was lost, on this one, where its handle left off. The new handle has all
// output from the beginning. If the end had arrived, it has that too, and nothing is sent.
func (s *Session) Resume(ctx context.Context, lost *Handle) (*Handle, error) {
	lost.mu.Lock()
	h := newHandle(s, lost.fold.reopened())
	for _, one := range lost.chunks {
		h.chunks = append(h.chunks, queued{chunk: one.chunk}) // the lost stream is not paid any more
	}
	lost.mu.Unlock()
	if h.fold.done {
		h.close()
		return h, nil
	}
	return s.attach(ctx, h)
}

func (s *Session) attach(ctx context.Context, h *Handle) (*Handle, error) {
	h.askUntil = time.Now().Add(patience)
	err := s.register(ctx, h, func() {
		s.pool.mu.Lock()
		h.instance = s.pool.owner(h.id)
		found := s.pool.byInstance(h.instance)
		if !s.pool.many {
			found = s.pool.servers
		}
		s.pool.mu.Unlock()
		if len(found) > 0 {
			s.attachAt(found[0], h)
			return
		}
		h.instance = ""
		s.askNext(h, newError(codes.NotFound, nil, "no server has request %q", h.id))
	})
	if err != nil {
		return nil, err
	}
	return h, nil
}

// register takes a request in and begins it.
func (s *Session) register(ctx context.Context, h *Handle, begin func()) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.ended != nil:
		return s.ended.copyFor(h.id)
	case s.closing:
		return closedError("the session")
	case s.live[h.id] != nil:
		made := newError(codes.AlreadyExists, nil, "a request %q is live on this session", h.id)
		made.RequestID = h.id
		return made
	}
	s.live[h.id] = h
	if ctx.Done() != nil {
		h.unwatch = context.AfterFunc(ctx, h.Cancel)
	}
	begin()
	return nil
}

// Live is how many requests have not ended.
func (s *Session) Live() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.live)
}

// Lease is the lease that the server granted; of several servers, the shortest. False: none has answered yet, or the
// session asked for none.
func (s *Session) Lease() (lease time.Duration, granted bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.wires {
		if w.lease != nil && (!granted || *w.lease < lease) {
			lease, granted = *w.lease, true
		}
	}
	return lease, granted
}

// Finish takes no more requests and waits until the live ones have ended; they need no reader for that. Then the session
// has ended. If the context ends first, its error is returned and the live requests go on: wait again, or Close.
func (s *Session) Finish(ctx context.Context) error {
	s.mu.Lock()
	s.closing = true
	for _, h := range s.live {
		s.payAll(h)
	}
	s.settle()
	s.mu.Unlock()
	select {
	case <-s.quiet:
	case <-ctx.Done():
		return contextError(ctx, "")
	}
	s.release()
	return nil
}

// Close cancels the live requests, waits for their ends, at most a few seconds, and ends the session. After Finish it
// does nothing.
func (s *Session) Close() error {
	s.mu.Lock()
	s.closing = true
	for _, h := range s.live {
		s.cancelLive(h)
	}
	s.settle()
	s.mu.Unlock()
	select {
	case <-s.quiet:
	case <-time.After(closePatience):
		s.abort(closedError("the session"))
	}
	s.release()
	return nil
}

// abort cuts all streams, and fails what is left.
func (s *Session) abort(err *Error) {
	s.mu.Lock()
	if s.isQuiet {
		s.mu.Unlock()
		return
	}
	s.closing, s.ended = true, err
	for _, h := range s.live {
		s.fail(h, err.copyFor(h.id))
	}
	s.stopTimers()
	s.cancel()
	s.settle()
	s.mu.Unlock()
	s.running.Wait()
	s.release()
}

// release lets go of what the session has of its client; nothing of it runs any more.
func (s *Session) release() {
	s.running.Wait()
	s.cancel()
	s.unwatch()
	s.mu.Lock()
	s.stopTimers()
	s.mu.Unlock()
	s.client.mu.Lock()
	delete(s.client.sessions, s)
	s.client.mu.Unlock()
	s.pool.mu.Lock()
	delete(s.pool.listeners, s)
	s.pool.mu.Unlock()
}

func (s *Session) stopTimers() {
	for timer := range s.timers {
		timer.Stop()
	}
	clear(s.timers)
}

// settle half-closes the streams once the session is being closed and no request is live, and notes when none is left.
// The lock is held. While a request is live, its credits or a cancel may still have to be sent.
func (s *Session) settle() {
	if !s.closing || len(s.live) > 0 {
		return
	}
	for _, w := range s.wires {
		w.halfClose = true
		w.flush()
	}
	if len(s.wires) == 0 && !s.isQuiet {
		s.isQuiet = true
		close(s.quiet)
	}
}

// later does something after a while, with the lock held, unless the session has been cut by then.
func (s *Session) later(after time.Duration, act func()) {
	var timer *time.Timer
	timer = time.AfterFunc(after, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if _, kept := s.timers[timer]; kept {
			delete(s.timers, timer)
			act()
			s.settle()
		}
	})
	s.timers[timer] = struct{}{}
}

// laterFor does something for a request after a while, if nothing else has come of it by then.
func (s *Session) laterFor(h *Handle, after time.Duration, act func()) {
	h.turn++
	turn := h.turn
	s.later(after, func() {
		if h.turn == turn && s.live[h.id] == h {
			act()
		}
	})
}

// serverChanged has requests that wait for a server look again.
func (s *Session) serverChanged() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range s.live {
		if h.wantsServer {
			s.place(h, nil)
		}
	}
}

// fail ends a request with an error that is not the server's end of it. The lock is held.
func (s *Session) fail(h *Handle, err *Error) {
	h.mu.Lock()
	h.fold.fail(err)
	h.mu.Unlock()
	s.forget(h)
	h.close()
}

// forget drops an ended request. The lock is held.
func (s *Session) forget(h *Handle) {
	if s.live[h.id] == h {
		delete(s.live, h.id)
	}
	if w := h.wire; w != nil {
		delete(w.numbers, h.number)
		s.leave(h)
	}
	s.settle()
}

// leave takes a request from its stream. The lock is held.
func (s *Session) leave(h *Handle) {
	w := h.wire
	delete(w.commands, h.command)
	h.wire, h.number = nil, 0
	s.pool.mu.Lock()
	s.pool.over(w.server)
	s.pool.mu.Unlock()
}

// cancelLive asks for a request's end; it ends with what it has. The lock is held.
func (s *Session) cancelLive(h *Handle) {
	if s.live[h.id] != h {
		return
	}
	h.cancelled = true
	if h.wire == nil {
		err := newError(codes.Canceled, nil, "it was cancelled while it waited to be sent again")
		s.fail(h, err)
		return
	}
	h.wire.sendCancel(h.id, "")
	s.payAll(h) // its end, too, comes behind its last token
}

// pay lets the server send as many more tokens as the reader took. The lock is held.
func (s *Session) pay(h *Handle, w *wire, tokens int) {
	if s.options.InitialCredit > 0 && tokens > 0 && h.wire == w && w != nil {
		w.send(&headracev1.StreamResultRequest{Command: &headracev1.StreamResultRequest_Credit{
			Credit: &headracev1.CreditCommand{RequestId: h.id, Tokens: uint32(tokens)}, //nolint:gosec // of one message
		}})
	}
}

// payAll pays for all that has arrived and will arrive. The lock is held.
func (s *Session) payAll(h *Handle) {
	if s.options.InitialCredit == 0 || h.unlimited {
		return
	}
	h.unlimited = true
	h.mu.Lock()
	owed := h.takeOwed()
	h.mu.Unlock()
	s.pay(h, h.wire, owed)
}
