package headrace

import (
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"

	headracev1 "headrace.dev/go/headrace/v1"
)

// Where a session's requests go, and what becomes of them when their server refuses them or is lost: docs/clients.md and
// docs/fleet.md have the rules. The session's lock is held in all of these, but lost.

const (
	mostLosses      = 5  // how often a request is sent again because its server was lost or not ready
	mostBatchLosses = 11 // the same of a batch's, which has twelve tries
	firstReattach   = 100 * time.Millisecond
	longestReattach = time.Second
)

// mostTries is how often a refused or lost request is sent again.
func (s *Session) mostTries() int {
	if s.restarts {
		return mostBatchLosses
	}
	return mostLosses
}

// place sends a request to a server, or has it wait for one.
func (s *Session) place(h *Handle, avoid *server) {
	avoided := map[*server]bool{avoid: true}
	s.pool.mu.Lock()
	at := s.pool.choose(h.keys, avoided, h.lacking, false)
	in, anyReady := time.Duration(0), false
	if at == nil {
		in, anyReady = s.pool.roomIn(h.lacking)
		if anyReady && !h.giveUpAt.IsZero() && time.Now().Add(in).After(h.giveUpAt) {
			at = s.pool.choose(h.keys, avoided, h.lacking, true)
		}
	}
	if at != nil {
		s.pool.begun(at)
	}
	s.pool.mu.Unlock()
	switch {
	case at != nil:
		s.sendTo(at, h)
	case anyReady:
		s.wait(h, in)
	case !h.wantsServer:
		h.wantsServer = true
		s.laterFor(h, max(patience, time.Until(h.lostUntil)), func() {
			s.pool.mu.Lock()
			err := s.pool.nobody()
			s.pool.mu.Unlock()
			s.fail(h, err.copyFor(h.id))
		})
	}
}

func (s *Session) sendTo(at *server, h *Handle) {
	h.wire = s.wireTo(at)
	h.attaching, h.wantsServer, h.instance = false, false, ""
	h.turn++
	h.command = h.wire.send(&headracev1.StreamResultRequest{
		Command: &headracev1.StreamResultRequest_Add{Add: &headracev1.AddCommand{Spec: h.spec}},
	})
	h.wire.commands[h.command] = h
}

// attachAt continues a request at a server.
func (s *Session) attachAt(at *server, h *Handle) {
	s.pool.mu.Lock()
	s.pool.begun(at)
	s.pool.mu.Unlock()
	h.wire = s.wireTo(at)
	h.attaching = true
	h.turn++
	h.mu.Lock()
	next := h.fold.next
	h.mu.Unlock()
	h.command = h.wire.send(&headracev1.StreamResultRequest{
		Command: &headracev1.StreamResultRequest_Attach{Attach: &headracev1.AttachCommand{
			RequestId: h.id, FromSeq: next, InstanceId: h.instance,
		}},
	})
	h.wire.commands[h.command] = h
	if h.cancelled {
		h.wire.sendCancel(h.id, "")
	}
}

// wait places a request after a while.
func (s *Session) wait(h *Handle, pause time.Duration) {
	h.wantsServer = false
	s.laterFor(h, pause, func() { s.place(h, nil) })
}

// over ends a request whose end has arrived, unless its server failed before it had delivered anything.
func (s *Session) over(w *wire, h *Handle, wasTold bool) {
	h.mu.Lock()
	err, begun := h.fold.err, h.fold.hasBegun && !s.restarts
	h.mu.Unlock()
	s.pool.mu.Lock()
	if err == nil {
		s.pool.budget.succeeded()
	}
	s.pool.endedAlone(h.id)
	s.pool.mu.Unlock()
	if s.resumes && wasTold && err.Code == codes.Unavailable && h.spec != nil && !begun && !h.cancelled && h.losses < s.mostTries() {
		delete(w.numbers, h.number)
		s.leave(h)
		h.restart()
		s.sendAgain(h, w.server, err)
		return
	}
	if err != nil && !wasTold && h.spec != nil { // the contract was broken: do not let it run for nobody
		w.sendCancel(h.id, "")
	}
	s.forget(h)
	if h.losses > 0 {
		delete(s.orphans[w.instance], h.id)
		for _, other := range s.wires {
			s.endOrphans(other)
		}
	}
	h.close()
}

// refused decides what becomes of a request that a server refused.
func (s *Session) refused(w *wire, h *Handle, err *Error) {
	at := w.server
	s.leave(h)
	advice, hasAdvice := err.RetryAfter()
	switch {
	case h.attaching:
		s.notAttached(w, h, err)
	case h.cancelled && isWorthARetry(err):
		s.fail(h, newError(codes.Canceled, nil, "it was cancelled before a server had room"))
	case err.Code == codes.AlreadyExists && h.losses > 0: // it had arrived after all
		s.attachAt(at, h)
	case err.Code == codes.ResourceExhausted && hasAdvice && s.options.RoomTimeout >= 0:
		s.findRoom(at, h, err, advice)
	case err.Code == codes.Unavailable && (s.pool.many || s.restarts) && h.losses < s.mostTries():
		s.sendAgain(h, at, err)
	case err.Reason == reasonAdapterNotLoaded && !h.cancelled && s.mayHaveAdapter(at, h):
		s.place(h, nil)
	default:
		s.fail(h, err)
	}
}

// mayHaveAdapter notes that a server lacks a request's adapter, and tells whether there is another to ask.
func (s *Session) mayHaveAdapter(lacks *server, h *Handle) bool {
	if h.lacking == nil {
		h.lacking = make(map[*server]bool)
	}
	h.lacking[lacks] = true
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	_, another := s.pool.roomIn(h.lacking)
	return another
}

// findRoom sends a request elsewhere, or again when its server may have room.
func (s *Session) findRoom(at *server, h *Handle, err *Error, advice time.Duration) {
	if s.pool.many {
		s.pool.mu.Lock()
		s.pool.noteFailure(at, err)
		var other *server
		if s.pool.budget.failed() {
			other = s.pool.choose(h.keys, map[*server]bool{at: true}, h.lacking, false)
		}
		s.pool.mu.Unlock()
		if other != nil && other != at {
			s.place(h, at)
			return
		}
	}
	if !h.giveUpAt.IsZero() && time.Now().Add(advice).After(h.giveUpAt) {
		s.fail(h, err)
		return
	}
	s.wait(h, advice)
}

// lost takes a stream's end; nil: the server ended it in order.
func (s *Session) lost(w *wire, told *Error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.wires, w.server)
	var moved []*Handle
	for _, h := range s.live {
		if h.wire == w {
			moved = append(moved, h)
		}
	}
	err := told
	if err == nil {
		err = newError(codes.Unavailable, nil, "the server ended the session before its requests")
	}
	if s.context.Err() != nil { // this was no loss; the abort is on its way
		err = contextError(s.context, "")
	}
	lost := err.Code == codes.Unavailable && err.cause == nil && w.refused == nil
	if lost && !s.closing {
		s.pool.mu.Lock()
		s.pool.setAside(w.server, err)
		s.pool.mu.Unlock()
	}
	if s.ended == nil && (!s.resumes || w.refused != nil || s.context.Err() != nil) && (told != nil || !s.closing) {
		s.ended = err
	}
	for _, h := range moved {
		mayBeThere := h.number != 0 || !h.attaching && w.instance != ""
		delete(w.numbers, h.number)
		s.leave(h)
		if mayBeThere || h.lostUntil.IsZero() { // a new loss, with a lease of its own
			h.reattached = 0
			if until := w.leaseEnd(); until.After(h.lostUntil) {
				h.lostUntil = until
			}
		}
		if lost && s.resumes {
			s.move(w, h, err)
		} else {
			s.fail(h, err.copyFor(h.id))
		}
	}
	s.settle()
}

// move decides what becomes of a request whose stream was lost.
func (s *Session) move(w *wire, h *Handle, err *Error) {
	begun := h.hasBegun() && !s.restarts
	switch {
	case h.spec != nil && !begun && !h.cancelled && !s.pool.many && w.instance == "" && time.Now().Before(h.lostUntil):
		s.wait(h, h.nextPause()) // its only server was not reached, and may have it: that was no try
	case h.spec == nil || begun || h.losses >= s.mostTries():
		s.reattach(w, h, err)
	case h.cancelled:
		s.fail(h, newError(codes.Canceled, nil, "it was cancelled, and its server was lost"))
	default:
		if s.options.Lease > 0 && w.instance != "" { // it may run on there
			if s.orphans[w.instance] == nil {
				s.orphans[w.instance] = make(map[string]bool)
			}
			s.orphans[w.instance][h.id] = true
		}
		h.restart()
		s.sendAgain(h, w.server, err)
	}
}

// sendAgain sends a request once more: elsewhere at once, if the budget allows it, else after a pause.
func (s *Session) sendAgain(h *Handle, avoid *server, err *Error) {
	h.losses++
	s.pool.mu.Lock()
	s.pool.setAside(avoid, err)
	mayNow := s.pool.budget.failed() && s.pool.many
	s.pool.mu.Unlock()
	if mayNow {
		s.place(h, avoid)
		return
	}
	pause := time.Second
	if advised, told := err.RetryAfter(); told {
		s.wait(h, advised)
		return
	}
	if !s.pool.many {
		pause = pauseAfter(h.losses - 1)
	}
	s.wait(h, time.Duration(float64(pause)*(0.5+rand.Float64())))
}

// reattach attaches a request again where it lives, until its lease has passed.
func (s *Session) reattach(w *wire, h *Handle, err *Error) {
	pause := h.nextPause()
	if h.instance == "" || time.Now().Add(pause).After(h.lostUntil) {
		s.fail(h, err.copyFor(h.id))
		return
	}
	s.laterFor(h, pause, func() { s.attachAt(w.server, h) })
}

// nextPause is how long to wait before the server that was lost is tried again: 0.1 s, 0.2 s, … 1 s.
func (h *Handle) nextPause() time.Duration {
	pause := longestReattach
	if h.reattached < 4 {
		pause = min(firstReattach<<h.reattached, longestReattach)
	}
	h.reattached++
	return pause
}

// leaseEnd is until when a server may have what was lost with this stream.
func (w *wire) leaseEnd() time.Time {
	if w.lease == nil {
		return time.Now()
	}
	return time.Now().Add(*w.lease)
}

// notAttached decides what becomes of a request that a server did not attach.
func (s *Session) notAttached(w *wire, h *Handle, err *Error) {
	if h.asked == nil {
		h.asked = make(map[*server]bool)
	}
	if s.pool.many && h.spec == nil && h.instance == "" && err.Code == codes.NotFound {
		h.asked[w.server] = true
		s.askNext(h, err)
		return
	}
	if err.Reason == reasonWrongInstance && !h.asked[w.server] {
		h.asked[w.server] = true
		s.pool.mu.Lock()
		w.server.instance = err.Metadata["instance_id"]
		found := s.pool.byInstance(h.instance)
		s.pool.mu.Unlock()
		if len(found) > 0 && len(h.asked) == 1 { // followed once
			s.attachAt(found[0], h)
			return
		}
	}
	switch {
	case h.spec != nil && err.Code == codes.NotFound && !h.hasBegun() && h.losses < s.mostTries():
		h.restart()
		s.sendAgain(h, w.server, err)
	case h.spec != nil && err.Code == codes.NotFound:
		s.fail(h, newError(codes.Unavailable, nil, "the server that had the request was lost, and it with it"))
	default:
		s.fail(h, err)
	}
}

// askNext attaches a request at the next server that may have it.
func (s *Session) askNext(h *Handle, err *Error) {
	s.pool.mu.Lock()
	var next *server
	for _, one := range s.pool.reachable() {
		if !h.asked[one] && next == nil {
			next = one
		}
	}
	settled := s.pool.isSettled()
	s.pool.mu.Unlock()
	switch {
	case next != nil:
		s.attachAt(next, h)
	case settled || time.Now().After(h.askUntil):
		s.fail(h, err.copyFor(h.id))
	default:
		s.laterFor(h, firstReattach, func() { s.askNext(h, err) })
	}
}
