"""The trace context of calls.

OpenTelemetry's current context is sent with each RPC, and with each request of a session, so that
the server's spans are children of the caller's. This is optional: without OpenTelemetry's API or
without a current span, nothing is sent.
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
    """Returns the metadata with the current trace context added, unless it has a `traceparent`."""
    found = _current()
    if not found or any(key == "traceparent" for key, _ in metadata):
        return metadata
    return (*metadata, *found.items())


def label_trace(spec: GenerationSpec) -> None:
    """Puts the current trace context in the labels of a session's request.

    A session's single RPC carries requests of many callers, so its metadata cannot hold the
    context. Labels that the server would refuse are left out.
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
    """Opens the span of an HTTP request being served. The span is current within the block.

    Its parent is the span named by `traceparent` and `tracestate` in the carrier. Yields a function
    that records the answer's status.
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
