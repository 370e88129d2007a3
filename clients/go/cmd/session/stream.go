package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"google.golang.org/grpc"

	headracev1 "headrace.dev/go/headrace/v1"
)

// The most ids that one Cancel takes.
const maxCancelIDs = 1024

type resultStream = grpc.BidiStreamingClient[headracev1.StreamResultRequest, headracev1.StreamResultResponse]

// send is the stream's only sender: it adds a request for each input, cancels the live ones on an interrupt, and
// half-closes after the last input or the cancels.
//
// An error of Send is not looked at: it means that the stream has ended, and receive learns why.
func send(
	ctx context.Context,
	opts options,
	client headracev1.GenerationServiceClient,
	stream resultStream,
	ledger *ledger,
	inputs <-chan string,
	interrupt <-chan struct{},
) {
	for {
		select {
		case prompt, more := <-inputs:
			if !more {
				_ = stream.CloseSend()
				cancelAfterHalfClose(ctx, client, ledger, interrupt)
				return
			}
			commandID, requestID := ledger.add()
			if stream.Send(addCommand(opts, commandID, requestID, prompt)) != nil {
				return
			}
		case <-interrupt:
			for _, id := range ledger.live() {
				if stream.Send(cancelCommand(id)) != nil {
					return
				}
			}
			_ = stream.CloseSend()
			return
		case <-ctx.Done():
			return
		}
	}
}

// cancelAfterHalfClose waits for an interrupt and cancels the live requests by the Cancel RPC: a stream that was
// half-closed takes no more commands. Their ends arrive on the stream all the same.
func cancelAfterHalfClose(
	ctx context.Context,
	client headracev1.GenerationServiceClient,
	ledger *ledger,
	interrupt <-chan struct{},
) {
	select {
	case <-interrupt:
	case <-ctx.Done():
		return
	}
	for ids := range slices.Chunk(ledger.live(), maxCancelIDs) {
		_, err := client.Cancel(ctx, &headracev1.CancelRequest{RequestIds: ids})
		if err != nil && ctx.Err() == nil {
			fmt.Fprintln(os.Stderr, "session: cancel:", describe(err))
		}
	}
}

// receive takes messages until the server ends the stream; nil is the end that the contract knows.
func receive(stream resultStream, ledger *ledger) error {
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		ledger.take(response)
	}
}

func addCommand(opts options, commandID uint64, requestID, prompt string) *headracev1.StreamResultRequest {
	spec := &headracev1.GenerationSpec{
		RequestId: requestID,
		Input:     &headracev1.GenerationSpec_Text{Text: &headracev1.TextInput{Text: prompt}},
	}
	if opts.temperature != nil {
		spec.Sampling = &headracev1.SamplingOptions{Temperature: opts.temperature}
	}
	if opts.maxTokens != nil {
		spec.Stop = &headracev1.StopOptions{MaxTokens: opts.maxTokens}
	}
	return &headracev1.StreamResultRequest{
		CommandId: commandID,
		Command:   &headracev1.StreamResultRequest_Add{Add: &headracev1.AddCommand{Spec: spec}},
	}
}

func cancelCommand(requestID string) *headracev1.StreamResultRequest {
	return &headracev1.StreamResultRequest{
		Command: &headracev1.StreamResultRequest_Cancel{
			Cancel: &headracev1.CancelCommand{RequestId: requestID},
		},
	}
}
