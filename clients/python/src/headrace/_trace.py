"""The trace context of calls: what OpenTelemetry's current context has goes with each RPC, and with
each request of a session, so that the server's spans are children of the caller's.

Nothing of it is needed: an application without OpenTelemetry's API, or without a current span,
sends nothing.
"""

from __future__ import annotations

from headrace.v1.generation_pb2 import GenerationSpec

try:
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


def _current() -> dict[str, str]:
    carrier: dict[str, str] = {}
    if _PROPAGATOR is not None:
        _PROPAGATOR.inject(carrier)
    return carrier
