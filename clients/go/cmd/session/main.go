// Command session runs prompts on one session of a Headrace server and prints what comes back.
//
//	session --target localhost:50051 --max-tokens 32 'Once upon a time' 'The old mill'
//	session < prompts.txt
//
// The prompts are the arguments; without arguments, the lines of the standard input, each sent as it is read. Every line
// of the output is prefixed with its request's number:
//
//	[1] " there was"
//	[1] length, 32 tokens
//
// Ctrl-C cancels the live requests and waits for their ends; a second one ends the program at once. The exit code is 1 if
// a request was refused or failed.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"iter"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"

	"headrace.dev/go/headrace"
)

// The longest line of the standard input.
const maxLineBytes = 4 << 20

func main() {
	target := flag.String("target", "", "the server's `address` (default: HEADRACE_TARGET, else "+headrace.DefaultTarget+")")
	maxTokens := flag.Int("max-tokens", 32, "the most `tokens` to generate")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	context.AfterFunc(ctx, stop) // the second one finds no handler
	prompts := slices.Values(flag.Args())
	if flag.NArg() == 0 {
		prompts = lines
	}
	if err := run(ctx, *target, *maxTokens, prompts); err != nil {
		fmt.Fprintln(os.Stderr, "session:", err)
		os.Exit(1)
	}
}

// lines are those of the standard input.
func lines(yield func(string) bool) {
	scanner := bufio.NewScanner(os.Stdin)
	scanner.Buffer(nil, maxLineBytes)
	for scanner.Scan() {
		if !yield(scanner.Text()) {
			return
		}
	}
	if err := scanner.Err(); err != nil {
		fmt.Fprintln(os.Stderr, "session: standard input:", err)
	}
}

func run(ctx context.Context, target string, maxTokens int, prompts iter.Seq[string]) error {
	client, err := headrace.NewClient(target)
	if err != nil {
		return err
	}
	defer client.Close()
	// The interrupt is the requests' end, not the session's: their ends are to be received.
	session, err := client.Session(context.WithoutCancel(ctx), nil)
	if err != nil {
		return err
	}
	defer session.Close()

	var out printer
	var printing sync.WaitGroup
	number := 0
	for prompt := range prompts {
		number++
		own := number
		handle, err := session.Submit(ctx, &headrace.Request{Text: prompt, Temperature: headrace.Ptr(0.0), MaxTokens: &maxTokens})
		if err != nil {
			out.failed(own, err)
			break // the session has ended
		}
		printing.Go(func() { out.follow(own, handle) })
	}
	printing.Wait()
	if out.failures > 0 {
		return fmt.Errorf("%d of %d requests failed", out.failures, number)
	}
	return nil
}

// A printer writes whole lines, of several requests at the same time.
type printer struct {
	mu       sync.Mutex
	failures int
}

// follow prints one request to its end.
func (p *printer) follow(number int, handle *headrace.Handle) {
	for chunk, err := range handle.Chunks(context.Background()) {
		if err != nil {
			p.failed(number, err)
			return
		}
		if chunk.Text != "" {
			p.line(number, quote(chunk.Text))
		}
	}
	result, err := handle.Result(context.Background())
	if err != nil {
		p.failed(number, err)
		return
	}
	p.line(number, fmt.Sprintf("%s, %d tokens", result.FinishReason(), result.Usage.CompletionTokens))
}

func (p *printer) line(number int, text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, err := fmt.Printf("[%d] %s\n", number, text); err != nil {
		os.Exit(1) // nobody would learn what follows
	}
}

func (p *printer) failed(number int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failures++
	fmt.Fprintf(os.Stderr, "[%d] %v\n", number, err)
	var failure *headrace.Error
	if !errors.As(err, &failure) {
		return
	}
	for _, field := range failure.Fields {
		fmt.Fprintf(os.Stderr, "    %s: %s\n", field.Field, field.Description)
	}
	if delay, told := failure.RetryAfter(); told {
		fmt.Fprintf(os.Stderr, "    try again after %s\n", delay)
	}
}

// quote keeps a piece of text on one line.
func quote(text string) string {
	var quoted strings.Builder
	encoder := json.NewEncoder(&quoted)
	encoder.SetEscapeHTML(false)
	if encoder.Encode(text) != nil {
		return text
	}
	return strings.TrimSuffix(quoted.String(), "\n")
}
