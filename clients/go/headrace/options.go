package headrace

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
)

// Version is this package's version; it is in the user agent.
const Version = "0.1.0"

// An Option sets up a [Client].
type Option func(*settings) error

type settings struct {
	tls             *tls.Config
	token           func() (string, error)
	mayLeakToken    bool
	metadata        []string
	retries         int
	callTimeout     time.Duration
	maxMessageBytes int
	keepalive       time.Duration
	dial            []grpc.DialOption
}

func defaults() *settings {
	return &settings{retries: 3, callTimeout: 30 * time.Second, maxMessageBytes: 16 << 20, keepalive: 45 * time.Second}
}

// WithTLS encrypts the connection. A nil config trusts the system's authorities. Without this option, and without
// [WithCAFile], connections are plaintext.
func WithTLS(config *tls.Config) Option {
	return func(s *settings) error {
		if config == nil {
			config = &tls.Config{MinVersion: tls.VersionTLS12}
		}
		before := s.tls
		s.tls = config.Clone()
		if before != nil && s.tls.RootCAs == nil {
			s.tls.RootCAs = before.RootCAs
		}
		if before != nil && s.tls.ServerName == "" {
			s.tls.ServerName = before.ServerName
		}
		return nil
	}
}

// WithCAFile encrypts the connection, and trusts the authorities in a PEM file instead of the system's.
func WithCAFile(path string) Option {
	return func(s *settings) error {
		pem, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("headrace: the authorities: %w", err)
		}
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(pem) {
			return fmt.Errorf("headrace: %s has no certificate in PEM form", path)
		}
		if s.tls == nil {
			s.tls = &tls.Config{MinVersion: tls.VersionTLS12}
		}
		s.tls.RootCAs = roots
		return nil
	}
}

// WithServerName is the name that the server's certificate has, if it is not that of the target. It needs TLS.
func WithServerName(name string) Option {
	return func(s *settings) error {
		if s.tls == nil {
			s.tls = &tls.Config{MinVersion: tls.VersionTLS12}
		}
		s.tls.ServerName = name
		return nil
	}
}

// WithToken sends a token with every call. Without TLS it is refused, unless all servers are on this machine.
func WithToken(token string) Option {
	return func(s *settings) error {
		s.token = func() (string, error) { return token, nil }
		return nil
	}
}

// WithTokenFile sends the token that a file has, without blanks around it. The file is read again when it has changed,
// so that a token can be replaced while the client is in use.
func WithTokenFile(path string) Option {
	return func(s *settings) error {
		file := &tokenFile{path: path}
		s.token = file.read
		_, err := file.read()
		return err
	}
}

// WithPlaintextToken lets the token travel to other machines in clear text.
func WithPlaintextToken() Option {
	return func(s *settings) error {
		s.mayLeakToken = true
		return nil
	}
}

// WithMetadata sends these pairs of keys and values with every call.
func WithMetadata(keysAndValues ...string) Option {
	return func(s *settings) error {
		if len(keysAndValues)%2 != 0 {
			return errors.New("headrace: WithMetadata takes pairs of keys and values")
		}
		s.metadata = append(s.metadata, keysAndValues...)
		return nil
	}
}

// WithRetries is how often a call that may be tried again without harm is tried again; default 3. That is a unary call
// that ended with UNAVAILABLE, or with RESOURCE_EXHAUSTED and advice when to come again; and, with several servers, a
// stream that has given nothing yet.
func WithRetries(times int) Option {
	return func(s *settings) error {
		if times < 0 {
			return fmt.Errorf("headrace: WithRetries(%d): it is at least 0", times)
		}
		s.retries = times
		return nil
	}
}

// WithCallTimeout is how long short calls may take: all but those that wait for output. Default 30 s; 0: no limit but
// the context's.
func WithCallTimeout(limit time.Duration) Option {
	return func(s *settings) error {
		s.callTimeout = limit
		return nil
	}
}

// WithMaxMessageBytes is the size of the largest message, both ways; default 16 MiB.
func WithMaxMessageBytes(size int) Option {
	return func(s *settings) error {
		s.maxMessageBytes = size
		return nil
	}
}

// WithKeepalive is how often a quiet connection is asked whether it is there; default 45 s. gRPC allows no less than
// 10 s. 0: never.
func WithKeepalive(every time.Duration) Option {
	return func(s *settings) error {
		s.keepalive = every
		return nil
	}
}

// WithDialOptions gives gRPC more options, such as interceptors, a stats handler or a dialer. They come after this
// package's own.
func WithDialOptions(options ...grpc.DialOption) Option {
	return func(s *settings) error {
		s.dial = append(s.dial, options...)
		return nil
	}
}

// dialOptions are those of the connection to one server.
func (s *settings) dialOptions(to address) []grpc.DialOption {
	transport := insecure.NewCredentials()
	if s.tls != nil {
		transport = credentials.NewTLS(s.tls)
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithUserAgent("headrace-go/" + Version),
		grpc.WithDisableRetry(), // here it is decided what is tried again
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"pick_first": {}}]}`),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(s.maxMessageBytes), grpc.MaxCallSendMsgSize(s.maxMessageBytes)),
		// A server that restarts is found again within seconds, not within gRPC's two minutes.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 200 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
			MinConnectTimeout: 5 * time.Second,
		}),
		grpc.WithChainUnaryInterceptor(s.unary),
		grpc.WithChainStreamInterceptor(s.stream),
	}
	if s.keepalive > 0 {
		options = append(options, grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: s.keepalive, Timeout: 20 * time.Second}))
	}
	if s.token != nil {
		options = append(options, grpc.WithPerRPCCredentials(bearer{s.token, s.tls != nil}))
	}
	if to.serverName != "" {
		options = append(options, grpc.WithAuthority(to.serverName))
	}
	return append(options, s.dial...)
}

// unary and stream add to every call what travels in its metadata.
func (s *settings) unary(
	ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	return invoke(s.outgoing(ctx), method, request, reply, conn, options...)
}

func (s *settings) stream(
	ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, open grpc.Streamer, options ...grpc.CallOption,
) (grpc.ClientStream, error) {
	return open(s.outgoing(ctx), desc, conn, method, options...)
}

func (s *settings) outgoing(ctx context.Context) context.Context {
	pairs := append(tracePairs(ctx), s.metadata...)
	if len(pairs) == 0 {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, pairs...)
}

// checkToken refuses a token that would travel in clear text.
func (s *settings) checkToken(places []place) error {
	if s.token == nil || s.tls != nil || s.mayLeakToken {
		return nil
	}
	for _, one := range places {
		if !one.isLocal() {
			return fmt.Errorf("headrace: the token would travel to %s in clear text: use WithTLS, "+
				"or WithPlaintextToken to accept that", one)
		}
	}
	return nil
}

// bearer sends a token with every call.
type bearer struct {
	token  func() (string, error)
	hasTLS bool
}

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	token, err := b.token()
	if err != nil {
		return nil, err
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials; checkToken has decided already.
func (b bearer) RequireTransportSecurity() bool { return b.hasTLS }

// A tokenFile reads a token again when its file has changed.
type tokenFile struct {
	path string

	mu      sync.Mutex
	token   string
	changed time.Time
	size    int64
}

func (f *tokenFile) read() (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	info, err := os.Stat(f.path)
	if err != nil {
		return "", fmt.Errorf("headrace: the token: %w", err)
	}
	if f.token != "" && info.ModTime().Equal(f.changed) && info.Size() == f.size {
		return f.token, nil
	}
	text, err := os.ReadFile(f.path)
	if err != nil {
		return "", fmt.Errorf("headrace: the token: %w", err)
	}
	token := strings.TrimSpace(string(text))
	if token == "" {
		return "", fmt.Errorf("headrace: the token: %s is empty", f.path)
	}
	f.token, f.changed, f.size = token, info.ModTime(), info.Size()
	return token, nil
}
