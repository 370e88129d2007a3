package headrace

import (
	"context"
	"iter"
	"sync"
)

const (
	defaultInFlight = 64
	windowsAhead    = 16 // how many windows of outcomes may wait for who takes them, or for an earlier one
)

// BatchOptions set up a batch.
type BatchOptions struct {
	// MaxInFlight is how many requests are with the server at a time. 0: 64.
	MaxInFlight int
	// Ordered gives outcomes in the order of their requests, not of their ends.
	Ordered bool
}

// An Outcome is what came of one request of a batch.
type Outcome struct {
	// Index is the request's place in the batch, from 0.
	Index int
	// Result is its output. Nil: it failed.
	Result *Result
	// Err is why it failed, an [*Error].
	Err error
}

// Batch runs any number of requests, a bounded number at a time, on one session; nil options are the defaults. It gives
// one outcome for each request, as they end. A request that was lost before its end is begun again, if it may be.
//
// The requests are ranged over in a goroutine of their own, which asks for the next one only when there is room for it.
// If the loop over the outcomes is left, or the context ends, what runs is cancelled, and no more requests are taken; an
// iterator that waits then is left when it gives its next one. If the session cannot be opened, one outcome says so.
func (c *Client) Batch(ctx context.Context, requests iter.Seq[*Request], options *BatchOptions) iter.Seq[Outcome] {
	return func(yield func(Outcome) bool) {
		b := &batch{window: defaultInFlight, wake: make(chan struct{}, 1), stopped: make(chan struct{}), total: -1}
		if options != nil {
			b.ordered = options.Ordered
			if options.MaxInFlight > 0 {
				b.window = options.MaxInFlight
			}
		}
		b.slots = make(chan struct{}, b.window)
		b.ahead = make(chan struct{}, windowsAhead*b.window)
		session, err := c.session(ctx, &SessionOptions{}, true)
		if err != nil {
			yield(Outcome{Err: err})
			return
		}
		b.session = session
		defer session.Close()
		defer close(b.stopped)
		go b.feed(ctx, requests)
		b.give(yield)
	}
}

type batch struct {
	session *Session
	window  int
	ordered bool
	slots   chan struct{} // one for each request that is with the server
	ahead   chan struct{} // one for each request whose outcome was not given
	wake    chan struct{} // has something in it when there is something to give
	stopped chan struct{} // closed when nobody takes outcomes any more

	mu    sync.Mutex
	ended []Outcome // those that have not been taken
	total int       // how many requests there were; -1: not known yet
}

// feed submits requests as there is room for them.
func (b *batch) feed(ctx context.Context, requests iter.Seq[*Request]) {
	index := 0
	take := func(places chan struct{}) bool {
		select {
		case places <- struct{}{}:
			return true
		case <-b.stopped:
			return false
		}
	}
	if !take(b.ahead) || !take(b.slots) {
		return
	}
	for request := range requests {
		if ctx.Err() != nil {
			break
		}
		b.begin(ctx, index, request)
		index++
		if !take(b.ahead) || !take(b.slots) {
			return
		}
	}
	b.tell(func() { b.total = index })
}

func (b *batch) tell(note func()) {
	b.mu.Lock()
	note()
	b.mu.Unlock()
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// begin submits a request; its end is told, and gives its place back.
func (b *batch) begin(ctx context.Context, index int, request *Request) {
	end := func(result *Result, err error) {
		<-b.slots
		b.tell(func() { b.ended = append(b.ended, Outcome{index, result, err}) })
	}
	spec, err := request.build()
	if err != nil {
		end(nil, err)
		return
	}
	h, err := b.session.submit(ctx, spec, func(h *Handle) {
		h.mu.Lock()
		result, err := h.fold.result()
		h.mu.Unlock()
		end(result, err)
	})
	if err != nil {
		end(nil, err)
		return
	}
	h.dropChunks()
}

// give gives outcomes until all were given, or nobody wants more.
func (b *batch) give(yield func(Outcome) bool) {
	given := 0
	waiting := make(map[int]Outcome) // for an earlier one
	next := 0
	one := func(outcome Outcome) bool {
		<-b.ahead
		given++
		return yield(outcome)
	}
	for {
		b.mu.Lock()
		ended, total := b.ended, b.total
		b.ended = nil
		b.mu.Unlock()
		for _, outcome := range ended {
			if b.ordered {
				waiting[outcome.Index] = outcome
			} else if !one(outcome) {
				return
			}
		}
		for outcome, arrived := waiting[next]; arrived; outcome, arrived = waiting[next] {
			delete(waiting, next)
			next++
			if !one(outcome) {
				return
			}
		}
		if given == total {
			return
		}
		<-b.wake
	}
}
