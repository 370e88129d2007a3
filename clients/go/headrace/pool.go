package headrace

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
)

// A pool is a client's servers, and the choice among them by docs/fleet.md. With one server there is no choice: it is
// always ready, and gRPC connects to it.
type pool struct {
	dial func(address) (*server, error)
	many bool

	mu         sync.Mutex
	servers    []*server
	found      map[*server]identity // the servers that have said that they are ready, and are not used yet
	tellAt     time.Time            // when they are used at the latest
	changed    chan struct{}        // closed, and made anew, when a server may have become usable
	kicked     chan struct{}        // has something in it when names are to be looked up now
	listeners  map[*Session]struct{}
	placement  placement
	budget     budget
	owners     recent[string] // by request: the instance that has it
	alone      map[string]aloneRequest
	turn       int
	unresolved string // why a name could not be looked up
	closed     bool
	stop       context.CancelFunc
	running    sync.WaitGroup
}

// An aloneRequest runs without a call. It counts as its server's load until it was seen to have ended, or for a minute.
type aloneRequest struct {
	server *server
	until  time.Time
}

func newPool(places []place, dial func(address) (*server, error)) (*pool, error) {
	p := &pool{
		dial:      dial,
		many:      len(places) > 1 || places[0].address == "",
		found:     make(map[*server]identity),
		changed:   make(chan struct{}),
		kicked:    make(chan struct{}, 1),
		listeners: make(map[*Session]struct{}),
		alone:     make(map[string]aloneRequest),
		budget:    budget{budgetTokens},
	}
	var listed []address
	hasNames := false
	for _, one := range places {
		if one.address == "" {
			hasNames = true
		} else {
			listed = append(listed, address{target: one.address})
		}
	}
	if err := p.list(listed); err != nil {
		p.close()
		return nil, err
	}
	if !p.many {
		p.servers[0].state = ready
		return p, nil
	}
	ctx, stop := context.WithCancel(context.Background())
	p.stop = stop
	p.running.Go(func() { p.check(ctx) })
	if hasNames {
		p.running.Go(func() { p.resolve(ctx, places) })
	}
	return p, nil
}

// close ends all connections, and returns when the pool's goroutines have ended.
func (p *pool) close() {
	p.mu.Lock()
	p.closed = true
	servers := p.servers
	p.notify()
	p.mu.Unlock()
	if p.stop != nil {
		p.stop()
	}
	for _, one := range servers {
		_ = one.conn.Close()
	}
	p.running.Wait()
}

// notify wakes those who wait for a server; the lock is held.
func (p *pool) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// list takes the addresses that there are now.
func (p *pool) list(addresses []address) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	for _, wanted := range addresses {
		at := slices.IndexFunc(p.servers, func(one *server) bool { return one.address == wanted })
		switch {
		case at < 0 && p.closed:
		case at < 0:
			made, err := p.dial(wanted)
			if err != nil {
				return err
			}
			made.capacity, made.checkAt, made.usedAt = 1, now, now
			p.servers = append(p.servers, made)
		case p.servers[at].state == leaving:
			p.servers[at].state, p.servers[at].checkAt = joining, now
		}
	}
	kept := p.servers[:0:0]
	for _, one := range p.servers {
		if !slices.Contains(addresses, one.address) {
			one.state = leaving
			if one.outstanding == 0 && now.Sub(one.usedAt) > leftFor {
				_ = one.conn.Close()
				continue
			}
		}
		kept = append(kept, one)
	}
	p.servers = kept
	p.notify()
	return nil
}

// choose is the server for a request; nil: none is ready and has room. One of avoid is better than none; one of lacking is
// not, because it lacks what the request needs. The lock is held.
func (p *pool) choose(keys *prefixKeys, avoid, lacking map[*server]bool, evenFull bool) *server {
	if !p.many {
		return p.servers[0]
	}
	now := time.Now()
	for id, one := range p.alone {
		if one.until.Before(now) {
			p.endedAlone(id)
		}
	}
	pick := func(fits func(*server) bool) []*server {
		var found []*server
		for _, one := range p.servers {
			if one.state == ready && !lacking[one] && fits(one) {
				found = append(found, one)
			}
		}
		return found
	}
	hasRoom := func(one *server) bool { return !one.fullUntil.After(now) }
	from := pick(func(one *server) bool { return hasRoom(one) && !avoid[one] })
	if len(from) == 0 {
		from = pick(hasRoom)
	}
	if len(from) == 0 && evenFull {
		from = pick(func(one *server) bool { return !avoid[one] })
		if len(from) == 0 {
			from = pick(func(*server) bool { return true })
		}
	}
	if len(from) == 0 {
		return nil
	}
	candidates := make([]candidate, len(from))
	for i, one := range from {
		candidates[i] = candidate{one.name(), one.load(now), one.capacity, one.turn}
	}
	chosen := p.placement.choose(keys, candidates)
	return from[slices.IndexFunc(from, func(one *server) bool { return one.name() == chosen })]
}

// roomIn is when a ready server has room, as these said; false: none is ready but those of lacking. The lock is held.
func (p *pool) roomIn(lacking map[*server]bool) (time.Duration, bool) {
	first, found := time.Duration(0), false
	for _, one := range p.servers {
		if one.state != ready || lacking[one] {
			continue
		}
		in := max(time.Until(one.fullUntil), 0)
		if !found || in < first {
			first, found = in, true
		}
	}
	return first, found
}

// begun notes that a request goes to a server; over, that it has ended there or goes elsewhere. The lock is held.
func (p *pool) begun(one *server) {
	p.turn++
	one.turn = p.turn
	one.outstanding++
	one.usedAt = time.Now()
}

func (p *pool) over(one *server) {
	one.outstanding--
	one.usedAt = time.Now()
}

// noteFailure is what a server's failure says of it: it has no room for a while, or is not ready. The lock is held.
func (p *pool) noteFailure(one *server, err *Error) {
	if err.Code == codes.ResourceExhausted {
		delay, _ := err.RetryAfter()
		if until := time.Now().Add(delay); until.After(one.fullUntil) {
			one.fullUntil = until
		}
		return
	}
	p.setAside(one, err)
}

// setAside has a server asked for its health before it gets anything new. The lock is held.
func (p *pool) setAside(one *server, problem *Error) {
	if !p.many {
		return
	}
	one.problem = problem
	if one.state == leaving {
		return
	}
	one.state = joining
	one.waitForCheck(time.Now())
	for _, twin := range p.byInstance(one.instance) {
		if twin.state == joining && twin != one {
			twin.checkAt = time.Now()
		}
	}
	p.look()
}

// look has names looked up and servers asked soon. The lock is held.
func (p *pool) look() {
	select {
	case p.kicked <- struct{}{}:
	default:
	}
	p.notify()
}

func (p *pool) runsAlone(id string, one *server) {
	p.endedAlone(id)
	p.alone[id] = aloneRequest{one, time.Now().Add(aloneFor)}
	p.begun(one)
}

func (p *pool) endedAlone(id string) {
	if found, known := p.alone[id]; known {
		delete(p.alone, id)
		p.over(found.server)
	}
}

// noteOwner notes the instance that has a request. The lock is held.
func (p *pool) noteOwner(id, instance string) {
	if instance != "" && p.many {
		p.owners.put(id, instance, mostOwners)
	}
}

func (p *pool) owner(id string) string {
	found, _ := p.owners.get(id)
	return found
}

// byInstance are the servers that are this instance, the ready ones first. The lock is held.
func (p *pool) byInstance(instance string) []*server {
	var found []*server
	for _, one := range p.servers {
		if instance != "" && one.instance == instance {
			found = append(found, one)
		}
	}
	slices.SortStableFunc(found, func(a, b *server) int { return cmp.Compare(isReady(b), isReady(a)) })
	return found
}

func isReady(one *server) int {
	if one.state == ready {
		return 1
	}
	return 0
}

// reachable are the servers that may answer for what they have. The lock is held.
func (p *pool) reachable() []*server {
	return slices.DeleteFunc(slices.Clone(p.servers), func(one *server) bool { return one.state == joining })
}

// isSettled tells whether all servers were asked whether they are ready. The lock is held.
func (p *pool) isSettled() bool {
	return len(p.servers) > 0 && !slices.ContainsFunc(p.servers, func(one *server) bool { return !one.isKnown })
}

// nobody makes the error for a request that found no server. The lock is held.
func (p *pool) nobody() *Error {
	var told []string
	for _, one := range p.servers {
		if one.problem != nil && !slices.Contains(told, one.problem.Message) {
			told = append(told, one.problem.Message)
		}
	}
	why := strings.Join(told, "; ")
	if why == "" {
		why = cmp.Or(p.unresolved, "no answer yet")
	}
	made := newError(codes.Unavailable, nil, "none of %d servers is ready: %s", len(p.servers), why)
	for _, one := range p.servers {
		if one.problem != nil && one.problem.Reason != "" {
			copied := *one.problem
			copied.Message = made.Message
			return &copied
		}
	}
	return made
}

// wait returns when the servers have changed, the time has passed or the context has ended.
func wait(ctx context.Context, changed <-chan struct{}, atMost time.Duration) error {
	timer := time.NewTimer(atMost)
	defer timer.Stop()
	select {
	case <-changed:
	case <-timer.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// settle waits until all servers were asked whether they are ready, but not long.
func (p *pool) settle(ctx context.Context) error {
	end := time.Now().Add(patience)
	for {
		p.mu.Lock()
		settled, changed := !p.many || p.closed || p.isSettled(), p.changed
		p.mu.Unlock()
		left := time.Until(end)
		if settled || left <= 0 {
			return nil
		}
		if err := wait(ctx, changed, left); err != nil {
			return err
		}
	}
}

// String names the servers, for messages.
func (p *pool) String() string {
	names := make([]string, len(p.servers))
	for i, one := range p.servers {
		names[i] = one.address.target
	}
	return fmt.Sprint(strings.Join(names, ","))
}
