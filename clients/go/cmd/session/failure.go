package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/status"
)

// describe makes an RPC's error readable. It carries the same google.rpc.Status as a rejection or a Failed event.
func describe(err error) string {
	if rpc, ok := status.FromError(err); ok {
		return describeStatus(rpc.Proto())
	}
	return err.Error()
}

// describeStatus tells a status in words: its code and message, then a line for each detail.
func describeStatus(s *rpcstatus.Status) string {
	lines := append([]string{codeName(s) + ": " + s.GetMessage()}, detailLines(s)...)
	return strings.Join(lines, "\n    ")
}

func codeName(s *rpcstatus.Status) string {
	return code.Code(s.GetCode()).String()
}

// detailLines tells each of a status's details in a line: what Headrace sends in words, others by the name of their
// type.
func detailLines(s *rpcstatus.Status) []string {
	lines := []string{}
	for _, packed := range s.GetDetails() {
		detail, err := packed.UnmarshalNew()
		if err != nil {
			lines = append(lines, "detail: "+string(packed.MessageName()))
			continue
		}
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			line := fmt.Sprintf("reason: %s (%s)", detail.GetReason(), detail.GetDomain())
			for _, key := range slices.Sorted(maps.Keys(detail.GetMetadata())) {
				line += fmt.Sprintf(" %s=%s", key, detail.GetMetadata()[key])
			}
			lines = append(lines, line)
		case *errdetails.BadRequest:
			for _, violation := range detail.GetFieldViolations() {
				lines = append(lines, fmt.Sprintf("field: %s: %s", violation.GetField(), violation.GetDescription()))
			}
		case *errdetails.RetryInfo:
			seconds := detail.GetRetryDelay().AsDuration().Seconds()
			lines = append(lines, fmt.Sprintf("retry after: %ss", strconv.FormatFloat(seconds, 'f', -1, 64)))
		default:
			lines = append(lines, "detail: "+string(packed.MessageName()))
		}
	}
	return lines
}
