package headrace_test

import (
	"errors"
	"testing"

	"headrace.dev/go/headrace"
	headracev1 "headrace.dev/go/headrace/v1"
)

// BenchmarkSession is 64 requests on one session, 256 tokens each, a message for each step; the server is in process.
func BenchmarkSession(b *testing.B) {
	const requests, steps = 64, 256
	client := serve(b, &script{session: func(c *conversation) error {
		var adds []*headracev1.StreamResultRequest
		for {
			command, err := c.command()
			if errors.Is(err, errHalfClosed) {
				return nil
			}
			if err != nil {
				return err
			}
			adds = append(adds, command)
			if len(adds) < requests {
				continue
			}
			numbers := make([]uint32, requests)
			for i, add := range adds {
				numbers[i] = c.accept(add)
			}
			for step := range steps {
				message := &headracev1.StreamResultResponse{}
				for _, number := range numbers {
					event := deltaEvent(" word", 1234)
					if step == steps-1 {
						event = finishedEvent(headracev1.FinishReason_FINISH_REASON_LENGTH)
					}
					c.seqs[number]++
					event.RequestNumber, event.Seq = number, c.seqs[number]
					message.Events = append(message.Events, event)
				}
				c.send(message)
			}
			adds = nil
		}
	}})
	ctx := soon(b)
	session, err := client.Session(ctx, nil)
	if err != nil {
		b.Fatal(err)
	}
	defer session.Close()
	for b.Loop() {
		ended := make(chan error, requests)
		for range requests {
			h, err := session.Submit(ctx, &headrace.Request{Text: "x"})
			if err != nil {
				b.Fatal(err)
			}
			go func() {
				for _, err := range h.Chunks(ctx) {
					if err != nil {
						ended <- err
						return
					}
				}
				ended <- nil
			}()
		}
		for range requests {
			if err := <-ended; err != nil {
				b.Fatal(err)
			}
		}
	}
	b.ReportMetric(float64(b.N*requests*steps)/b.Elapsed().Seconds(), "tokens/s")
}
