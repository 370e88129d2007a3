package headrace

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	headracev1 "headrace.dev/go/headrace/v1"
)

const (
	firstPause   = 100 * time.Millisecond
	longestPause = 2 * time.Second
)

// isWorthARetry tells whether the same may succeed later, or elsewhere: the server was lost or is not ready, or it has no
// room and says when to come again.
func isWorthARetry(err *Error) bool {
	if err.cause != nil && !errors.Is(err, ErrMoved) {
		return false // the caller's context has ended, or the client was closed
	}
	if err.Code == codes.ResourceExhausted {
		_, told := err.RetryAfter()
		return told
	}
	return err.Code == codes.Unavailable
}

// pauseAfter is how long to wait after a failure without advice: 0.1 s, three times as long each time, at most 2 s.
func pauseAfter(times int) time.Duration {
	pause := firstPause
	for range times {
		pause = min(3*pause, longestPause)
	}
	return pause
}

// heedPushback puts gRPC's own advice in an error: so many milliseconds, or, if it is negative, not to come again.
func heedPushback(err *Error, trailer metadata.MD) {
	told := trailer.Get("grpc-retry-pushback-ms")
	if len(told) == 0 {
		return
	}
	millis, parseErr := strconv.ParseInt(told[0], 10, 32)
	if parseErr != nil || millis < 0 {
		err.neverAgain = true
		return
	}
	if advised := time.Duration(millis) * time.Millisecond; err.retryAfter == nil || *err.retryAfter < advised {
		err.retryAfter = &advised
	}
}

// attempts are the tries of a call that any server may answer.
type attempts struct {
	pool   *pool
	keys   *prefixKeys
	left   int
	sticks bool // a lost connection is no reason to go elsewhere at once: the server may have taken the request
	same   *server
	tried  map[*server]bool
	lacks  map[*server]bool // those that have said that they lack the request's adapter
	pauses int
	full   bool // it has waited for room once; now it may ask
	began  time.Time
}

func newAttempts(p *pool, keys *prefixKeys, retries int, sticks bool) *attempts {
	return &attempts{pool: p, keys: keys, left: retries, sticks: sticks, tried: make(map[*server]bool), lacks: make(map[*server]bool)}
}

// next is the server to call now, once there is one. The call counts as begun there.
func (a *attempts) next(ctx context.Context) (*server, error) {
	if a.began.IsZero() {
		a.began = time.Now()
	}
	for {
		a.pool.mu.Lock()
		one, pause, problem := a.look()
		if one != nil {
			a.pool.begun(one)
		}
		changed := a.pool.changed
		a.pool.mu.Unlock()
		if one != nil || problem != nil {
			return one, problem
		}
		if wait(ctx, changed, pause) != nil {
			return nil, contextError(ctx, "")
		}
	}
}

// look is the server to call now; or for how long to wait for a change; or why there is none. The lock is held.
func (a *attempts) look() (*server, time.Duration, error) {
	if a.pool.closed {
		return nil, 0, closedError("the client")
	}
	if a.same != nil {
		return a.same, 0, nil
	}
	if one := a.pool.choose(a.keys, a.tried, a.lacks, a.full); one != nil {
		return one, 0, nil
	}
	if in, anyReady := a.pool.roomIn(a.lacks); anyReady {
		a.full = true
		return nil, in, nil
	}
	left := patience - time.Since(a.began)
	if left <= 0 {
		return nil, 0, a.pool.nobody()
	}
	return nil, left, nil
}

// failed notes a failed try, and waits as long as the next one must. It returns the error if there is none.
func (a *attempts) failed(ctx context.Context, at *server, err *Error) error {
	a.pool.mu.Lock()
	pause, again := a.pause(at, err)
	a.pool.mu.Unlock()
	if !again {
		return err
	}
	if deadline, has := ctx.Deadline(); has && time.Now().Add(pause).After(deadline) {
		return err // it would not be tried again
	}
	if pause > 0 && wait(ctx, nil, pause) != nil {
		return contextError(ctx, err.RequestID)
	}
	return nil
}

func (a *attempts) pause(at *server, err *Error) (pause time.Duration, again bool) {
	if err.Reason == reasonAdapterNotLoaded { // each server is asked once: that is no retry
		a.same, a.lacks[at] = nil, true
		_, again = a.pool.roomIn(a.lacks)
		return 0, again
	}
	if !isWorthARetry(err) || err.neverAgain || a.left == 0 || a.pool.closed {
		if err.Code == codes.Unavailable {
			a.pool.setAside(at, err)
		}
		return 0, false
	}
	a.left--
	if !a.pool.many {
		return a.spread(err, rand.Float64()), true
	}
	mayNow := a.pool.budget.failed()
	if a.sticks && a.same == nil && err.Reason == "" {
		a.same = at
		if mayNow {
			return 0, true
		}
		return a.spread(err, 0.5+rand.Float64()), true
	}
	a.same = nil
	a.pool.noteFailure(at, err)
	a.tried[at] = true
	if other := a.pool.choose(a.keys, a.tried, a.lacks, false); mayNow && other != nil && !a.tried[other] {
		return 0, true
	}
	clear(a.tried)
	a.full = true
	return a.spread(err, 0.5+rand.Float64()), true
}

func (a *attempts) spread(err *Error, by float64) time.Duration {
	if advised, told := err.RetryAfter(); told {
		return advised
	}
	pause := pauseAfter(a.pauses)
	a.pauses++
	return time.Duration(float64(pause) * by)
}

// A call is a unary call: how it is sent to a server.
type call[A any] struct {
	send    func(ctx context.Context, at *server, options ...grpc.CallOption) (A, error)
	isShort bool // whether it may take no longer than the client's timeout for short calls
	sticks  bool
}

// start makes a unary call that starts a request.
func start[A interface{ GetInstanceId() string }](
	ctx context.Context, c *Client, spec *headracev1.GenerationSpec, one call[A],
) (A, error) {
	tries := newAttempts(c.pool, keysOf(spec), c.settings.retries, one.sticks)
	answer, at, err := one.run(ctx, c, tries, spec.GetRequestId())
	if err != nil {
		return answer, err
	}
	c.pool.mu.Lock()
	c.pool.noteOwner(spec.GetRequestId(), answer.GetInstanceId())
	if one.sticks {
		c.pool.runsAlone(spec.GetRequestId(), at)
	}
	c.pool.mu.Unlock()
	return answer, nil
}

// anywhere makes a unary call that any server may answer.
func anywhere[A any](ctx context.Context, c *Client, one call[A]) (A, error) {
	one.isShort = true
	answer, _, err := one.run(ctx, c, newAttempts(c.pool, nil, c.settings.retries, false), "")
	return answer, err
}

func (one call[A]) run(ctx context.Context, c *Client, tries *attempts, id string) (answer A, at *server, err error) {
	if one.isShort && c.settings.callTimeout > 0 {
		bounded, cancel := context.WithTimeout(ctx, c.settings.callTimeout)
		defer cancel()
		ctx = bounded
	}
	for {
		at, err = tries.next(ctx)
		if err != nil {
			return answer, nil, err
		}
		var failure *Error
		answer, failure = one.at(ctx, at, id)
		c.pool.mu.Lock()
		c.pool.over(at)
		if failure == nil {
			c.pool.budget.succeeded()
		}
		closed := c.pool.closed
		c.pool.mu.Unlock()
		if failure == nil {
			return answer, at, nil
		}
		if closed {
			return answer, nil, closedError("the client")
		}
		if err := tries.failed(ctx, at, failure); err != nil {
			return answer, nil, err
		}
	}
}

// at makes the call at one server, once.
func (one call[A]) at(ctx context.Context, at *server, id string) (answer A, failure *Error) {
	var trailer metadata.MD
	answer, err := one.send(ctx, at, grpc.Trailer(&trailer))
	if err != nil {
		failure = fromRPC(ctx, err, at.address.target, id)
		heedPushback(failure, trailer)
	}
	return answer, failure
}
