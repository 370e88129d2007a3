//go:build planted

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"headrace.dev/go/headrace"
)

// An act is what carries a command out.
type act = func(context.Context, *command) (map[string]any, error)

// plant wraps the driver's acts in the fault that the command line names: what a library (or a driver) would do that is
// wrong in one way. The suite's own tests see that the runner finds each.
func plant(d *driver) {
	faults := map[string]func(*driver, act) act{
		"drops-a-delta":         dropsADelta,
		"splits-a-character":    splitsACharacter,
		"swallows-an-error":     swallowsAnError,
		"foreign-errors":        foreignErrors,
		"answers-from-the-file": answersFromTheFile,
		"forgets-the-adapter":   forgetsTheAdapter,
		"leaks-a-stream":        leaksAStream,
		"resumes-late":          resumesLate,
	}
	if len(os.Args) != 2 || faults[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "conformance: name a fault")
		os.Exit(2)
	}
	d.act = faults[os.Args[1]](d, d.act)
}

func dropsADelta(_ *driver, do act) act {
	return func(ctx context.Context, c *command) (map[string]any, error) {
		ok, err := do(ctx, c)
		if chunks, _ := ok["chunks"].([]any); len(chunks) > 0 {
			ok["chunks"] = chunks[:len(chunks)-1]
		}
		return ok, err
	}
}

// splitsACharacter has each code point beyond the first 65,536 be two, as its halves are in UTF-16.
func splitsACharacter(_ *driver, do act) act {
	return func(ctx context.Context, c *command) (map[string]any, error) {
		ok, err := do(ctx, c)
		told, bad := json.Marshal(ok)
		if err != nil || bad != nil {
			return ok, err
		}
		var split strings.Builder
		for _, one := range string(told) {
			if one > 0xffff {
				split.WriteString("\ufffd\ufffd")
			} else {
				split.WriteRune(one)
			}
		}
		var made map[string]any
		return made, json.Unmarshal([]byte(split.String()), &made)
	}
}

func swallowsAnError(_ *driver, do act) act {
	return func(ctx context.Context, c *command) (map[string]any, error) {
		ok, err := do(ctx, c)
		var failure *headrace.Error
		if !errors.As(err, &failure) {
			return ok, err
		}
		told := tellResult(failure.Partial)
		if told == nil {
			told = map[string]any{}
		}
		told["chunks"], told["end"] = notNil(asList(ok["chunks"])), true
		return told, nil
	}
}

func asList(told any) []any {
	list, _ := told.([]any)
	return list
}

// foreignErrors lets the runtime's own error out.
func foreignErrors(_ *driver, do act) act {
	return func(ctx context.Context, c *command) (map[string]any, error) {
		ok, err := do(ctx, c)
		if err != nil && !errors.Is(err, errUnsupported) {
			err = errors.New("rpc error: code = Internal")
		}
		return ok, err
	}
}

// answersFromTheFile knows the vectors, and not what was sent.
func answersFromTheFile(_ *driver, do act) act {
	var vectors []struct {
		Steps []struct{ Events []any }
	}
	file, err := os.ReadFile("tests/conformance/vectors/output.json")
	if err == nil {
		err = json.Unmarshal(file, &vectors)
	}
	if err != nil {
		panic(err) // the suite starts drivers in the repository's root
	}
	known := ""
	for _, vector := range vectors {
		for _, step := range vector.Steps {
			for _, event := range step.Events {
				if members, _ := event.(map[string]any); known == "" && members["text"] != nil {
					known = members["text"].(string)
				}
			}
		}
	}
	return func(ctx context.Context, c *command) (map[string]any, error) {
		ok, err := do(ctx, c)
		for _, choice := range asList(ok["choices"]) {
			choice.(map[string]any)["text"] = known
		}
		return ok, err
	}
}

// forgetsTheAdapter leaves it out of what is sent: the base model would answer.
func forgetsTheAdapter(_ *driver, do act) act {
	return func(ctx context.Context, c *command) (map[string]any, error) {
		if c.Request != nil {
			c.Request.Adapter = ""
		}
		return do(ctx, c)
	}
}

// leaksAStream only says that it is closed.
func leaksAStream(_ *driver, do act) act {
	return func(ctx context.Context, c *command) (map[string]any, error) {
		if c.Op == "close_session" || c.Op == "close_client" {
			return nil, nil
		}
		return do(ctx, c)
	}
}

// resumesLate asks for the event after the one that is due.
func resumesLate(d *driver, do act) act {
	return func(ctx context.Context, c *command) (map[string]any, error) {
		if c.Op != "resume" {
			return do(ctx, c)
		}
		old, session := named(d, d.handles, c.Of.text), named(d, d.sessions, c.Session)
		options := &headrace.AttachOptions{From: old.NextSeq() + 1, Choices: 1}
		made, err := session.Attach(ctx, old.RequestID(), options)
		return d.begun(c, made, err)
	}
}
