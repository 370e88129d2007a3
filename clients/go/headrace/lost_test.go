package headrace_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"headrace.dev/go/headrace"
	headracev1 "headrace.dev/go/headrace/v1"
)

func TestALostSessionWithALeaseResumes(t *testing.T) {
	attached := make(chan *headracev1.AttachCommand, 1)
	client := serve(t, &script{session: func(c *conversation) error {
		open, err := c.command()
		if err != nil {
			return err
		}
		c.send(&headracev1.StreamResultResponse{Opened: &headracev1.SessionOpened{
			CommandId: open.GetCommandId(), Lease: open.GetOpen().GetLease(),
		}})
		command, err := c.command()
		if err != nil {
			return err
		}
		if c.number == 1 {
			number := c.accept(command)
			c.delta(number, "be", 1)
			return status.Error(codes.Unavailable, "lost")
		}
		attached <- command.GetAttach()
		c.send(&headracev1.StreamResultResponse{Attached: []*headracev1.SessionAttached{{
			CommandId: command.GetCommandId(), RequestId: command.GetAttach().GetRequestId(), FromSeq: 3, RequestNumber: 7,
		}}})
		c.seqs[7] = 2
		c.delta(7, "gun", 2)
		c.finish(7, headracev1.FinishReason_FINISH_REASON_LENGTH)
		return c.rest()
	}})
	ctx := soon(t)
	session := openSession(t, ctx, client, &headrace.SessionOptions{Lease: 10 * time.Second})
	h := submit(t, ctx, session, &headrace.Request{Text: "x"})
	if got := text(t, ctx, h); got != "begun" {
		t.Errorf("got %q", got)
	}
	attach := <-attached
	if attach.GetFromSeq() != 3 || attach.GetInstanceId() != instance || attach.GetRequestId() != h.RequestID() {
		t.Errorf("attached by %v", attach)
	}
	if result, err := h.Result(ctx); err != nil || result.Text() != "begun" {
		t.Errorf("%+v, %v", result, err)
	}
}

func TestALostRequestWithoutALeaseTellsItsOutput(t *testing.T) {
	client := serve(t, &script{session: func(c *conversation) error {
		command, err := c.command()
		if err != nil {
			return err
		}
		number := c.accept(command)
		c.delta(number, "part", 1)
		return status.Error(codes.Unavailable, "going away")
	}})
	ctx := soon(t)
	session := openSession(t, ctx, client, nil)
	h := submit(t, ctx, session, &headrace.Request{Text: "x"})
	_, err := h.Result(ctx)
	told := asError(t, err)
	if told.Code != codes.Unavailable || told.Partial == nil || told.Partial.Text() != "part" {
		t.Errorf("%+v", told)
	}
	if _, err := session.Submit(ctx, &headrace.Request{Text: "y"}); asError(t, err).Code != codes.Unavailable {
		t.Errorf("got %v", err)
	}
}

func TestARequestThatMovedEnds(t *testing.T) {
	client := serve(t, &script{session: func(c *conversation) error {
		command, err := c.command()
		if err != nil {
			return err
		}
		number := c.accept(command)
		c.delta(number, "here", 1)
		c.send(&headracev1.StreamResultResponse{Detached: []*headracev1.SessionDetached{{RequestNumber: number}}})
		return c.rest()
	}})
	ctx := soon(t)
	session := openSession(t, ctx, client, &headrace.SessionOptions{})
	h := submit(t, ctx, session, &headrace.Request{Text: "x"})
	_, err := h.Result(ctx)
	if !errors.Is(err, headrace.ErrMoved) || asError(t, err).Code != codes.Aborted || asError(t, err).Partial.Text() != "here" {
		t.Errorf("got %v", err)
	}
}

func TestClosingTheClientEndsItsHandles(t *testing.T) {
	begun := make(chan struct{})
	client := serve(t, &script{session: func(c *conversation) error {
		command, err := c.command()
		if err != nil {
			return err
		}
		c.accept(command)
		close(begun)
		return c.rest()
	}})
	ctx := soon(t)
	session, err := client.Session(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	h := submit(t, ctx, session, &headrace.Request{Text: "x"})
	<-begun
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = h.Result(ctx)
	if !errors.Is(err, headrace.ErrClosed) || asError(t, err).Code != codes.Unavailable {
		t.Errorf("got %v", err)
	}
	if _, err := client.Session(ctx, nil); !errors.Is(err, headrace.ErrClosed) {
		t.Errorf("got %v", err)
	}
}

func TestASessionWhoseContextHasEnded(t *testing.T) {
	client := serve(t, &script{session: echo})
	over, cancel := context.WithCancel(context.Background())
	cancel()
	for range 200 {
		session, err := client.Session(over, nil)
		if err != nil {
			t.Fatal(err)
		}
		if h, err := session.Submit(over, &headrace.Request{Text: "x"}); err == nil {
			_, err = h.Result(soon(t))
			if asError(t, err).Code != codes.Canceled {
				t.Errorf("got %v", err)
			}
		} else if asError(t, err).Code != codes.Canceled {
			t.Errorf("got %v", err)
		}
		_ = session.Close()
	}
}

// A keeper runs requests whose sessions may be lost at any event, and continues them where an attach says.
type keeper struct {
	mu     sync.Mutex
	known  map[string]string // the texts of requests, by id
	losses int
	most   int
}

const word = 8 // events of output for each request

func (k *keeper) session(c *conversation) error {
	var toLose int
	k.mu.Lock()
	if k.losses < k.most {
		k.losses++
		toLose = 1 + rand.IntN(40)
	}
	k.mu.Unlock()
	numbers := uint32(0)
	sent := 0
	send := func(number uint32, seq uint64, event *headracev1.ResultEvent) error {
		event.RequestNumber, event.Seq = number, seq
		c.send(&headracev1.StreamResultResponse{Events: []*headracev1.ResultEvent{event}})
		sent++
		if sent == toLose {
			return status.Error(codes.Unavailable, "lost")
		}
		return nil
	}
	for {
		command, err := c.command()
		if errors.Is(err, errHalfClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		var id string
		from := uint64(1)
		switch one := command.GetCommand().(type) {
		case *headracev1.StreamResultRequest_Open:
			c.send(&headracev1.StreamResultResponse{Opened: &headracev1.SessionOpened{CommandId: command.GetCommandId(), Lease: one.Open.GetLease()}})
			continue
		case *headracev1.StreamResultRequest_Add:
			id = one.Add.GetSpec().GetRequestId()
			k.mu.Lock()
			_, known := k.known[id]
			k.known[id] = one.Add.GetSpec().GetText().GetText()
			k.mu.Unlock()
			if known {
				c.refuse(command, status.New(codes.AlreadyExists, "it is here").Proto())
				continue
			}
		case *headracev1.StreamResultRequest_Attach:
			id, from = one.Attach.GetRequestId(), one.Attach.GetFromSeq()
		default:
			continue
		}
		numbers++
		if command.GetAttach() != nil {
			c.send(&headracev1.StreamResultResponse{Attached: []*headracev1.SessionAttached{{
				CommandId: command.GetCommandId(), RequestId: id, FromSeq: from, RequestNumber: numbers,
			}}})
		}
		for seq := from; seq <= word+2; seq++ {
			event := &headracev1.ResultEvent{}
			switch seq {
			case 1:
				event.Event = &headracev1.ResultEvent_Accepted{Accepted: &headracev1.Accepted{RequestId: id, CommandId: command.GetCommandId(), N: 1}}
			case word + 2:
				event = finishedEvent(headracev1.FinishReason_FINISH_REASON_STOP)
			default:
				event = deltaEvent(k.text(id, int(seq)-2), uint32(seq))
			}
			if err := send(numbers, seq, event); err != nil {
				return err
			}
		}
	}
}

func (k *keeper) text(id string, piece int) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return fmt.Sprintf("%s-%d ", k.known[id], piece)
}

func TestNothingIsLostOrRepeatedHoweverOftenTheSessionIs(t *testing.T) {
	for _, credit := range []int{0, 3} {
		t.Run(fmt.Sprintf("credit %d", credit), func(t *testing.T) {
			k := &keeper{known: make(map[string]string), most: 4}
			client := serve(t, &script{session: k.session})
			ctx := soon(t)
			session, err := client.Session(ctx, &headrace.SessionOptions{Lease: 15 * time.Second, InitialCredit: credit})
			if err != nil {
				t.Fatal(err)
			}
			defer session.Close()
			var readers sync.WaitGroup
			for i := range 24 {
				h, err := session.Submit(ctx, &headrace.Request{Text: fmt.Sprint(i)})
				if err != nil {
					t.Fatal(err)
				}
				readers.Go(func() {
					var want, got strings.Builder
					for piece := range word {
						fmt.Fprintf(&want, "%d-%d ", i, piece)
					}
					for chunk, err := range h.Chunks(ctx) {
						if err != nil {
							t.Error(err)
						}
						got.WriteString(chunk.Text)
					}
					result, err := h.Result(ctx)
					if err != nil || got.String() != want.String() || result.Text() != want.String() {
						t.Errorf("got %q, %v", got.String(), err)
					}
				})
			}
			readers.Wait()
			if k.losses != k.most {
				t.Errorf("%d sessions were lost", k.losses)
			}
		})
	}
}
