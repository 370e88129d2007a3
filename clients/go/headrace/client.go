package headrace

import (
	"cmp"
	"context"
	"os"
	"sync"

	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	headracev1 "headrace.dev/go/headrace/v1"
)

// DefaultTarget is the server of a client whose target is empty, if the variable HEADRACE_TARGET is not set.
const DefaultTarget = "127.0.0.1:50051"

// A Client calls one server, or chooses among several. One client for a process is enough: it has one connection for
// each server. Close it in the end.
type Client struct {
	settings *settings
	pool     *pool

	mu       sync.Mutex
	sessions map[*Session]struct{}
	closed   bool
}

// NewClient makes a client. It does not wait for a connection.
//
// The target is host:port, unix:/path or a path; or dns:///name:port, each of whose addresses is a server; or several of
// these with commas between them. A missing port is 50051. Empty: the variable HEADRACE_TARGET, else [DefaultTarget]. With several servers the client chooses one for each request;
// docs/fleet.md tells how.
func NewClient(target string, options ...Option) (*Client, error) {
	s := defaults()
	for _, option := range options {
		if err := option(s); err != nil {
			return nil, err
		}
	}
	target = cmp.Or(target, os.Getenv("HEADRACE_TARGET"), DefaultTarget)
	places, err := parseTarget(target)
	if err != nil {
		return nil, err
	}
	if err := s.checkToken(places); err != nil {
		return nil, err
	}
	dial := func(to address) (*server, error) {
		conn, err := grpc.NewClient(to.dialTarget(), s.dialOptions(to)...)
		if err != nil {
			return nil, err
		}
		return &server{
			address:    to,
			conn:       conn,
			generation: headracev1.NewGenerationServiceClient(conn),
			models:     headracev1.NewModelServiceClient(conn),
			control:    headracev1.NewControlServiceClient(conn),
			health:     healthpb.NewHealthClient(conn),
		}, nil
	}
	servers, err := newPool(places, dial)
	if err != nil {
		return nil, err
	}
	return &Client{settings: s, pool: servers, sessions: make(map[*Session]struct{})}, nil
}

// Close ends all connections and what runs on them: sessions and calls that are open fail with ErrClosed or a status of
// gRPC's. When it returns, nothing of the client is left.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	sessions := make([]*Session, 0, len(c.sessions))
	for session := range c.sessions {
		sessions = append(sessions, session)
	}
	c.mu.Unlock()
	for _, session := range sessions {
		session.abort(closedError("the client"))
	}
	c.pool.close()
	return nil
}

// Generate runs one request and returns its whole result. The end of the context ends the request.
func (c *Client) Generate(ctx context.Context, request *Request) (*Result, error) {
	spec, err := request.build()
	if err != nil {
		return nil, err
	}
	message := &headracev1.GenerateRequest{Spec: spec}
	message.RequiredCapabilities = requiredBy(message)
	answer, err := start(ctx, c, spec, call[*headracev1.GenerateResponse]{
		send: func(ctx context.Context, at *server, options ...grpc.CallOption) (*headracev1.GenerateResponse, error) {
			return at.generation.Generate(ctx, message, options...)
		},
	})
	if err != nil {
		return nil, err
	}
	return resultFrom(answer), nil
}
