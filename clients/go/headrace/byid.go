package headrace

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	headracev1 "headrace.dev/go/headrace/v1"
)

// A CancelStatus says what a cancel found.
type CancelStatus int

// What a cancel may find.
const (
	CancelUnknown         CancelStatus = 0
	CancelDone            CancelStatus = 1 // it is being ended
	CancelAlreadyFinished CancelStatus = 2 // it had ended
	CancelNotFound        CancelStatus = 3 // there is no such request of this caller
)

// String is the status in words, such as "not_found".
func (s CancelStatus) String() string {
	names := []string{"unknown", "cancelled", "already_finished", "not_found"}
	if s < 0 || int(s) >= len(names) {
		return names[0]
	}
	return names[s]
}

// maxCancelIDs is how many requests one Cancel may name.
const maxCancelIDs = 1024

// Add starts a request that runs without a stream, and returns once the server has accepted it. Its result is kept for
// [Client.Result] and [Client.Attach], and for a while after its end. The same call again, with the same ID, starts
// nothing and returns the same.
func (c *Client) Add(ctx context.Context, request *Request) (*Accepted, error) {
	spec, err := request.build()
	if err != nil {
		return nil, err
	}
	message := &headracev1.AddRequestRequest{Spec: spec}
	message.RequiredCapabilities = requiredBy(message)
	answer, err := start(ctx, c, spec, call[*headracev1.AddRequestResponse]{
		send: func(ctx context.Context, at *server, options ...grpc.CallOption) (*headracev1.AddRequestResponse, error) {
			return at.generation.AddRequest(ctx, message, options...)
		},
		isShort: true,
		sticks:  true,
	})
	if err != nil {
		return nil, err
	}
	return acceptedFrom(answer.GetRequestId(), answer.GetAccepted()), nil
}

// Result waits for the end of a request that runs without a stream, and returns its whole result. Reading does not
// consume. The end of the context ends the wait alone.
func (c *Client) Result(ctx context.Context, id string) (*Result, error) {
	f := newFold(id, 0, 1)
	for {
		atMost := pollWait
		if deadline, has := ctx.Deadline(); has {
			atMost = min(atMost, time.Until(deadline))
		}
		answer, err := c.getResult(ctx, f, true, atMost)
		if err != nil {
			return nil, err
		}
		for _, event := range answer.GetEvents() {
			f.add(event)
		}
		if answer.GetDone() || f.done {
			return f.result()
		}
	}
}

// Attach streams the output of a request that runs without a stream, from the event of that number on; 0: the first.
// Several readers may do so. Leaving the stream does not affect the request.
func (c *Client) Attach(ctx context.Context, id string, from uint64) *Stream {
	return &Stream{client: c, ctx: ctx, cancel: func() {}, id: id, fold: newFold(id, 0, from), source: &polledSource{client: c}}
}

// Cancel ends requests by their ids, and returns what it found of each.
func (c *Client) Cancel(ctx context.Context, ids ...string) (map[string]CancelStatus, error) {
	statuses := make(map[string]CancelStatus, len(ids))
	unique := slices.Compact(slices.Sorted(slices.Values(ids)))
	for some := range slices.Chunk(unique, maxCancelIDs) {
		if err := c.cancelSome(ctx, some, statuses); err != nil {
			return nil, err
		}
	}
	return statuses, nil
}

func (c *Client) cancelSome(ctx context.Context, ids []string, statuses map[string]CancelStatus) error {
	if !c.pool.many {
		message := &headracev1.CancelRequest{RequestIds: ids}
		answer, err := anywhere(ctx, c, call[*headracev1.CancelResponse]{
			send: func(ctx context.Context, at *server, options ...grpc.CallOption) (*headracev1.CancelResponse, error) {
				return at.generation.Cancel(ctx, message, options...)
			},
		})
		if err != nil {
			return err
		}
		noteCancelled(answer, statuses)
		return nil
	}
	if err := c.pool.settle(ctx); err != nil {
		return contextError(ctx, "")
	}
	byOwner := make(map[string][]string)
	c.pool.mu.Lock()
	for _, id := range ids {
		owner := c.pool.owner(id)
		if len(c.pool.byInstance(owner)) == 0 {
			owner = ""
		}
		byOwner[owner] = append(byOwner[owner], id)
	}
	c.pool.mu.Unlock()
	for owner, some := range byOwner {
		if err := c.cancelAt(ctx, owner, some, statuses); err != nil {
			return err
		}
	}
	return nil
}

// cancelAt cancels at the instance that has the requests; if none is known, at each server what was not found before.
func (c *Client) cancelAt(ctx context.Context, owner string, ids []string, statuses map[string]CancelStatus) error {
	c.pool.mu.Lock()
	servers := c.pool.reachable()
	if owner != "" {
		servers = c.pool.byInstance(owner)[:1]
	}
	problem := c.pool.nobody()
	c.pool.mu.Unlock()
	answered := false
	for _, at := range servers {
		left := slices.DeleteFunc(slices.Clone(ids), func(id string) bool {
			return statuses[id] == CancelDone || statuses[id] == CancelAlreadyFinished
		})
		if len(left) == 0 {
			return nil
		}
		message := &headracev1.CancelRequest{RequestIds: left, InstanceId: owner}
		one := call[*headracev1.CancelResponse]{
			send: func(ctx context.Context, at *server, options ...grpc.CallOption) (*headracev1.CancelResponse, error) {
				return at.generation.Cancel(ctx, message, options...)
			},
		}
		bounded, cancel := ctx, context.CancelFunc(func() {})
		if c.settings.callTimeout > 0 {
			bounded, cancel = context.WithTimeout(ctx, c.settings.callTimeout)
		}
		answer, failure := one.at(bounded, at, "")
		cancel()
		switch {
		case failure == nil:
			answered = true
			noteCancelled(answer, statuses)
		case failure.Code == codes.NotFound: // another process is at that address now
			answered = true
		case failure.Code == codes.Unavailable:
			problem = failure
		default:
			return failure
		}
	}
	if !answered {
		return problem
	}
	for _, id := range ids {
		if statuses[id] == CancelUnknown {
			statuses[id] = CancelNotFound
		}
	}
	return nil
}

func noteCancelled(answer *headracev1.CancelResponse, statuses map[string]CancelStatus) {
	for _, one := range answer.GetResults() {
		status := CancelStatus(one.GetStatus())
		if status < CancelUnknown || status > CancelNotFound {
			status = CancelUnknown
		}
		statuses[one.GetRequestId()] = status
	}
}

// ownerTries are the tries of a call to the server that has a request: to the instance that an answer named; if none is
// known, to one server after another.
type ownerTries struct {
	pool     *pool
	id       string
	owner    string // the instance to name in the call; empty: none is known
	servers  []*server
	left     int
	pauses   int
	followed bool
	problem  *Error
}

func (c *Client) ownerTries(ctx context.Context, id string) (*ownerTries, error) {
	c.pool.mu.Lock()
	owner := c.pool.owner(id)
	c.pool.mu.Unlock()
	if owner == "" {
		if err := c.pool.settle(ctx); err != nil {
			return nil, contextError(ctx, id)
		}
	}
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	t := &ownerTries{pool: c.pool, id: id, owner: owner, left: c.settings.retries}
	if owner == "" {
		t.servers = c.pool.reachable()
	} else if found := c.pool.byInstance(owner); len(found) > 0 {
		t.servers = found[:1]
	}
	return t, nil
}

func (t *ownerTries) next() (*server, error) {
	t.pool.mu.Lock()
	defer t.pool.mu.Unlock()
	switch {
	case t.pool.closed:
		return nil, closedError("the client")
	case len(t.servers) > 0:
		return t.servers[0], nil
	case t.problem != nil:
		return nil, t.problem
	case t.owner != "":
		return nil, t.gone()
	}
	return nil, t.pool.nobody()
}

// failed notes a failed try, and waits as long as the next one must. It returns the error if there is none.
func (t *ownerTries) failed(ctx context.Context, at *server, err *Error) error {
	switch {
	case err.Reason == reasonWrongInstance:
		return t.follow(at, err)
	case err.Code == codes.NotFound && t.owner == "" && t.pool.many:
		t.servers = t.servers[1:]
		if t.problem == nil {
			t.problem = err
		}
		return nil
	case !isWorthARetry(err) || err.neverAgain:
		return err
	case t.left > 0:
		t.left--
		pause, told := err.RetryAfter()
		if !told {
			pause = time.Duration(float64(pauseAfter(t.pauses)) * rand.Float64())
			t.pauses++
		}
		if wait(ctx, nil, pause) != nil {
			return contextError(ctx, t.id)
		}
		return nil
	case t.owner != "" || !t.pool.many:
		return err
	}
	t.servers = t.servers[1:]
	t.problem = err // it may be there: more than that it is nowhere else
	return nil
}

// follow looks once whether the owner has another address: this one has another process than it had.
func (t *ownerTries) follow(at *server, err *Error) error {
	t.pool.mu.Lock()
	defer t.pool.mu.Unlock()
	at.instance = err.Metadata["instance_id"]
	t.servers = slices.DeleteFunc(t.pool.byInstance(t.owner), func(one *server) bool { return one == at })
	if t.followed || len(t.servers) == 0 {
		return t.gone()
	}
	t.followed = true
	return nil
}

func (t *ownerTries) gone() *Error {
	err := newError(codes.Unavailable, nil, "the server that had request %q (instance %s) is gone", t.id, t.owner)
	err.RequestID = t.id
	return err
}
