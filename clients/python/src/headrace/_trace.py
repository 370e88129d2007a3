"""The trace context of calls: what OpenTelemetry's current context has goes with each RPC, and with
each request of a session, so that the server's spans are children of the caller's.

Nothing of it is needed: an application without OpenTelemetry's API, or without a current span,
sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from headrace.v1.generation_pb2 import GenerationSpec

try:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:  # it is no dependency of this package
    _PROPAGATOR = None
else:
    _PROPAGATOR = TraceContextTextMapPropagator()

_MOST_LABELS = 16  # the contract's bounds
_MOST_BYTES = 128

Metadata = tuple[tuple[str, str | bytes], ...]


def with_trace(metadata: Metadata) -> Metadata:
    """Metadata with the current trace context; the user's own stays."""
    found = _current()
    if not found or any(key == "traceparent" for key, _ in metadata):
        return metadata
    return (*metadata, *found.items())


def label_trace(spec: GenerationSpec) -> None:
    """Puts the current trace context in the labels of a request that goes over a session, whose one
    RPC brings requests of many callers. What would be refused as a label is left out.
    """
    if any(label.name == "traceparent" for label in spec.labels):
        return
    for name, value in _current().items():
        if len(spec.labels) < _MOST_LABELS and len(value.encode()) <= _MOST_BYTES:
            spec.labels.add(name=name, value=value)


@contextmanager
def serving_span(
    method: str, route: str, carrier: Mapping[str, str]
) -> Iterator[Callable[[int], None]]:
    """The span of a request over HTTP that is served, current in its block, and a child of the span
    that `traceparent` and `tracestate` in the carrier name. Gives what takes the answer's status.
    """
    if _PROPAGATOR is None:
        yield lambda status: None
        return
    with trace.get_tracer("headrace.openai").start_as_current_span(
        f"{method} {route}",
        context=_PROPAGATOR.extract(carrier),
        kind=trace.SpanKind.SERVER,
        attributes={"http.request.method": method, "http.route": route},
    ) as span:

        def tell(status: int) -> None:
            span.set_attribute("http.response.status_code", status)
            if status >= 500:
                span.set_status(trace.StatusCode.ERROR)

        yield tell


def _current() -> dict[str, str]:
    carrier: dict[str, str] = {}
    if _PROPAGATOR is not None:
        _PROPAGATOR.inject(carrier)
    return carrier
