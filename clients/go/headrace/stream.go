package headrace

import (
	"context"
	"errors"
	"io"
	"iter"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/durationpb"

	headracev1 "headrace.dev/go/headrace/v1"
)

// A Stream is one request's output, as it comes. [Client.Stream] and [Client.Attach] make them. It has no goroutine: it
// is read where it is ranged over. Nothing runs before it is started, by Start or by the first read; then it must be
// read to its end, or closed.
type Stream struct {
	client *Client
	ctx    context.Context
	cancel context.CancelFunc
	id     string
	source source
	failed error // why it could not be begun

	reading sync.Mutex // held by who reads
	fold    *fold
	queue   []Chunk
	over    bool

	mu      sync.Mutex // guards what follows, and cancel
	closed  bool
	started bool
}

// A source gives a stream's events, message by message; io.EOF is its end.
type source interface {
	// next may forget what the fold has, as long as that has no output: the request is sent again.
	next(ctx context.Context, f *fold) ([]*headracev1.ResultEvent, error)
	// finish lets go of the source; inOrder: its request's end was told.
	finish(inOrder bool)
}

// Stream streams one request. It is sent with Start or the first read; the end of the context ends it.
//
//	stream := client.Stream(ctx, &headrace.Request{Text: "Once upon a time"})
//	for chunk, err := range stream.Chunks() {
//		if err != nil {
//			return err
//		}
//		fmt.Print(chunk.Text)
//	}
//	result, err := stream.Result()
func (c *Client) Stream(ctx context.Context, request *Request) *Stream { return c.stream(ctx, request) }

func (c *Client) stream(ctx context.Context, request *Request, capabilities ...string) *Stream {
	spec, err := request.build()
	if err != nil {
		return &Stream{client: c, cancel: func() {}, failed: err, fold: newFold("", 1, 1)}
	}
	message := &headracev1.GenerateStreamRequest{Spec: spec}
	message.RequiredCapabilities = requiredBy(message, capabilities...)
	return &Stream{
		client: c, ctx: ctx, cancel: func() {}, id: spec.GetRequestId(),
		fold:   newFold(spec.GetRequestId(), choicesOf(spec), 1),
		source: &rpcSource{client: c, message: message, tries: newAttempts(c.pool, keysOf(spec), c.settings.retries, false)},
	}
}

// RequestID is the request's id.
func (s *Stream) RequestID() string { return s.id }

// Accepted has the parameters in force; nil before the first chunk was read.
func (s *Stream) Accepted() *Accepted {
	s.reading.Lock()
	defer s.reading.Unlock()
	return s.fold.accepted
}

// Start sends the request and waits until the server has answered first. It need not be called: reading does it.
func (s *Stream) Start() error {
	s.reading.Lock()
	defer s.reading.Unlock()
	if len(s.queue) == 0 && s.fold.next == 1 {
		s.read()
	}
	if s.fold.err != nil {
		return s.fold.err
	}
	return s.failed
}

// Chunks gives the output as it comes, each chunk once. If the request fails, an error comes last, an [*Error] with the
// output in Partial. A loop that is left before the end closes the stream, which ends the request.
func (s *Stream) Chunks() iter.Seq2[Chunk, error] {
	return func(yield func(Chunk, error) bool) {
		for {
			chunk, found, err := s.next()
			if err != nil {
				yield(Chunk{}, err)
				return
			}
			if !found {
				return
			}
			if !yield(chunk, nil) {
				_ = s.Close()
				return
			}
		}
	}
}

// next is the next chunk; false: the stream has ended.
func (s *Stream) next() (chunk Chunk, found bool, err error) {
	s.reading.Lock()
	defer s.reading.Unlock()
	if s.failed != nil {
		return Chunk{}, false, s.failed
	}
	for len(s.queue) == 0 && s.read() {
	}
	if len(s.queue) > 0 {
		chunk = s.queue[0]
		s.queue = s.queue[1:]
		return chunk, true, nil
	}
	if s.fold.err != nil && !s.isClosed() {
		return Chunk{}, false, s.fold.err
	}
	return Chunk{}, false, nil
}

// Result reads to the end and returns the whole result; chunks that were not read stay to be read. After Close it is the
// output until then, with FinishUnknown where the end had not arrived.
func (s *Stream) Result() (*Result, error) {
	s.reading.Lock()
	defer s.reading.Unlock()
	if s.failed != nil {
		return nil, s.failed
	}
	for s.read() {
	}
	return s.fold.result()
}

// Cancel asks the server to end the request: the stream then ends with FinishCancelled and the output so far.
func (s *Stream) Cancel(ctx context.Context) error {
	if s.failed != nil {
		return s.failed
	}
	_, err := s.client.Cancel(ctx, s.id)
	return err
}

// Close stops reading, and ends the request if it has not ended. (An attached stream only stops reading.) It may be
// called at any time, and does nothing after the end.
func (s *Stream) Close() error {
	s.mu.Lock()
	s.closed = true
	cancel := s.cancel
	s.mu.Unlock()
	cancel() // who reads now lets go
	s.reading.Lock()
	defer s.reading.Unlock()
	if s.failed == nil {
		s.finish(s.fold.wasTold)
	}
	return nil
}

func (s *Stream) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// start makes the context of what the first read begins; false: the stream was closed.
func (s *Stream) start() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed && !s.started {
		s.started = true
		s.ctx, s.cancel = context.WithCancel(s.ctx)
	}
	return !s.closed
}

// read takes the next message; false: there is none.
func (s *Stream) read() bool {
	if s.over || s.failed != nil {
		return false
	}
	if !s.start() {
		s.finish(false)
		return false
	}
	events, err := s.source.next(s.ctx, s.fold)
	if err != nil {
		if !s.isClosed() {
			s.fail(err)
		}
		s.finish(s.fold.wasTold)
		return false
	}
	for _, event := range events {
		if chunk, hasOutput := s.fold.add(event); hasOutput {
			s.queue = append(s.queue, chunk)
		}
	}
	if s.fold.done {
		s.finish(s.fold.wasTold)
	}
	return true
}

func (s *Stream) fail(err error) {
	var known *Error
	switch {
	case s.fold.done:
	case errors.Is(err, io.EOF):
		s.fold.fail(newError(codes.Unavailable, nil, "the server ended the stream before the request"))
	case errors.As(err, &known):
		s.fold.fail(known)
	default:
		s.fold.fail(fromRPC(s.ctx, err, "", s.id))
	}
}

func (s *Stream) finish(inOrder bool) {
	if s.over {
		return
	}
	s.over = true
	s.source.finish(inOrder)
	s.cancel()
}

// An rpcSource reads a GenerateStream. As long as nothing was delivered, a stream to one of several servers that fails is
// begun again elsewhere.
type rpcSource struct {
	client  *Client
	message *headracev1.GenerateStreamRequest
	tries   *attempts
	at      *server
	stream  grpc.ServerStreamingClient[headracev1.GenerateStreamResponse]
}

func (r *rpcSource) next(ctx context.Context, f *fold) ([]*headracev1.ResultEvent, error) {
	for {
		if r.at == nil {
			at, err := r.tries.next(ctx)
			if err != nil {
				return nil, err
			}
			r.at = at
		}
		message, err := r.receive(ctx)
		if err == nil {
			f.instance = r.note(f.id, message.GetInstanceId(), f.instance)
			failure := failedUndelivered(f, message.GetEvents())
			if failure == nil || !r.client.pool.many {
				return message.GetEvents(), nil
			}
			err = failure
		}
		if errors.Is(err, io.EOF) || !r.client.pool.many || f.hasBegun || f.done || ctx.Err() != nil {
			return nil, r.told(ctx, err, f.id)
		}
		failure := r.told(ctx, err, f.id)
		at := r.at
		r.leave()
		if err := r.tries.failed(ctx, at, failure); err != nil {
			return nil, err
		}
		f.restart()
	}
}

// told is the error of a call. It may be of this package's own already, or io.EOF.
func (r *rpcSource) told(ctx context.Context, err error, id string) *Error {
	if errors.Is(err, io.EOF) {
		return newError(codes.Unavailable, nil, "the server ended the stream before the request")
	}
	failure := fromStream(ctx, err, r.at.address.target, id)
	if r.stream != nil {
		heedPushback(failure, r.stream.Trailer())
	}
	return failure
}

func (r *rpcSource) receive(ctx context.Context) (*headracev1.GenerateStreamResponse, error) {
	if r.stream == nil {
		stream, err := r.at.generation.GenerateStream(ctx, r.message)
		if err != nil {
			return nil, err
		}
		r.stream = stream
	}
	return r.stream.Recv()
}

// note remembers the instance that has the request, which the first message names.
func (r *rpcSource) note(id, instance, known string) string {
	if instance == "" {
		return known
	}
	p := r.client.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	r.at.instance = instance
	p.noteOwner(id, instance)
	p.budget.succeeded()
	return instance
}

func (r *rpcSource) finish(inOrder bool) {
	if r.stream != nil && inOrder {
		_, _ = r.stream.Recv() // the call ends normally: the server does not count it as lost
	}
	r.leave()
}

func (r *rpcSource) leave() {
	if r.at != nil {
		r.client.pool.mu.Lock()
		r.client.pool.over(r.at)
		r.client.pool.mu.Unlock()
	}
	r.at, r.stream = nil, nil
}

// failedUndelivered is the failure that events tell, if it is one of the server's and there is no output yet.
func failedUndelivered(f *fold, events []*headracev1.ResultEvent) *Error {
	for _, event := range events {
		if f.hasBegun || event.GetDelta() != nil {
			return nil
		}
		if failed := event.GetFailed(); failed != nil {
			if err := fromStatus(failed.GetStatus(), f.id); err.Code == codes.Unavailable {
				return err
			}
		}
	}
	return nil
}

// A polledSource reads a request that runs without a stream, by repeated GetResult calls.
type polledSource struct {
	client *Client
	done   bool
}

func (p *polledSource) next(ctx context.Context, f *fold) ([]*headracev1.ResultEvent, error) {
	for !p.done {
		answer, err := p.client.getResult(ctx, f, false, pollWait)
		if err != nil {
			return nil, err
		}
		p.done = answer.GetDone()
		if len(answer.GetEvents()) > 0 {
			return answer.GetEvents(), nil
		}
	}
	f.done = true
	return nil, io.EOF
}

func (p *polledSource) finish(bool) { p.done = true }

// pollWait is how long a GetResult waits: proxies cut quiet calls.
const pollWait = 30 * time.Second

// getResult reads the next events of a request, at the server that has it.
func (c *Client) getResult(ctx context.Context, f *fold, untilDone bool, atMost time.Duration) (*headracev1.GetResultResponse, error) {
	request := &headracev1.GetResultRequest{
		RequestId: f.id, FromSeq: f.next, UntilDone: untilDone, Wait: durationpb.New(max(atMost, 0)),
	}
	tries, err := c.ownerTries(ctx, f.id)
	if err != nil {
		return nil, err
	}
	if c.settings.callTimeout > 0 {
		bounded, cancel := context.WithTimeout(ctx, max(atMost, 0)+c.settings.callTimeout)
		defer cancel()
		ctx = bounded
	}
	for {
		at, err := tries.next()
		if err != nil {
			return nil, err
		}
		request.InstanceId = tries.owner
		var trailer metadata.MD
		answer, rpcErr := at.generation.GetResult(ctx, request, grpc.Trailer(&trailer))
		if rpcErr == nil {
			c.pool.mu.Lock()
			c.pool.noteOwner(f.id, answer.GetInstanceId())
			if answer.GetDone() {
				c.pool.endedAlone(f.id)
			}
			c.pool.mu.Unlock()
			f.instance = answer.GetInstanceId()
			return answer, nil
		}
		failure := fromRPC(ctx, rpcErr, at.address.target, f.id)
		heedPushback(failure, trailer)
		if err := tries.failed(ctx, at, failure); err != nil {
			return nil, err
		}
	}
}
