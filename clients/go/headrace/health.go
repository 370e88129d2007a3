package headrace

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
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

// check asks servers that are not ready whether they are: all that are due at the same time, so that the first requests
// find all servers that are there.
func (p *pool) check(ctx context.Context) {
	for ctx.Err() == nil {
		p.mu.Lock()
		now, changed := time.Now(), p.changed
		next := time.Hour
		var due []*server
		for _, one := range p.servers {
			if one.state != joining {
				continue
			}
			if !one.checkAt.After(now) {
				one.waitForCheck(now)
				due = append(due, one)
			}
			next = min(next, one.checkAt.Sub(now))
		}
		p.mu.Unlock()
		if len(due) > 0 {
			p.askAll(ctx, due)
		} else if wait(ctx, changed, next) != nil {
			return
		}
	}
}

func (p *pool) askAll(ctx context.Context, due []*server) {
	var asked sync.WaitGroup
	for _, one := range due {
		asked.Go(func() { p.ask(ctx, one) })
	}
	asked.Wait()
	p.mu.Lock()
	p.notify()
	var listeners []*Session
	if slices.ContainsFunc(due, func(one *server) bool { return one.state == ready }) {
		listeners = slices.Collect(maps.Keys(p.listeners))
	}
	p.mu.Unlock()
	for _, session := range listeners {
		session.serverChanged()
	}
}

// ask asks a server for its health, and a ready one for its instance and capacity.
func (p *pool) ask(ctx context.Context, one *server) {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	instance, capacity, err := identify(ctx, one)
	p.mu.Lock()
	defer p.mu.Unlock()
	one.isKnown = true
	if err != nil {
		one.problem = err
	} else {
		p.joined(one, instance, capacity)
	}
}

// joined makes a server ready, unless it is known by another address already. The lock is held.
func (p *pool) joined(one *server, instance string, capacity int) {
	one.instance, one.capacity = instance, max(capacity, 1)
	if one.state != joining {
		return
	}
	for _, twin := range p.byInstance(instance) {
		if twin != one && twin.state == ready {
			one.checkAt = time.Now().Add(twinPause)
			return
		}
	}
	one.state, one.problem, one.checks = ready, nil, 0
}

func identify(ctx context.Context, one *server) (instance string, capacity int, problem *Error) {
	target := one.address.target
	health, err := one.health.Check(ctx, &healthpb.HealthCheckRequest{Service: generationService})
	if err != nil {
		return "", 0, fromRPC(ctx, err, target, "")
	}
	if health.GetStatus() != healthpb.HealthCheckResponse_SERVING {
		return "", 0, newError(codes.Unavailable, nil, "the server at %s is not ready", target)
	}
	answer, err := one.models.GetModel(ctx, &headracev1.GetModelRequest{})
	if err != nil {
		if failed := fromRPC(ctx, err, target, ""); failed.Code == codes.Unavailable {
			return "", 0, failed
		}
		return "", 1, nil // a caller that may not ask for the model gets neither
	}
	model := answer.GetModel()
	return model.GetInstanceId(), int(model.GetLimits().GetMaxRunningRequests()), nil
}
