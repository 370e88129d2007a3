// Command load plays turns of load for the comparison of the client libraries; benchmarks/languages says what a turn is.
//
//	load TARGET SESSIONS REQUESTS TOKENS
package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"

	"headrace.dev/go/headrace"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 4 {
		return fmt.Errorf("wanted: TARGET SESSIONS REQUESTS TOKENS")
	}
	var numbers [3]int
	for i, text := range args[1:] {
		number, err := strconv.Atoi(text)
		if err != nil {
			return err
		}
		numbers[i] = number
	}
	client, err := headrace.NewClient(args[0])
	if err != nil {
		return err
	}
	defer client.Close()
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		tokens, err := turn(client, numbers[0], numbers[1], numbers[2])
		if err != nil {
			return err
		}
		fmt.Printf("{\"tokens\": %d}\n", tokens)
	}
	return nil
}

// turn plays one turn, and returns how many tokens came.
func turn(client *headrace.Client, sessions, requests, tokens int) (int64, error) {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	var count atomic.Int64
	var reading sync.WaitGroup
	for range sessions {
		session, err := client.Session(ctx, nil)
		if err != nil {
			return 0, err
		}
		defer session.Close()
		for range requests {
			handle, err := session.Submit(ctx, &headrace.Request{
				Text:        "Once upon a time",
				Temperature: headrace.Ptr(0.0),
				MaxTokens:   &tokens,
				IgnoreEOS:   true,
			})
			if err != nil {
				return 0, err
			}
			reading.Go(func() {
				own := 0
				for chunk, err := range handle.Chunks(ctx) {
					if err != nil {
						cancel(err) // the others need not go on
						return
					}
					own += len(chunk.TokenIDs)
				}
				count.Add(int64(own))
			})
		}
	}
	reading.Wait()
	return count.Load(), context.Cause(ctx)
}
