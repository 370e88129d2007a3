package headrace_test

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/durationpb"

	"headrace.dev/go/headrace"
	headracev1 "headrace.dev/go/headrace/v1"
)

const instance = "instance-1"

// A script is a server whose sessions a test writes itself.
type script struct {
	headracev1.UnimplementedGenerationServiceServer
	headracev1.UnimplementedModelServiceServer
	headracev1.UnimplementedControlServiceServer

	generate func(context.Context, *headracev1.GenerateRequest) (*headracev1.GenerateResponse, error)
	stream   func(*headracev1.GenerateStreamRequest, grpc.ServerStreamingServer[headracev1.GenerateStreamResponse]) error
	session  func(*conversation) error
	cancel   func(*headracev1.CancelRequest) *headracev1.CancelResponse
	list     func(*headracev1.ListAdaptersRequest) *headracev1.ListAdaptersResponse
	load     func(*headracev1.LoadAdapterRequest) (*headracev1.LoadAdapterResponse, error)
	unload   func(*headracev1.UnloadAdapterRequest) *headracev1.UnloadAdapterResponse

	mu       sync.Mutex
	sessions int
}

func (s *script) Generate(ctx context.Context, request *headracev1.GenerateRequest) (*headracev1.GenerateResponse, error) {
	return s.generate(ctx, request)
}

func (s *script) GenerateStream(
	request *headracev1.GenerateStreamRequest, stream grpc.ServerStreamingServer[headracev1.GenerateStreamResponse],
) error {
	return s.stream(request, stream)
}

func (s *script) Cancel(_ context.Context, request *headracev1.CancelRequest) (*headracev1.CancelResponse, error) {
	return s.cancel(request), nil
}

func (s *script) ListAdapters(_ context.Context, request *headracev1.ListAdaptersRequest) (*headracev1.ListAdaptersResponse, error) {
	return s.list(request), nil
}

func (s *script) LoadAdapter(_ context.Context, request *headracev1.LoadAdapterRequest) (*headracev1.LoadAdapterResponse, error) {
	return s.load(request)
}

func (s *script) UnloadAdapter(_ context.Context, request *headracev1.UnloadAdapterRequest) (*headracev1.UnloadAdapterResponse, error) {
	return s.unload(request), nil
}

func (s *script) StreamResult(
	stream grpc.BidiStreamingServer[headracev1.StreamResultRequest, headracev1.StreamResultResponse],
) error {
	s.mu.Lock()
	s.sessions++
	number := s.sessions
	s.mu.Unlock()
	return s.session(&conversation{stream: stream, number: number, seqs: make(map[uint32]uint64)})
}

// A conversation is one session, from the server's side. It is number 1, 2, … of its server.
type conversation struct {
	stream grpc.BidiStreamingServer[headracev1.StreamResultRequest, headracev1.StreamResultResponse]
	number int
	last   uint32
	seqs   map[uint32]uint64
}

var errHalfClosed = errors.New("the client half-closed")

// command is the client's next one.
func (c *conversation) command() (*headracev1.StreamResultRequest, error) {
	command, err := c.stream.Recv()
	if errors.Is(err, io.EOF) {
		return nil, errHalfClosed
	}
	return command, err
}

func (c *conversation) send(message *headracev1.StreamResultResponse) {
	message.InstanceId = instance
	_ = c.stream.Send(message)
}

func (c *conversation) event(number uint32, event *headracev1.ResultEvent) {
	c.seqs[number]++
	event.RequestNumber, event.Seq = number, c.seqs[number]
	c.send(&headracev1.StreamResultResponse{Events: []*headracev1.ResultEvent{event}})
}

func (c *conversation) accept(command *headracev1.StreamResultRequest) uint32 {
	c.last++
	c.event(c.last, &headracev1.ResultEvent{Event: &headracev1.ResultEvent_Accepted{Accepted: &headracev1.Accepted{
		RequestId: command.GetAdd().GetSpec().GetRequestId(), CommandId: command.GetCommandId(), N: 1,
	}}})
	return c.last
}

func (c *conversation) delta(number uint32, text string, ids ...uint32) {
	c.event(number, deltaEvent(text, ids...))
}

func deltaEvent(text string, ids ...uint32) *headracev1.ResultEvent {
	return &headracev1.ResultEvent{Event: &headracev1.ResultEvent_Delta{Delta: &headracev1.Delta{Text: text, TokenIds: ids}}}
}

func finishedEvent(reason headracev1.FinishReason) *headracev1.ResultEvent {
	return &headracev1.ResultEvent{Event: &headracev1.ResultEvent_Finished{Finished: &headracev1.Finished{
		Reason: reason, Usage: &headracev1.Usage{PromptTokens: 3, CompletionTokens: 2},
	}}}
}

func (c *conversation) finish(number uint32, reason headracev1.FinishReason) {
	c.event(number, finishedEvent(reason))
}

func (c *conversation) refuse(command *headracev1.StreamResultRequest, refusal *rpcstatus.Status) {
	c.send(&headracev1.StreamResultResponse{Rejections: []*headracev1.CommandRejection{{
		CommandId: command.GetCommandId(), RequestId: command.GetAdd().GetSpec().GetRequestId(), Status: refusal,
	}}})
}

// rest reads commands to the half-close.
func (c *conversation) rest() error {
	for {
		if _, err := c.command(); err != nil {
			if errors.Is(err, errHalfClosed) {
				return nil
			}
			return err
		}
	}
}

// full is a refusal for want of room.
func full(after time.Duration) *rpcstatus.Status {
	refusal, err := status.New(codes.ResourceExhausted, "the queue is full").WithDetails(
		&errdetails.ErrorInfo{Reason: "QUEUE_FULL", Domain: "headrace.dev", Metadata: map[string]string{"limit": "1"}},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(after)},
	)
	if err != nil {
		panic(err)
	}
	return refusal.Proto()
}

// serve starts a scripted server in this process, and returns a client of it. Both end with the test, which then checks
// that no goroutine is left.
func serve(t testing.TB, s *script, options ...headrace.Option) *headrace.Client {
	t.Helper()
	checkGoroutines(t)
	listener := bufconn.Listen(1 << 20)
	grpcServer := grpc.NewServer()
	headracev1.RegisterGenerationServiceServer(grpcServer, s)
	headracev1.RegisterModelServiceServer(grpcServer, s)
	headracev1.RegisterControlServiceServer(grpcServer, s)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = grpcServer.Serve(listener)
	}()
	dial := func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }
	options = append(options, headrace.WithDialOptions(grpc.WithContextDialer(dial)))
	client, err := headrace.NewClient("passthrough:///127.0.0.1:1", options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Error(err)
		}
		grpcServer.Stop()
		<-served
	})
	return client
}

// checkGoroutines has a test fail that leaves goroutines of this package or of gRPC's behind. What has been told to end
// may still be on its way out, so it looks again for a while.
func checkGoroutines(t testing.TB) {
	t.Helper()
	t.Cleanup(func() {
		var left string
		for range 200 {
			if left = ours(); left == "" {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Errorf("goroutines are left:\n%s", left)
	})
}

func ours() string {
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	var left []string
	for _, one := range strings.Split(string(stacks), "\n\n") {
		isTest := strings.Contains(one, "testing.tRunner") || strings.Contains(one, "testing.(*T)") ||
			strings.Contains(one, "testing.(*M)") || strings.Contains(one, "headrace_test.ours")
		if !isTest && (strings.Contains(one, "headrace.dev/go") || strings.Contains(one, "google.golang.org/grpc")) {
			left = append(left, one)
		}
	}
	return strings.Join(left, "\n\n")
}

func soon(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// openSession opens a session that the test's end closes.
func openSession(
	t *testing.T, ctx context.Context, client *headrace.Client, options *headrace.SessionOptions,
) *headrace.Session {
	t.Helper()
	session, err := client.Session(ctx, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { session.Close() })
	return session
}

func submit(t *testing.T, ctx context.Context, session *headrace.Session, request *headrace.Request) *headrace.Handle {
	t.Helper()
	h, err := session.Submit(ctx, request)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func text(t *testing.T, ctx context.Context, h *headrace.Handle) string {
	t.Helper()
	var found strings.Builder
	for chunk, err := range h.Chunks(ctx) {
		if err != nil {
			t.Fatal(err)
		}
		found.WriteString(chunk.Text)
	}
	return found.String()
}

func asError(t *testing.T, err error) *headrace.Error {
	t.Helper()
	var found *headrace.Error
	if !errors.As(err, &found) {
		t.Fatalf("%v is no *headrace.Error", err)
	}
	return found
}
