// Command session runs prompts on one StreamResult session of a Headrace server and prints what comes back.
//
//	session --target localhost:50051 --max-tokens 32 'Once upon a time' 'The old mill'
//	session --target unix:/run/headrace.sock < prompts.txt
//
// The prompts are the arguments; without arguments, the lines of the standard input, each sent as it is read. After
// the last one the session is half-closed: the server finishes what was sent, then ends the stream. Ctrl-C cancels
// the live requests and waits for their ends; a second Ctrl-C ends the program at once.
//
// Every output is one line, prefixed with the request's number:
//
//	[1] " there was"
//	[1] finished: LENGTH (4 prompt tokens, 0 of them cached; 32 tokens)
//
// With --json there is one JSON line for each request instead, in the order of sending, when all have ended.
//
// The exit code is 0 if every request finished (or was cancelled by Ctrl-C), and 1 if one was refused or failed, the
// stream broke, or the server broke the contract: an event's number was missing or came twice, or a request had no
// end; 2 for wrong flags. What went wrong is told on the standard error. A prompt that is not UTF-8 and a line of more
// than 4 MiB are told and not sent, and make the exit code 1. When the output cannot be written, the program ends.
package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	headracev1 "headrace.dev/go/headrace/v1"
)

const (
	// The largest message that is received: one message carries a whole step's results, or more of them, merged, if
	// this program reads slowly. The library's default of 4 MiB is for smaller messages than that.
	maxMessageBytes = 64 << 20
	// The longest line of the standard input.
	maxLineBytes = 4 << 20
)

// options are the program's flags. What is absent is left to the server.
type options struct {
	target      string
	maxTokens   *uint32
	temperature *float32
	json        bool
}

func main() {
	opts, prompts := parseFlags()

	// RPCs get no context that a signal cancels: cancelling the stream counts as losing it, and the requests' ends
	// would not be received. The interrupt becomes `cancel`, and the second one finds no handler any more.
	interrupt := make(chan struct{})
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt)
	go func() {
		<-signals
		signal.Stop(signals)
		close(interrupt)
	}()

	if !run(opts, prompts, interrupt) {
		os.Exit(1)
	}
}

func parseFlags() (options, []string) {
	var opts options
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: session [flags] [prompt ...]\n"+
			"Without prompts, each line of the standard input is one.")
		flag.PrintDefaults()
	}
	flag.StringVar(&opts.target, "target", "localhost:50051", "the server's `address`: host:port or unix:/path")
	flag.BoolVar(&opts.json, "json", false, "print one JSON line for each request, at the end")
	flag.Func("max-tokens", "the most `tokens` to generate (default: the server's)", func(value string) error {
		parsed, err := strconv.ParseUint(value, 10, 32)
		if err != nil {
			return fmt.Errorf("not a number from 0 to %d", uint32(1<<32-1))
		}
		maxTokens := uint32(parsed)
		opts.maxTokens = &maxTokens
		return nil
	})
	flag.Func("temperature", "the sampling `temperature`; 0: greedy (default: the model's)", func(value string) error {
		parsed, err := strconv.ParseFloat(value, 32)
		if err != nil {
			return fmt.Errorf("not a number")
		}
		temperature := float32(parsed)
		opts.temperature = &temperature
		return nil
	})
	flag.Parse()
	return opts, flag.Args()
}

// run holds one session from its first request to its last event. It returns whether the stream and every request
// ended as they should.
func run(opts options, prompts []string, interrupt <-chan struct{}) bool {
	conn, err := grpc.NewClient(
		opts.target,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: time.Minute, Timeout: 20 * time.Second}),
	)
	if err != nil {
		fmt.Fprintln(os.Stderr, "session:", err)
		return false
	}
	defer conn.Close()

	// Ends the sender too, which may still be waiting for input when the server ends the stream.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()

	client := headracev1.NewGenerationServiceClient(conn)
	stream, err := client.StreamResult(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "session:", describe(err))
		return false
	}
	// Ids are made here, not by the server, so that a request can be cancelled before it was accepted.
	ledger := newLedger("session-"+strings.ToLower(rand.Text()[:10]), opts.json, os.Stdout, os.Stderr)

	inputs := make(chan string)
	go readPrompts(ctx, prompts, os.Stdin, inputs, ledger)
	go send(ctx, opts, client, stream, ledger, inputs, interrupt)

	err = receive(stream, ledger)
	if err != nil {
		fmt.Fprintln(os.Stderr, "session:", describe(err))
	}
	return ledger.close() && err == nil
}

// readPrompts sends the prompts, or where there are none the lines of in that are not empty, and closes inputs. What
// cannot be sent is told to the ledger: a message that is not UTF-8, or too large, would end the stream and so every
// request on it.
func readPrompts(ctx context.Context, prompts []string, in io.Reader, inputs chan<- string, ledger *ledger) {
	defer close(inputs)
	put := func(prompt, place string) bool {
		if !utf8.ValidString(prompt) {
			ledger.broken("session: %s is not UTF-8", place)
			return true
		}
		select {
		case inputs <- prompt:
			return true
		case <-ctx.Done():
			return false
		}
	}
	if len(prompts) > 0 {
		for i, prompt := range prompts {
			if !put(prompt, fmt.Sprintf("prompt %d", i+1)) {
				return
			}
		}
		return
	}
	lines := bufio.NewReader(in)
	for number := 1; ; number++ {
		place := fmt.Sprintf("line %d", number)
		line, isTooLong, err := readLine(lines)
		if isTooLong {
			ledger.broken("session: %s has more than %d bytes", place, maxLineBytes)
		} else if line != "" && !put(line, place) {
			return
		}
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			ledger.broken("session: standard input: %v", err)
			return
		}
	}
}

// readLine reads a line and takes its end off. Of one that is too long it keeps nothing.
func readLine(in *bufio.Reader) (line string, isTooLong bool, err error) {
	var kept []byte
	for {
		piece, err := in.ReadSlice('\n')
		if isTooLong = isTooLong || len(kept)+len(piece) > maxLineBytes; isTooLong {
			kept = nil
		} else {
			kept = append(kept, piece...)
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			line = strings.TrimSuffix(strings.TrimSuffix(string(kept), "\n"), "\r")
			return line, isTooLong, err
		}
	}
}
