// Command conformance is the driver of this library for the suite in tests/conformance: it reads commands from the
// standard input, a JSON object a line, carries them out with the library, and writes an answer for each. It decides
// nothing and compares nothing; tests/conformance/README.md has the protocol.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"sync"
	"time"

	"headrace.dev/go/headrace"
)

func main() {
	d := newDriver(os.Stdout)
	plant(d)
	d.tell(map[string]any{"ready": map[string]any{"language": "go", "protocol": 1}})
	lines := bufio.NewReaderSize(os.Stdin, 1<<20)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			d.take(line)
		}
		if err != nil {
			break
		}
	}
	d.close()
}

// A driver has the clients, sessions and handles that the runner named, and the commands that wait.
type driver struct {
	act func(context.Context, *command) (map[string]any, error) // carries a command out
	out sync.Mutex
	to  io.Writer

	mu       sync.Mutex
	clients  map[string]*headrace.Client
	sessions map[string]*headrace.Session
	handles  map[string]*headrace.Handle
	streams  map[string]*stream
	waiting  map[int64]context.CancelFunc
}

// A stream is read piece by piece: its iterator goes on where the last read ended.
type stream struct {
	*headrace.Stream
	cancel context.CancelFunc
	next   func() (headrace.Chunk, error, bool)
	stop   func()
}

func newDriver(to io.Writer) *driver {
	d := &driver{
		to:       to,
		clients:  make(map[string]*headrace.Client),
		sessions: make(map[string]*headrace.Session),
		handles:  make(map[string]*headrace.Handle),
		streams:  make(map[string]*stream),
		waiting:  make(map[int64]context.CancelFunc),
	}
	d.act = d.do
	return d
}

func (d *driver) tell(answer map[string]any) {
	var line bytes.Buffer
	encoder := json.NewEncoder(&line)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(answer); err != nil {
		panic(err) // nothing here cannot be JSON
	}
	d.out.Lock()
	defer d.out.Unlock()
	if _, err := d.to.Write(line.Bytes()); err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(1)
	}
}

var errUnsupported = errors.New("the driver has no such command or member")

// Commands that wait run beside the others; the rest take effect in the order of their lines.
var waits = map[string]bool{
	"generate": true, "read": true, "result": true, "leave": true, "close_session": true, "close_client": true,
	"batch": true, "add_request": true, "get_result": true, "cancel_ids": true,
	"load_adapter": true, "unload_adapter": true, "adapters": true,
}

func (d *driver) take(line []byte) {
	var c command
	decoder := json.NewDecoder(bytes.NewReader(line))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&c); err != nil {
		var named struct{ ID int64 }
		_ = json.Unmarshal(line, &named)
		d.tell(map[string]any{"id": named.ID, "unsupported": err.Error()})
		return
	}
	ctx, cancel := context.WithCancel(c.context())
	d.mu.Lock()
	d.waiting[c.ID] = cancel
	d.mu.Unlock()
	_, ofStream := d.streams[c.Handle]
	if waits[c.Op] || c.Op == "cancel" && ofStream {
		go d.answer(ctx, &c)
	} else {
		d.answer(ctx, &c)
	}
}

func (d *driver) answer(ctx context.Context, c *command) {
	ok, err := d.act(ctx, c)
	d.mu.Lock()
	if cancel := d.waiting[c.ID]; cancel != nil {
		delete(d.waiting, c.ID)
		if c.Op != "stream" && c.Op != "open_session" && c.Op != "submit" && c.Op != "attach" && c.Op != "resume" {
			cancel()
		}
	}
	d.mu.Unlock()
	answer := map[string]any{"id": c.ID}
	switch {
	case errors.Is(err, errUnsupported):
		answer["unsupported"] = err.Error()
	case err != nil:
		answer["error"] = tellError(err)
		if c.Op == "read" {
			answer["chunks"] = ok["chunks"]
		}
	case ok == nil:
		answer["ok"] = map[string]any{}
	default:
		answer["ok"] = ok
	}
	d.tell(answer)
}

func (d *driver) close() {
	d.mu.Lock()
	clients := d.clients
	d.clients = nil
	d.mu.Unlock()
	for _, client := range clients {
		_ = client.Close()
	}
}

// named finds what the runner has given a name.
func named[K comparable, T any](d *driver, in map[K]T, name K) T {
	d.mu.Lock()
	defer d.mu.Unlock()
	return in[name]
}

func put[T any](d *driver, in map[string]T, name string, one T) {
	d.mu.Lock()
	defer d.mu.Unlock()
	in[name] = one
}

func (d *driver) do(ctx context.Context, c *command) (map[string]any, error) {
	session, handle := named(d, d.sessions, c.Session), named(d, d.handles, c.Handle)
	switch c.Op {
	case "abandon":
		named(d, d.waiting, *c.Of.number)()
		return nil, nil
	case "submit":
		made, err := session.Submit(ctx, c.Request.made())
		return d.begun(c, made, err)
	case "attach":
		made, err := session.Attach(ctx, c.RequestID, &headrace.AttachOptions{From: c.FromSeq, Choices: c.N})
		return d.begun(c, made, err)
	case "resume":
		made, err := session.Resume(ctx, named(d, d.handles, c.Of.text))
		return d.begun(c, made, err)
	case "read":
		return d.read(ctx, c, handle)
	case "result":
		return d.result(ctx, c, handle)
	case "cancel":
		if handle != nil {
			handle.Cancel()
			return nil, nil
		}
		return nil, named(d, d.streams, c.Handle).Cancel(ctx)
	case "leave":
		return nil, named(d, d.streams, c.Handle).Close()
	case "session":
		told := map[string]any{"lease_ms": nil, "live": session.Live()}
		if lease, granted := session.Lease(); granted {
			told["lease_ms"] = lease.Milliseconds()
		}
		return told, nil
	case "close_session":
		if c.Cancel {
			return nil, session.Close()
		}
		return nil, session.Finish(ctx)
	}
	return d.ask(ctx, c)
}

// ask does what a client is asked for.
func (d *driver) ask(ctx context.Context, c *command) (map[string]any, error) {
	client := named(d, d.clients, c.Client)
	switch c.Op {
	case "connect":
		made, err := c.connect()
		if err == nil {
			put(d, d.clients, c.Client, made)
		}
		return nil, err
	case "close_client":
		return nil, client.Close()
	case "generate":
		result, err := client.Generate(ctx, c.Request.made())
		return tellResult(result), err
	case "stream":
		d.stream(ctx, client, c)
		return nil, nil
	case "open_session":
		made, err := client.Session(ctx, c.sessionOptions())
		if err == nil {
			put(d, d.sessions, c.Session, made)
		}
		return nil, err
	case "batch":
		return map[string]any{"outcomes": tellOutcomes(client.Batch(ctx, c.requests(), c.batchOptions()))}, nil
	case "add_request":
		accepted, err := client.Add(ctx, c.Request.made())
		if err != nil {
			return nil, err
		}
		return map[string]any{"request_id": accepted.RequestID}, nil
	case "get_result":
		ctx, cancel := c.bounded(ctx)
		defer cancel()
		result, err := client.Result(ctx, c.RequestID)
		return tellResult(result), err
	case "cancel_ids":
		statuses, err := client.Cancel(ctx, c.RequestIDs...)
		told := make(map[string]string)
		for id, status := range statuses {
			told[id] = status.String()
		}
		return map[string]any{"statuses": told}, err
	}
	return operate(ctx, client, c)
}

// operate does what an operator asks for, and lists what that comes to.
func operate(ctx context.Context, client *headrace.Client, c *command) (map[string]any, error) {
	switch c.Op {
	case "load_adapter":
		options := &headrace.LoadOptions{Pinned: c.Pinned, Replace: c.Replace}
		answer, err := client.Control().LoadAdapter(ctx, c.Name, c.Source, options)
		return map[string]any{"adapter": tellAdapter(answer.GetAdapter()), "evicted": notNil(answer.GetEvicted())}, err
	case "unload_adapter":
		var grace *time.Duration
		if c.TimeoutMS != nil {
			grace = headrace.Ptr(milliseconds(*c.TimeoutMS))
		}
		live, err := client.Control().UnloadAdapter(ctx, c.Name, grace)
		return map[string]any{"live": live}, err
	case "adapters":
		told := []any{}
		found, err := client.Adapters(ctx)
		for _, one := range found {
			told = append(told, tellAdapter(one))
		}
		return map[string]any{"adapters": told}, err
	}
	return nil, errUnsupported
}

func (d *driver) begun(c *command, made *headrace.Handle, err error) (map[string]any, error) {
	if err != nil {
		return nil, err
	}
	put(d, d.handles, c.Handle, made)
	return map[string]any{"request_id": made.RequestID()}, nil
}

func (d *driver) stream(ctx context.Context, client *headrace.Client, c *command) {
	ctx, cancel := c.untilDeadline(ctx)
	made := &stream{Stream: client.Stream(ctx, c.Request.made()), cancel: cancel}
	made.next, made.stop = iter.Pull2(made.Chunks())
	put(d, d.streams, c.Handle, made)
	go func() { _ = made.Start() }() // what is wrong, the next read tells
}

func (d *driver) read(ctx context.Context, c *command, handle *headrace.Handle) (map[string]any, error) {
	chunks := []any{}
	told := func(end bool) map[string]any { return map[string]any{"chunks": chunks, "end": end} }
	isAll := func() bool { return c.Chunks != nil && len(chunks) >= *c.Chunks }
	if isAll() {
		return told(false), nil
	}
	if handle != nil {
		for chunk, err := range handle.Chunks(ctx) {
			if err != nil {
				return map[string]any{"chunks": chunks}, err
			}
			chunks = append(chunks, tellChunk(chunk))
			if isAll() {
				return told(false), nil
			}
		}
		return told(true), nil
	}
	from := named(d, d.streams, c.Handle)
	defer context.AfterFunc(ctx, from.cancel)()
	for !isAll() {
		chunk, err, more := from.next()
		if err != nil {
			return map[string]any{"chunks": chunks}, err
		}
		if !more {
			return told(true), nil
		}
		chunks = append(chunks, tellChunk(chunk))
	}
	return told(false), nil
}

func (d *driver) result(ctx context.Context, c *command, handle *headrace.Handle) (map[string]any, error) {
	if handle == nil {
		if c.TimeoutMS != nil {
			return nil, errUnsupported // the context of a stream is the request's
		}
		from := named(d, d.streams, c.Handle)
		defer context.AfterFunc(ctx, from.cancel)()
		result, err := from.Result()
		return tellResult(result), err
	}
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	result, err := handle.Result(ctx)
	return tellResult(result), err
}
