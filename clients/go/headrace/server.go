package headrace

import (
	"time"

	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	headracev1 "headrace.dev/go/headrace/v1"
)

type serverState int

const (
	joining serverState = iota // not known to be ready: asked until it is
	ready
	leaving // listed no longer: what runs there goes on
)

const (
	resolveEvery  = 3 * time.Second
	resolvePause  = 500 * time.Millisecond // between two look-ups, after failures
	checkTimeout  = 2 * time.Second        // of a question for a server's health, and the longest pause between two
	firstCheck    = 100 * time.Millisecond
	together      = 100 * time.Millisecond // how long a server that is ready waits for the others that were asked
	patience      = 5 * time.Second        // how long a request waits for a server to be ready
	loadInterval  = time.Second
	loadHolds     = 5 * time.Second
	twinPause     = 10 * time.Second
	leftFor       = 60 * time.Second
	aloneFor      = 60 * time.Second
	mostOwners    = 65_536
	budgetTokens  = 100.0
	budgetSuccess = 0.1
)

// A server is one server, as the client knows it. The pool's lock guards what changes.
type server struct {
	address    address
	conn       *grpc.ClientConn
	generation headracev1.GenerationServiceClient
	models     headracev1.ModelServiceClient
	control    headracev1.ControlServiceClient
	health     healthpb.HealthClient

	state       serverState
	instance    string // its process; empty: not known
	capacity    int    // how many requests it runs at a time
	outstanding int    // how many requests of this client it has
	fullUntil   time.Time
	checkAt     time.Time
	usedAt      time.Time
	turn        int
	problem     *Error // why it is not ready
	isKnown     bool   // whether it has answered for its health, or failed to
	isAsked     bool   // whether a question for its health is on its way
	checks      int
	others      int // the load that is not this client's
	othersUntil time.Time
}

// name is what all clients know it by; its address, as long as its instance is not known.
func (s *server) name() string {
	if s.instance != "" {
		return s.instance
	}
	return s.address.target
}

func (s *server) takeLoad(told *headracev1.ServerLoad, now time.Time) {
	s.others = max(int(told.GetRunning())+int(told.GetWaiting())-s.outstanding, 0)
	s.othersUntil = now.Add(loadHolds)
}

func (s *server) load(now time.Time) int {
	if now.Before(s.othersUntil) {
		return s.outstanding + s.others
	}
	return s.outstanding
}

// waitsForCheck tells whether it is to be asked for its health, at checkAt.
func (s *server) waitsForCheck() bool { return s.state == joining && !s.isAsked }

// waitForCheck puts off the next question for its health: 0.1 s, then twice as long each time.
func (s *server) waitForCheck(now time.Time) {
	s.checkAt = now.Add(min(firstCheck<<s.checks, checkTimeout))
	s.checks = min(s.checks+1, 10)
}

// A budget tells whether what failed may be sent again at once: a failure takes a token of a bucket, a success gives
// back a tenth of one, and while it is at most half full nothing may.
type budget struct{ tokens float64 }

func (b *budget) failed() bool {
	b.tokens = max(b.tokens-1, 0)
	return b.tokens > budgetTokens/2
}

func (b *budget) succeeded() { b.tokens = min(b.tokens+budgetSuccess, budgetTokens) }
