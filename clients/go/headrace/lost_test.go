package headrace_test

import (
	"errors"
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
	session, err := client.Session(ctx, &headrace.SessionOptions{Lease: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	h, err := session.Submit(ctx, &headrace.Request{Text: "x"})
	if err != nil {
		t.Fatal(err)
	}
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
	session, err := client.Session(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	h, err := session.Submit(ctx, &headrace.Request{Text: "x"})
	if err != nil {
		t.Fatal(err)
	}
	_, err = h.Result(ctx)
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
	session, err := client.Session(ctx, &headrace.SessionOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	h, err := session.Submit(ctx, &headrace.Request{Text: "x"})
	if err != nil {
		t.Fatal(err)
	}
	_, err = h.Result(ctx)
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
	h, err := session.Submit(ctx, &headrace.Request{Text: "x"})
	if err != nil {
		t.Fatal(err)
	}
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
