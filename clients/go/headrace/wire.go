package headrace

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	headracev1 "headrace.dev/go/headrace/v1"
)

// A wire is a session's stream to one server. Commands go into its outbox; one goroutine sends them, another receives.
// The session's lock guards all of it.
type wire struct {
	session *Session
	server  *server
	cancel  context.CancelFunc

	instance  string // the server's process, once it has answered
	lease     *time.Duration
	numbers   map[uint32]*Handle // the live requests, by their numbers
	commands  map[uint64]*Handle // those whose add or attach was not answered
	last      uint64             // the number of the last command
	open      uint64             // the number of the open command; 0: none was sent
	outbox    []*headracev1.StreamResultRequest
	wake      chan struct{} // has something in it when the sender is to look
	halfClose bool
	refused   *Error // why open was refused
}

// wireTo is the stream to a server. The session's lock is held.
func (s *Session) wireTo(at *server) *wire {
	if w, known := s.wires[at]; known {
		return w
	}
	ctx, cancel := context.WithCancel(s.context)
	w := &wire{
		session: s, server: at, cancel: cancel,
		numbers: make(map[uint32]*Handle), commands: make(map[uint64]*Handle), wake: make(chan struct{}, 1),
	}
	s.wires[at] = w
	open := &headracev1.OpenCommand{InitialCredit: uint32(s.options.InitialCredit)} //nolint:gosec // checked by its bound
	if s.options.Lease > 0 {
		open.Lease = durationpb.New(s.options.Lease)
	}
	if s.pool.many {
		open.LoadInterval = durationpb.New(loadInterval)
	}
	if open.GetLease() != nil || open.GetLoadInterval() != nil || open.GetInitialCredit() > 0 {
		w.open = w.send(&headracev1.StreamResultRequest{Command: &headracev1.StreamResultRequest_Open{Open: open}})
	}
	s.endOrphans(w)
	s.running.Go(func() { w.run(ctx) })
	return w
}

// send has a command sent, and returns its number. The session's lock is held.
func (w *wire) send(command *headracev1.StreamResultRequest) uint64 {
	w.last++
	command.CommandId = w.last
	command.RequiredCapabilities = requiredBy(command)
	w.outbox = append(w.outbox, command)
	w.flush()
	return w.last
}

func (w *wire) sendCancel(id, instance string) {
	w.send(&headracev1.StreamResultRequest{Command: &headracev1.StreamResultRequest_Cancel{
		Cancel: &headracev1.CancelCommand{RequestId: id, InstanceId: instance},
	}})
}

func (w *wire) flush() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

type resultStream interface {
	Send(*headracev1.StreamResultRequest) error
	Recv() (*headracev1.StreamResultResponse, error)
	CloseSend() error
	Context() context.Context
}

// run holds the stream from its opening to its end.
func (w *wire) run(ctx context.Context) {
	defer w.cancel()
	stream, err := w.server.generation.StreamResult(ctx)
	if err == nil {
		w.session.running.Go(func() { w.sendAll(stream) })
		err = w.receiveAll(stream)
	}
	var failure *Error
	switch {
	case w.refused != nil:
		failure = w.refused
	case !errors.Is(err, io.EOF):
		failure = fromStream(w.session.context, err, w.server.address.target, "")
	}
	w.cancel()
	w.session.lost(w, failure)
}

// sendAll sends what is in the outbox, until there is nothing more to say or the stream has ended.
func (w *wire) sendAll(stream resultStream) {
	for {
		w.session.mu.Lock()
		commands, halfClose := w.outbox, w.halfClose
		w.outbox = nil
		w.session.mu.Unlock()
		for _, command := range commands {
			if stream.Send(command) != nil {
				return // the receiver learns why
			}
		}
		if halfClose && len(commands) == 0 {
			_ = stream.CloseSend()
			return
		}
		if len(commands) > 0 {
			continue
		}
		select {
		case <-w.wake:
		case <-stream.Context().Done():
			return
		}
	}
}

func (w *wire) receiveAll(stream resultStream) error {
	for {
		message, err := stream.Recv()
		if err != nil {
			return err
		}
		if !w.receive(message) {
			w.cancel()
			return io.EOF
		}
	}
}

// receive takes one message; false: the stream is of no use.
func (w *wire) receive(message *headracev1.StreamResultResponse) bool {
	s := w.session
	s.mu.Lock()
	defer s.mu.Unlock()
	w.noteServer(message)
	if opened := message.GetOpened(); opened != nil {
		w.lease = optionalDuration(opened.GetLease())
	}
	for _, rejection := range message.GetRejections() {
		number := rejection.GetCommandId()
		if number != 0 && number == w.open {
			w.refused = fromStatus(rejection.GetStatus(), "")
			return false
		}
		if h := w.commands[number]; h != nil { // else of a cancel or a credit whose request has just ended
			s.refused(w, h, fromStatus(rejection.GetStatus(), h.id))
		}
	}
	for _, detached := range message.GetDetached() {
		if h := w.numbers[detached.GetRequestNumber()]; h != nil {
			s.fail(h, movedError(h.id))
		}
	}
	for _, attached := range message.GetAttached() {
		if h := w.commands[attached.GetCommandId()]; h != nil {
			w.number(h, attached.GetRequestNumber())
		}
	}
	for _, event := range message.GetEvents() {
		w.take(event)
	}
	return true
}

func (w *wire) noteServer(message *headracev1.StreamResultResponse) {
	if instance := message.GetInstanceId(); instance != "" {
		w.instance = instance
	} else if message.GetLoad() == nil {
		return
	}
	p := w.session.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if w.instance != "" {
		w.server.instance = w.instance
	}
	if load := message.GetLoad(); load != nil {
		w.server.takeLoad(load, time.Now())
	}
}

// number notes by which number the server calls a request; it is there.
func (w *wire) number(h *Handle, number uint32) {
	delete(w.commands, h.command)
	h.number = number
	w.numbers[number] = h
	if h.instance != w.instance {
		h.instance = w.instance
		w.session.pool.mu.Lock()
		w.session.pool.noteOwner(h.id, w.instance)
		w.session.pool.mu.Unlock()
	}
}

func (w *wire) take(event *headracev1.ResultEvent) {
	if accepted := event.GetAccepted(); accepted != nil {
		if h := w.session.live[accepted.GetRequestId()]; h != nil && h.wire == w && h.number == 0 {
			w.number(h, event.GetRequestNumber())
		}
	}
	h := w.numbers[event.GetRequestNumber()]
	if h == nil {
		return // of a request that failed here before its last events came
	}
	over, tokens := h.take(w, event)
	w.session.pay(h, w, tokens)
	if over {
		w.session.over(w, h, event.GetFailed() != nil)
	}
}

func movedError(id string) *Error {
	made := newError(codes.Aborted, ErrMoved, "the results of request %q moved to a stream that attached to it", id)
	made.Reason, made.RequestID = reasonMoved, id
	return made
}

// endOrphans cancels what runs at a server for nobody: its request has ended elsewhere. The session's lock is held.
func (s *Session) endOrphans(w *wire) {
	s.pool.mu.Lock()
	instance := w.server.instance
	s.pool.mu.Unlock()
	for id := range s.orphans[instance] {
		if s.live[id] == nil {
			delete(s.orphans[instance], id)
			w.sendCancel(id, instance)
		}
	}
}
