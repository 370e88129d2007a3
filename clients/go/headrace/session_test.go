package headrace_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"headrace.dev/go/headrace"
	headracev1 "headrace.dev/go/headrace/v1"
)

// echo answers each add with its text in two deltas, and its cancel with CANCELLED.
func echo(c *conversation) error {
	for {
		command, err := c.command()
		if errors.Is(err, errHalfClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		if add := command.GetAdd(); add != nil {
			number := c.accept(command)
			text := add.GetSpec().GetText().GetText()
			c.delta(number, text[:1], 1)
			c.delta(number, text[1:], 2)
			c.finish(number, headracev1.FinishReason_FINISH_REASON_LENGTH)
		}
	}
}

func TestManyRequestsShareOneStream(t *testing.T) {
	s := &script{session: echo}
	client := serve(t, s)
	ctx := soon(t)
	session := openSession(t, ctx, client, nil)
	var handles []*headrace.Handle
	for i := range 64 {
		h, err := session.Submit(ctx, &headrace.Request{Text: fmt.Sprintf("prompt %d", i)})
		if err != nil {
			t.Fatal(err)
		}
		handles = append(handles, h)
	}
	if err := session.Finish(ctx); err != nil {
		t.Fatal(err)
	}
	for i, h := range handles {
		want := fmt.Sprintf("prompt %d", i)
		if got := text(t, ctx, h); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
		result, err := h.Result(ctx)
		if err != nil || result.Text() != want || result.FinishReason() != headrace.FinishLength || len(result.TokenIDs()) != 2 {
			t.Errorf("got %+v, %v", result, err)
		}
	}
	if s.sessions != 1 {
		t.Errorf("%d streams were opened", s.sessions)
	}
}

func TestARequestThatIsNotReadDelaysNoOther(t *testing.T) {
	client := serve(t, &script{session: echo})
	ctx := soon(t)
	session := openSession(t, ctx, client, nil)
	slow := submit(t, ctx, session, &headrace.Request{Text: "slow"})
	for range 100 {
		h, err := session.Submit(ctx, &headrace.Request{Text: "quick"})
		if err != nil {
			t.Fatal(err)
		}
		if got := text(t, ctx, h); got != "quick" {
			t.Fatalf("got %q", got)
		}
	}
	if got := text(t, ctx, slow); got != "slow" {
		t.Errorf("got %q", got)
	}
}

func TestCancelEndsARequestWithItsOutput(t *testing.T) {
	for _, how := range []string{"handle", "context"} {
		t.Run(how, func(t *testing.T) {
			client := serve(t, &script{session: func(c *conversation) error {
				command, err := c.command()
				if err != nil {
					return err
				}
				number := c.accept(command)
				c.delta(number, "begun", 1)
				cancel, err := c.command()
				if err != nil || cancel.GetCancel().GetRequestId() != "mine" {
					return fmt.Errorf("%v, %w", cancel, err)
				}
				c.finish(number, headracev1.FinishReason_FINISH_REASON_CANCELLED)
				return c.rest()
			}})
			ctx := soon(t)
			session, err := client.Session(ctx, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer session.Close()
			own, cancel := context.WithCancel(ctx)
			defer cancel()
			h, err := session.Submit(own, &headrace.Request{ID: "mine", Text: "x"})
			if err != nil {
				t.Fatal(err)
			}
			for chunk, err := range h.Chunks(ctx) {
				if err != nil || chunk.Text != "begun" {
					t.Fatalf("%v %v", chunk, err)
				}
				break
			}
			if how == "handle" {
				h.Cancel()
			} else {
				cancel()
			}
			result, err := h.Result(ctx)
			if err != nil || result.FinishReason() != headrace.FinishCancelled || result.Text() != "begun" {
				t.Errorf("%+v, %v", result, err)
			}
		})
	}
}

func TestAWaitThatEndsLeavesTheRequest(t *testing.T) {
	goOn := make(chan struct{})
	client := serve(t, &script{session: func(c *conversation) error {
		command, err := c.command()
		if err != nil {
			return err
		}
		number := c.accept(command)
		<-goOn
		c.finish(number, headracev1.FinishReason_FINISH_REASON_STOP)
		return c.rest()
	}})
	ctx := soon(t)
	session := openSession(t, ctx, client, nil)
	h := submit(t, ctx, session, &headrace.Request{Text: "x"})
	over, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := h.Result(over); !errors.Is(err, context.Canceled) || asError(t, err).Code != codes.Canceled {
		t.Errorf("got %v", err)
	}
	for _, err := range h.Chunks(over) {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	}
	close(goOn)
	if result, err := h.Result(ctx); err != nil || result.FinishReason() != headrace.FinishStop {
		t.Errorf("%+v, %v", result, err)
	}
}

func TestARefusalForWantOfRoomIsTriedAgain(t *testing.T) {
	client := serve(t, &script{session: func(c *conversation) error {
		for range 2 {
			command, err := c.command()
			if err != nil {
				return err
			}
			c.refuse(command, full(time.Millisecond))
		}
		return echo(c)
	}})
	ctx := soon(t)
	session := openSession(t, ctx, client, nil)
	h := submit(t, ctx, session, &headrace.Request{Text: "again"})
	if got := text(t, ctx, h); got != "again" {
		t.Errorf("got %q", got)
	}
}

func TestARefusalHasItsDetails(t *testing.T) {
	client := serve(t, &script{session: func(c *conversation) error {
		command, err := c.command()
		if err != nil {
			return err
		}
		c.refuse(command, full(1500*time.Millisecond))
		return c.rest()
	}})
	ctx := soon(t)
	session := openSession(t, ctx, client, &headrace.SessionOptions{RoomTimeout: -1})
	h := submit(t, ctx, session, &headrace.Request{ID: "r", Text: "x"})
	_, err := h.Result(ctx)
	told := asError(t, err)
	delay, has := told.RetryAfter()
	if told.Code != codes.ResourceExhausted || told.Reason != "QUEUE_FULL" || told.Metadata["limit"] != "1" || !has ||
		delay != 1500*time.Millisecond || told.RequestID != "r" || told.Partial != nil {
		t.Errorf("%+v", told)
	}
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("its status is %v", status.Code(err))
	}
}

func TestAnEventThatIsMissingFailsTheRequestAlone(t *testing.T) {
	client := serve(t, &script{session: func(c *conversation) error {
		command, err := c.command()
		if err != nil {
			return err
		}
		number := c.accept(command)
		c.seqs[number]++
		c.delta(number, "late", 1)
		return echo(c)
	}})
	ctx := soon(t)
	session := openSession(t, ctx, client, nil)
	broken := submit(t, ctx, session, &headrace.Request{Text: "broken"})
	if _, err := broken.Result(ctx); !errors.Is(err, headrace.ErrProtocol) || asError(t, err).Code != codes.DataLoss {
		t.Errorf("got %v", err)
	}
	whole := submit(t, ctx, session, &headrace.Request{Text: "whole"})
	if got := text(t, ctx, whole); got != "whole" {
		t.Errorf("got %q", got)
	}
}

func TestCreditsFollowTheReader(t *testing.T) {
	credits := make(chan uint32, 10)
	client := serve(t, &script{session: func(c *conversation) error {
		open, err := c.command()
		if err != nil {
			return err
		}
		if open.GetOpen().GetInitialCredit() != 2 {
			return fmt.Errorf("opened by %v", open)
		}
		command, err := c.command()
		if err != nil {
			return err
		}
		number := c.accept(command)
		c.delta(number, "ab", 1, 2)
		for range 2 {
			credit, err := c.command()
			if err != nil {
				return err
			}
			credits <- credit.GetCredit().GetTokens()
			c.delta(number, "cd", 3, 4)
		}
		c.finish(number, headracev1.FinishReason_FINISH_REASON_LENGTH)
		return c.rest()
	}})
	ctx := soon(t)
	session := openSession(t, ctx, client, &headrace.SessionOptions{InitialCredit: 2})
	h := submit(t, ctx, session, &headrace.Request{Text: "x"})
	for range h.Chunks(ctx) {
		break
	}
	if got := <-credits; got != 2 {
		t.Errorf("credit for %d tokens", got)
	}
	if result, err := h.Result(ctx); err != nil || result.Text() != "abcdcd" {
		t.Errorf("%+v, %v", result, err)
	}
	if got := <-credits; got != 2 {
		t.Errorf("credit for %d tokens", got)
	}
}

func TestWhatCannotBeSentLeavesTheSessionAlone(t *testing.T) {
	client := serve(t, &script{session: echo}, headrace.WithMaxMessageBytes(1<<16))
	ctx := soon(t)
	session := openSession(t, ctx, client, nil)
	for text, code := range map[string]codes.Code{
		"no UTF-8: \xff":                 codes.InvalidArgument,
		strings.Repeat("too long ", 1e4): codes.ResourceExhausted,
	} {
		if _, err := session.Submit(ctx, &headrace.Request{Text: text}); asError(t, err).Code != code {
			t.Errorf("%.20q: %v", text, err)
		}
	}
	if _, err := session.Attach(ctx, "\xff", nil); asError(t, err).Code != codes.InvalidArgument {
		t.Errorf("got %v", err)
	}
	h := submit(t, ctx, session, &headrace.Request{Text: "whole"})
	if got := text(t, ctx, h); got != "whole" {
		t.Errorf("got %q", got)
	}
}

func TestARequestOfASessionCarriesItsTraceContext(t *testing.T) {
	labels := make(chan []*headracev1.Label, 3)
	client := serve(t, &script{session: func(c *conversation) error {
		for {
			command, err := c.command()
			if errors.Is(err, errHalfClosed) {
				return nil
			}
			if err != nil {
				return err
			}
			labels <- command.GetAdd().GetSpec().GetLabels()
			c.finish(c.accept(command), headracev1.FinishReason_FINISH_REASON_STOP)
		}
	}})
	ctx := soon(t)
	session := openSession(t, ctx, client, nil)
	state, err := trace.ParseTraceState("long=" + strings.Repeat("x", 200))
	if err != nil {
		t.Fatal(err)
	}
	span := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceState: state})
	traced := trace.ContextWithSpanContext(ctx, span)
	for _, one := range []struct {
		ctx    context.Context
		own    map[string]string
		labels int
	}{
		{ctx, nil, 0},
		{traced, nil, 1}, // a state that is no label's value is left out
		{traced, map[string]string{"traceparent": "own"}, 1},
	} {
		if _, err := session.Submit(one.ctx, &headrace.Request{Text: "x", Labels: one.own}); err != nil {
			t.Fatal(err)
		}
		got := <-labels
		if len(got) != one.labels || one.own != nil && got[0].GetValue() != "own" {
			t.Errorf("%v", got)
		}
	}
}
