package headrace

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	headracev1 "headrace.dev/go/headrace/v1"
)

// A Control does what operators do at a client's one server: it says which adapters requests may name. Its calls are not
// tried again.
type Control struct{ client *Client }

// Control is for operators. Its calls fail if the client has several servers: make a client of one's address.
func (c *Client) Control() Control { return Control{c} }

// LoadOptions are the options of [Control.LoadAdapter].
type LoadOptions struct {
	// Pinned says that the adapter stays when others need its memory.
	Pinned bool
	// Replace says that it may take the place of a loaded one with this name. Requests that were accepted before go on with
	// what they began with.
	Replace bool
}

// LoadAdapter loads an adapter, and returns when requests may name it: the adapter, and the names of those that had to
// go because it needed the memory. The source is the name of its directory below the server's --adapter-root; options may
// be nil.
//
// The code is AlreadyExists if the name is taken, FailedPrecondition if the adapter cannot be served, whose message gives
// the reason, and ResourceExhausted if there is no room.
func (o Control) LoadAdapter(
	ctx context.Context, name, source string, options *LoadOptions,
) (*headracev1.LoadAdapterResponse, error) {
	message := &headracev1.LoadAdapterRequest{Name: name, Source: source}
	if options != nil {
		message.Pinned, message.Replace = options.Pinned, options.Replace
	}
	return control(ctx, o, func(
		ctx context.Context, at *server, with ...grpc.CallOption,
	) (*headracev1.LoadAdapterResponse, error) {
		return at.control.LoadAdapter(ctx, message, with...)
	})
}

// UnloadAdapter unloads an adapter, so that requests can no longer name it, and returns how many have it. These go on to
// their end, or, where grace is not nil, are cancelled after that time; [Ptr] makes one. The code is NotFound if no
// adapter has the name.
func (o Control) UnloadAdapter(ctx context.Context, name string, grace *time.Duration) (live uint64, err error) {
	message := &headracev1.UnloadAdapterRequest{Name: name}
	if grace != nil {
		message.Timeout = durationpb.New(*grace)
	}
	answer, err := control(ctx, o, func(
		ctx context.Context, at *server, with ...grpc.CallOption,
	) (*headracev1.UnloadAdapterResponse, error) {
		return at.control.UnloadAdapter(ctx, message, with...)
	})
	return answer.GetLiveRequests(), err
}

// control makes an operator's call, once.
func control[A any](
	ctx context.Context, o Control, send func(context.Context, *server, ...grpc.CallOption) (A, error),
) (answer A, err error) {
	if o.client.pool.many {
		return answer, invalid("target", "names several servers; control is of one, so make a client of its address")
	}
	once := newAttempts(o.client.pool, nil, 0, false)
	answer, _, err = call[A]{send: send, isShort: true}.run(ctx, o.client, once, "")
	return answer, err
}
