package headrace

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// What an error means beside its code, for [errors.Is].
var (
	// ErrClosed says that the client or the session was closed.
	ErrClosed = errors.New("headrace: closed")
	// ErrMoved says that another stream attached the request: its results continue there.
	ErrMoved = errors.New("headrace: the request's results moved to another stream")
	// ErrProtocol says that the server broke the contract: an event was missing, came twice or out of order.
	ErrProtocol = errors.New("headrace: the server broke the contract")
)

// An Error is what a call, or one request of a session, ended with. Get it with [errors.As].
//
// It has a gRPC status, so that [status.Code] and [status.FromError] work too. Where the caller's context ended the
// call, [errors.Is] finds [context.Canceled] or [context.DeadlineExceeded] in it.
type Error struct {
	// Code is the status code.
	Code codes.Code
	// Message says what happened.
	Message string
	// Reason is the server's machine-readable reason, such as QUEUE_FULL. Empty: it gave none, or the error was made
	// here or on the way.
	Reason string
	// Metadata has more values that belong to the reason.
	Metadata map[string]string
	// Fields are the fields of the request that were refused.
	Fields []FieldViolation
	// RequestID is the request that failed. Empty: not known, or the call was about none.
	RequestID string
	// Partial is the output that had arrived before a streamed request failed. Nil: none.
	Partial *Result

	retryAfter *time.Duration
	neverAgain bool // the server said so
	status     *rpcstatus.Status
	cause      error
}

// A FieldViolation is one refused field of a request.
type FieldViolation struct {
	// Field is its path in the message, such as spec.sampling.top_p.
	Field string
	// Description says what to change.
	Description string
}

// Error tells the code, the reason and the message.
func (e *Error) Error() string {
	if e.Reason != "" {
		return fmt.Sprintf("headrace: %s (%s): %s", e.Code, e.Reason, e.Message)
	}
	return fmt.Sprintf("headrace: %s: %s", e.Code, e.Message)
}

// RetryAfter is when to try again, if the server said so.
func (e *Error) RetryAfter() (delay time.Duration, ok bool) {
	if e.retryAfter == nil {
		return 0, false
	}
	return *e.retryAfter, true
}

// GRPCStatus is the status as it was received, with all its details.
func (e *Error) GRPCStatus() *status.Status { return status.FromProto(e.status) }

// Unwrap is the context's error if the caller's context ended the call, or one of this package's own errors.
func (e *Error) Unwrap() error { return e.cause }

// newError makes an error that no server sent.
func newError(code codes.Code, cause error, format string, arguments ...any) *Error {
	message := fmt.Sprintf(format, arguments...)
	return &Error{
		Code:    code,
		Message: message,
		cause:   cause,
		status:  &rpcstatus.Status{Code: int32(code), Message: message},
	}
}

// invalid makes the error for a value that cannot be put in a message.
func invalid(field, description string) *Error {
	violation := &errdetails.BadRequest_FieldViolation{Field: field, Description: description}
	made := status.New(codes.InvalidArgument, field+": "+description)
	if detailed, err := made.WithDetails(&errdetails.BadRequest{
		FieldViolations: []*errdetails.BadRequest_FieldViolation{violation},
	}); err == nil {
		made = detailed
	}
	return fromStatus(made.Proto(), "")
}

// closedError makes the error for a use of what was closed.
func closedError(what string) *Error {
	return newError(codes.Unavailable, ErrClosed, "%s is closed", what)
}

// fromStatus reads a status and its details.
func fromStatus(received *rpcstatus.Status, requestID string) *Error {
	made := &Error{
		Code:      codes.Code(received.GetCode()),
		Message:   received.GetMessage(),
		RequestID: requestID,
		status:    received,
	}
	if made.Code > codes.Unauthenticated {
		made.Code = codes.Unknown // newer than this package; GRPCStatus has it
	}
	if made.Message == "" {
		made.Message = made.Code.String()
	}
	for _, packed := range received.GetDetails() {
		detail, err := packed.UnmarshalNew()
		if err != nil {
			continue // of a type that is not known here, or spoiled: not worth another error
		}
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			made.Reason, made.Metadata = detail.GetReason(), detail.GetMetadata()
		case *errdetails.BadRequest:
			for _, one := range detail.GetFieldViolations() {
				made.Fields = append(made.Fields, FieldViolation{one.GetField(), one.GetDescription()})
			}
		case *errdetails.RetryInfo:
			delay := detail.GetRetryDelay().AsDuration()
			made.retryAfter = &delay
		}
	}
	if made.Reason == reasonMoved {
		made.cause = ErrMoved
	}
	return made
}

const (
	reasonMoved            = "REQUEST_MOVED"
	reasonWrongInstance    = "WRONG_INSTANCE"
	reasonAdapterNotLoaded = "ADAPTER_NOT_LOADED"
)

// fromRPC reads the error of an RPC. Where the caller's context has ended, that is its cause.
func fromRPC(ctx context.Context, err error, target, requestID string) *Error {
	var own *Error
	if errors.As(err, &own) {
		return own
	}
	told, ok := status.FromError(err)
	if !ok {
		told = status.FromContextError(err)
	}
	made := fromStatus(told.Proto(), requestID)
	if made.Code == codes.Unavailable && made.Reason == "" && target != "" {
		made.Message = fmt.Sprintf("cannot reach a Headrace server at %s: %s", target, made.Message)
	}
	_, hasDeadline := ctx.Deadline()
	switch ended := ctx.Err(); {
	case made.Code == codes.DeadlineExceeded && hasDeadline && made.Reason == "":
		made.cause = context.DeadlineExceeded // the server's clock may have been the first
	case ended != nil && (made.Code == codes.Canceled || made.Code == codes.DeadlineExceeded):
		made.cause = ended
	}
	return made
}

// fromStream reads the error with which a stream ended. It is the one place that says when a stream was lost, whatever
// gRPC calls that: it is UNAVAILABLE. What a server itself says has a reason; what the caller's context ended is no loss.
func fromStream(ctx context.Context, err error, target, requestID string) *Error {
	made := fromRPC(ctx, err, target, requestID)
	lost := false
	switch made.Code {
	case codes.Canceled:
		lost = made.cause == nil
	case codes.Internal, codes.Unknown: // gRPC's words for most streams that a broken connection or a proxy has ended
		lost = made.Reason == ""
	case codes.ResourceExhausted, codes.PermissionDenied: // of two of RST_STREAM's codes
		lost = made.Reason == "" && strings.Contains(made.Message, "RST_STREAM")
	}
	if !lost {
		return made
	}
	lostError := newError(codes.Unavailable, nil, "the stream to %s was lost: %s", target, made.Message)
	lostError.RequestID = requestID
	return lostError
}

// contextError makes the error for a wait that the caller's context ended.
func contextError(ctx context.Context, requestID string) *Error {
	made := newError(codes.Canceled, ctx.Err(), "%v", context.Cause(ctx))
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		made = newError(codes.DeadlineExceeded, ctx.Err(), "%v", context.Cause(ctx))
	}
	made.RequestID = requestID
	return made
}

// copyFor is the error for one of several requests that it ended.
func (e *Error) copyFor(requestID string) *Error {
	made := *e
	made.RequestID, made.Partial = requestID, nil
	return &made
}
