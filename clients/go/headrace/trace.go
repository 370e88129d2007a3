package headrace

import (
	"context"

	"go.opentelemetry.io/otel/propagation"
	"google.golang.org/grpc/metadata"

	headracev1 "headrace.dev/go/headrace/v1"
)

// The contract's bounds of labels.
const (
	maxLabels     = 16
	maxLabelBytes = 128
)

// tracePairs are the W3C trace context of a call, if its context has a span. What the caller (or an instrumentation of
// gRPC's) has put in the metadata is not sent twice.
func tracePairs(ctx context.Context) []string {
	if sent, has := metadata.FromOutgoingContext(ctx); has && len(sent.Get("traceparent")) > 0 {
		return nil
	}
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	var pairs []string
	for key, value := range carrier {
		pairs = append(pairs, key, value)
	}
	return pairs
}

// label puts the trace context in the labels of a request that goes over a session, whose one call brings requests of
// many callers.
//
// What the server would refuse as a label is left out: the request matters more than its trace.
func label(ctx context.Context, spec *headracev1.GenerationSpec) {
	for _, one := range spec.GetLabels() {
		if one.GetName() == "traceparent" {
			return
		}
	}
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	for _, name := range (propagation.TraceContext{}).Fields() {
		value := carrier.Get(name)
		if value != "" && len(value) <= maxLabelBytes && len(spec.GetLabels()) < maxLabels {
			spec.Labels = append(spec.Labels, &headracev1.Label{Name: name, Value: value})
		}
	}
}
