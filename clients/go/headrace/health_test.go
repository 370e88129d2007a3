package headrace

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"
)

// asked are three servers that are asked now.
func asked(now time.Time) (p *pool, a, b, c *server) {
	a, b, c = &server{checkAt: now}, &server{checkAt: now}, &server{checkAt: now}
	p = &pool{found: make(map[*server]identity), servers: []*server{a, b, c}}
	p.toAsk(now)
	return p, a, b, c
}

func TestServersThatAreReadyAreUsedTogether(t *testing.T) {
	now := time.Now()
	p, a, b, c := asked(now)
	p.foundReady(a, identity{"a", 1}, now)
	p.foundReady(b, identity{"b", 1}, now)
	if p.tell(now) || a.state == ready {
		t.Error("one has not answered, and is not waited for")
	}
	if next := p.nextCheck(now); next != together {
		t.Errorf("they are used in %v, want %v", next, together)
	}
	p.notJoined(c, newError(codes.Unavailable, nil, "loading"))
	if !p.tell(now) || a.state != ready || b.state != ready || c.state == ready {
		t.Errorf("states %v, %v, %v once all have answered", a.state, b.state, c.state)
	}
	if p.tell(now) {
		t.Error("what was told is told again")
	}
}

func TestAServerThatDoesNotAnswerIsWaitedForAMoment(t *testing.T) {
	now := time.Now()
	p, a, b, _ := asked(now)
	p.foundReady(a, identity{"a", 1}, now)
	p.foundReady(b, identity{"b", 1}, now.Add(together/2))
	if p.tell(now.Add(together / 2)) {
		t.Error("the third is not waited for")
	}
	if !p.tell(now.Add(together)) || a.state != ready || b.state != ready {
		t.Errorf("states %v, %v after %v", a.state, b.state, together)
	}
	if due := p.toAsk(now.Add(checkTimeout)); len(due) > 0 {
		t.Error("a server that is asked already is asked again")
	}
}
