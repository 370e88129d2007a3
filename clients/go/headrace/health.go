package headrace

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	headracev1 "headrace.dev/go/headrace/v1"
)

const generationService = "headrace.v1.GenerationService"

// resolve looks names up, every few seconds and soon after failures. What cannot be looked up keeps its addresses.
func (p *pool) resolve(ctx context.Context, places []place) {
	known := make(map[place][]address)
	for ctx.Err() == nil {
		var addresses []address
		for _, one := range places {
			if one.address != "" {
				addresses = append(addresses, address{target: one.address})
				continue
			}
			found, err := one.resolve(ctx)
			if err == nil {
				known[one] = found
			} else {
				p.mu.Lock()
				p.unresolved = fmt.Sprintf("%s cannot be looked up: %v", one.host, err)
				p.mu.Unlock()
			}
			addresses = append(addresses, known[one]...)
		}
		if err := p.list(addresses); err != nil {
			p.mu.Lock()
			p.unresolved = err.Error()
			p.mu.Unlock()
		}
		if wait(ctx, p.kicked, resolveEvery) != nil || wait(ctx, nil, resolvePause) != nil {
			return
		}
	}
}

// An identity is what a server tells of itself.
type identity struct {
	instance string // empty: the caller may not ask for it
	capacity int
}

// check asks servers that are not ready whether they are. Each answer is taken as it comes: none waits for the others,
// but for a moment with those that are ready.
func (p *pool) check(ctx context.Context) {
	for ctx.Err() == nil {
		p.mu.Lock()
		now := time.Now()
		due := p.toAsk(now)
		var listeners []*Session
		if p.tell(now) {
			p.notify()
			listeners = slices.Collect(maps.Keys(p.listeners))
		}
		changed, next := p.changed, p.nextCheck(now)
		p.mu.Unlock()
		for _, one := range due {
			p.running.Go(func() { p.ask(ctx, one) })
		}
		for _, session := range listeners {
			session.serverChanged()
		}
		if wait(ctx, changed, next) != nil {
			return
		}
	}
}

// toAsk are the servers whose health is to be asked for now. The lock is held.
func (p *pool) toAsk(now time.Time) []*server {
	var due []*server
	for _, one := range p.servers {
		if one.waitsForCheck() && !one.checkAt.After(now) {
			one.isAsked = true
			one.waitForCheck(now)
			due = append(due, one)
		}
	}
	return due
}

// nextCheck is how long it takes until a server is to be asked, or those that were found are to be used. The lock is
// held.
func (p *pool) nextCheck(now time.Time) time.Duration {
	next := time.Hour
	for _, one := range p.servers {
		if one.waitsForCheck() {
			next = min(next, one.checkAt.Sub(now))
		}
	}
	if len(p.found) > 0 {
		next = min(next, p.tellAt.Sub(now))
	}
	return next
}

// ask asks a server for its health, and a ready one for its instance and capacity. Its answer, or that there is none, is
// told to who waits for servers.
func (p *pool) ask(ctx context.Context, one *server) {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	told, err := identify(ctx, one)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		p.notJoined(one, err)
	} else {
		p.foundReady(one, told, time.Now())
	}
	p.notify()
}

// foundReady notes that a server is ready. It is used together with the others that are asked, so that the first
// requests are not all placed on the first that answers; but it does not wait long for them. The lock is held.
func (p *pool) foundReady(one *server, told identity, now time.Time) {
	if len(p.found) == 0 {
		p.tellAt = now.Add(together)
	}
	p.found[one] = told
}

// notJoined notes that a server was asked, and is not ready. The lock is held.
func (p *pool) notJoined(one *server, problem *Error) {
	one.problem, one.isKnown, one.isAsked = problem, true, false
}

// tell makes the servers that were found ready, if it is time, and tells whether there were any. The lock is held.
func (p *pool) tell(now time.Time) bool {
	isWaitedFor := func(one *server) bool {
		_, isFound := p.found[one]
		return one.isAsked && !isFound
	}
	if len(p.found) == 0 || now.Before(p.tellAt) && slices.ContainsFunc(p.servers, isWaitedFor) {
		return false
	}
	for one, told := range p.found {
		p.joined(one, told)
	}
	clear(p.found)
	return true
}

// joined makes a server ready, unless it is known by another address already. The lock is held.
func (p *pool) joined(one *server, told identity) {
	one.instance, one.capacity = told.instance, max(told.capacity, 1)
	one.isKnown, one.isAsked = true, false
	if one.state != joining {
		return
	}
	for _, twin := range p.byInstance(told.instance) {
		if twin != one && twin.state == ready {
			one.checkAt = time.Now().Add(twinPause)
			return
		}
	}
	one.state, one.problem, one.checks = ready, nil, 0
}

func identify(ctx context.Context, one *server) (identity, *Error) {
	target := one.address.target
	health, err := one.health.Check(ctx, &healthpb.HealthCheckRequest{Service: generationService})
	if err != nil {
		return identity{}, fromRPC(ctx, err, target, "")
	}
	if health.GetStatus() != healthpb.HealthCheckResponse_SERVING {
		return identity{}, newError(codes.Unavailable, nil, "the server at %s is not ready", target)
	}
	answer, err := one.models.GetModel(ctx, &headracev1.GetModelRequest{})
	if err != nil {
		if failed := fromRPC(ctx, err, target, ""); failed.Code == codes.Unavailable {
			return identity{}, failed
		}
		return identity{capacity: 1}, nil // a caller that may not ask for the model gets neither
	}
	model := answer.GetModel()
	return identity{model.GetInstanceId(), int(model.GetLimits().GetMaxRunningRequests())}, nil
}
