package headrace

import (
	"context"
	"iter"
)

const (
	defaultInFlight = 64
	orderedAhead    = 16 // how many windows of outcomes may wait for an earlier one
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
// If the loop over the outcomes is left, or the context ends, what runs is cancelled; a requests iterator that waits then
// is left when it gives its next request.
func (c *Client) Batch(ctx context.Context, requests iter.Seq[*Request], options *BatchOptions) iter.Seq[Outcome] {
	return func(yield func(Outcome) bool) {
		b := &batch{window: defaultInFlight, ended: make(chan batchEnd), stopped: make(chan struct{})}
		if options != nil {
			b.ordered = options.Ordered
			if options.MaxInFlight > 0 {
				b.window = options.MaxInFlight
			}
		}
		b.slots = make(chan struct{}, b.window)
		b.ahead = make(chan struct{}, b.window)
		if b.ordered {
			b.ahead = make(chan struct{}, orderedAhead*b.window)
		}
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
	ended   chan batchEnd
	stopped chan struct{} // closed when nobody takes outcomes any more
}

// A batchEnd is an outcome, or, at the end of the requests, how many there were.
type batchEnd struct {
	outcome Outcome
	total   int // -1: this is an outcome
}

func (b *batch) feed(ctx context.Context, requests iter.Seq[*Request]) {
	index := 0
	take := func(slots chan struct{}) bool {
		select {
		case slots <- struct{}{}:
			return true
		case <-b.stopped:
			return false
		}
	}
	if take(b.ahead) && take(b.slots) {
		for request := range requests {
			b.begin(ctx, index, request)
			index++
			if !take(b.ahead) || !take(b.slots) {
				return
			}
		}
	}
	b.tell(batchEnd{total: index})
}

func (b *batch) tell(one batchEnd) {
	select {
	case b.ended <- one:
	case <-b.stopped:
	}
}

// begin submits a request; its end is told, and gives its place back.
func (b *batch) begin(ctx context.Context, index int, request *Request) {
	spec, err := request.build()
	if err != nil {
		b.end(index, nil, err)
		return
	}
	h, err := b.session.submit(ctx, spec, func(h *Handle) {
		h.mu.Lock()
		result, err := h.fold.result()
		h.mu.Unlock()
		go b.end(index, result, err) // nobody may wait with the session's lock held
	})
	if err != nil {
		b.end(index, nil, err)
		return
	}
	h.dropChunks()
}

func (b *batch) end(index int, result *Result, err error) {
	<-b.slots
	b.tell(batchEnd{Outcome{index, result, err}, -1})
}

// give gives outcomes until all were given, or nobody wants more.
func (b *batch) give(yield func(Outcome) bool) {
	given, total := 0, -1
	waiting := make(map[int]Outcome)
	next := 0
	for total < 0 || given < total {
		one := <-b.ended
		if one.total >= 0 {
			total = one.total
			continue
		}
		if !b.ordered {
			<-b.ahead
			given++
			if !yield(one.outcome) {
				return
			}
			continue
		}
		waiting[one.outcome.Index] = one.outcome
		for outcome, arrived := waiting[next]; arrived; outcome, arrived = waiting[next] {
			delete(waiting, next)
			next++
			<-b.ahead
			given++
			if !yield(outcome) {
				return
			}
		}
	}
}
