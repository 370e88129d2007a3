package headrace_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"

	"headrace.dev/go/headrace"
	headracev1 "headrace.dev/go/headrace/v1"
)

// A named server tells its name, and serves over real sockets.
type named struct {
	script
	name string

	mu   sync.Mutex
	seen []metadata.MD
}

func (n *named) GetModel(context.Context, *headracev1.GetModelRequest) (*headracev1.GetModelResponse, error) {
	return &headracev1.GetModelResponse{Model: &headracev1.ModelCard{
		Name: "m", InstanceId: n.name, Limits: &headracev1.Limits{MaxRunningRequests: 4},
	}}, nil
}

func listen(t *testing.T, network, at, name string, options ...grpc.ServerOption) (*named, net.Addr) {
	t.Helper()
	listener, err := net.Listen(network, at)
	if err != nil {
		t.Fatal(err)
	}
	n := &named{name: name}
	n.generate = func(ctx context.Context, request *headracev1.GenerateRequest) (*headracev1.GenerateResponse, error) {
		received, _ := metadata.FromIncomingContext(ctx)
		n.mu.Lock()
		n.seen = append(n.seen, received)
		n.mu.Unlock()
		answer := generated(request, name)
		answer.InstanceId = name
		return answer, nil
	}
	server := grpc.NewServer(options...)
	headracev1.RegisterGenerationServiceServer(server, n)
	headracev1.RegisterModelServiceServer(server, n)
	checks := health.NewServer()
	checks.SetServingStatus("headrace.v1.GenerationService", healthpb.HealthCheckResponse_SERVING)
	healthpb.RegisterHealthServer(server, checks)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(listener)
	}()
	t.Cleanup(func() {
		server.Stop()
		<-served
	})
	return n, listener.Addr()
}

func open(t *testing.T, target string, options ...headrace.Option) *headrace.Client {
	t.Helper()
	client, err := headrace.NewClient(target, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Error(err)
		}
	})
	return client
}

func says(t *testing.T, client *headrace.Client) string {
	t.Helper()
	result, err := client.Generate(soon(t), &headrace.Request{Text: "x"})
	if err != nil {
		t.Fatal(err)
	}
	return result.Text()
}

func TestSockets(t *testing.T) {
	checkGoroutines(t)
	folder, err := os.MkdirTemp("", "headrace-") // short: a socket's path has at most 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	path := filepath.Join(folder, "s")
	listen(t, "unix", path, "unix")
	_, tcp := listen(t, "tcp", "127.0.0.1:0", "tcp")
	for target, want := range map[string]string{path: "unix", "unix:" + path: "unix", tcp.String(): "tcp"} {
		if got := says(t, open(t, target)); got != want {
			t.Errorf("%s: %s", target, got)
		}
	}
}

func TestANameIsAsManyServersAsItHasAddresses(t *testing.T) {
	checkGoroutines(t)
	n, at := listen(t, "tcp", "127.0.0.1:0", "a")
	_, port, err := net.SplitHostPort(at.String())
	if err != nil {
		t.Fatal(err)
	}
	client := open(t, "dns:///localhost:"+port)
	if got := says(t, client); got != "a" {
		t.Errorf("got %s", got)
	}
	if authority := n.seen[0].Get(":authority"); !slices.Equal(authority, []string{"localhost"}) {
		t.Errorf("asked for %v", authority)
	}
}

func TestRequestsSpreadOverServers(t *testing.T) {
	checkGoroutines(t)
	_, a := listen(t, "tcp", "127.0.0.1:0", "a")
	_, b := listen(t, "tcp", "127.0.0.1:0", "b")
	client := open(t, a.String()+","+b.String())
	if err := client.WaitReady(soon(t)); err != nil {
		t.Fatal(err)
	}
	var said []string
	for range 4 {
		said = append(said, says(t, client))
	}
	if got := strings.Join(said, ""); got != "abab" && got != "baba" {
		t.Errorf("they went to %s", got)
	}
}

func TestAServerThatIsGoneIsToldAfterAWhile(t *testing.T) {
	checkGoroutines(t)
	client := open(t, "unix:/nowhere/a,unix:/nowhere/b")
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := client.Generate(ctx, &headrace.Request{Text: "x"})
	if told := asError(t, err); told.Code != codes.Unavailable || !strings.Contains(told.Message, "none of 2 servers is ready") {
		t.Errorf("%v", err)
	}
}

func TestTLS(t *testing.T) {
	checkGoroutines(t)
	certificate, authority := selfSigned(t, "headrace.test")
	n, at := listen(t, "tcp", "127.0.0.1:0", "safe", grpc.Creds(credentials.NewServerTLSFromCert(&certificate)))
	client := open(t, at.String(), headrace.WithCAFile(authority), headrace.WithServerName("headrace.test"), headrace.WithToken("secret"))
	if got := says(t, client); got != "safe" {
		t.Errorf("got %s", got)
	}
	if token := n.seen[0].Get("authorization"); !slices.Equal(token, []string{"Bearer secret"}) {
		t.Errorf("got %v", token)
	}
	stranger := open(t, at.String(), headrace.WithTLS(nil), headrace.WithServerName("headrace.test"), headrace.WithRetries(0))
	if _, err := stranger.Generate(soon(t), &headrace.Request{Text: "x"}); asError(t, err).Code != codes.Unavailable {
		t.Errorf("got %v", err)
	}
}

func TestATokenDoesNotTravelInClearText(t *testing.T) {
	for target, refused := range map[string]bool{
		"example.com:1": true, "10.0.0.1": true, "localhost,example.com": true, "dns:///example.com": true,
		"localhost": false, "127.0.0.1:1": false, "unix:/x": false, "/x": false, "[::1]:1": false, "dns:///localhost": false,
	} {
		client, err := headrace.NewClient(target, headrace.WithToken("secret"))
		if (err != nil) != refused {
			t.Errorf("%s: %v", target, err)
		}
		if err == nil {
			_ = client.Close()
		}
	}
	client, err := headrace.NewClient("example.com:1", headrace.WithToken("secret"), headrace.WithPlaintextToken())
	if err != nil {
		t.Fatal(err)
	}
	_ = client.Close()
}

func TestATokenFileIsReadAgain(t *testing.T) {
	checkGoroutines(t)
	path := filepath.Join(t.TempDir(), "token")
	write := func(token string) {
		if err := os.WriteFile(path, []byte(token), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := headrace.NewClient("localhost", headrace.WithTokenFile(path)); err == nil {
		t.Error("a missing file was accepted")
	}
	write("first\n")
	n, at := listen(t, "tcp", "127.0.0.1:0", "a")
	client := open(t, at.String(), headrace.WithTokenFile(path))
	says(t, client)
	write("another one\n")
	says(t, client)
	for i, want := range []string{"Bearer first", "Bearer another one"} {
		if got := n.seen[i].Get("authorization"); !slices.Equal(got, []string{want}) {
			t.Errorf("got %v, want %s", got, want)
		}
	}
}

func TestOptionsThatAreWrong(t *testing.T) {
	for name, option := range map[string]headrace.Option{
		"retries":  headrace.WithRetries(-1),
		"metadata": headrace.WithMetadata("key"),
		"ca":       headrace.WithCAFile("/nowhere.pem"),
	} {
		if _, err := headrace.NewClient("", option); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
	client := open(t, "localhost")
	if _, err := client.Session(soon(t), &headrace.SessionOptions{Lease: -1}); asError(t, err).Code != codes.InvalidArgument {
		t.Errorf("got %v", err)
	}
}

// selfSigned makes a certificate, and writes it to a file, for who trusts it.
func selfSigned(t *testing.T, name string) (tls.Certificate, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(fmt.Errorf("the authority: %w", err))
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, path
}
