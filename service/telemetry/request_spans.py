"""Spans: one for each RPC, and one for each request.

    the caller's span ─┬─▶ the RPC's span     from its arrival to its end
                       └─▶ a request's span   from its start to its last token; linked to the RPC's

A session is one RPC that may last for days, so its requests' spans are not children of its span.
Their parent is the context that came with the RPC, or the one that the request itself brings in the
labels `traceparent` and `tracestate`.

`engine.telemetry.spans` ends a request's span and adds its phases. A caller's mistake is not a
server error: only the codes that the conventions name mark a span as an error, and no span carries
a traceback. Spans contain prompts and outputs only if the operator opts in.

`service.telemetry.call_spans` begins and ends the spans of RPCs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import grpc
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine.contract.outputs import StepOutputs
from engine.telemetry.instruments import CHAT, TEXT
from engine.telemetry.spans import Decode, LiveSpans, RequestSpan, attributes_of, set_error
from service.errors.call_outcome import SERVER_FAULTS
from service.errors.status_table import code_of, reason_of
from service.logs.context import current_trace

_W3C: Final = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class _Rpc:
    """The RPC of this task: its span, and the context that its caller sent."""

    span: Span
    parent: Context


_current: ContextVar[_Rpc | None] = ContextVar("rpc", default=None)


class Spans:
    """Makes all spans. The methods run on the event loop."""

    def __init__(self, provider: TracerProvider, *, content: bool = False) -> None:
        """Create the spans. `content` says whether they contain prompts and outputs."""
        self.provider = provider
        self._tracer = provider.get_tracer("headrace")
        self._content = content
        self._live = LiveSpans()
        self.model = ""

    def loaded(self, model: str, decode: Decode | None) -> None:
        """Record that the model is loaded under this name. `decode` converts token ids to text."""
        self.model = model
        self._live.decode = decode if self._content else None

    # RPCs

    def enter(self, context: Any) -> None:
        """Record the RPC of this task, whose span is the current one."""
        metadata = {
            str(key): value
            for key, value in context.invocation_metadata() or ()
            if isinstance(value, str)
        }
        span = trace.get_current_span()
        _current.set(_Rpc(span, propagate.extract(metadata, context=Context())))
        ids = span.get_span_context()
        current_trace.set((trace.format_trace_id(ids.trace_id), trace.format_span_id(ids.span_id)))

    def leave(self, code: grpc.StatusCode, reason: str = "") -> None:
        """Set on the span how the RPC of this task ended. `reason` is ErrorInfo's, or empty."""
        span = trace.get_current_span()
        span.set_attribute("rpc.grpc.status_code", code.value[0])
        _set_refusal(span, reason)
        if code in SERVER_FAULTS:
            set_error(span, code.name)

    # Requests

    def begin(
        self, request_id: str, labels: Mapping[str, str], *, identity: str, is_chat: bool
    ) -> ServedSpan:
        """Begin the span of a request that is being started."""
        rpc = _current.get()
        parent = rpc.parent if rpc is not None else Context()
        if "traceparent" in labels:
            parent = _W3C.extract(dict(labels), parent)
        links = [] if rpc is None else [Link(rpc.span.get_span_context())]
        operation = CHAT if is_chat else TEXT
        span = self._tracer.start_span(
            f"{operation} {self.model}",
            parent,
            SpanKind.INTERNAL,
            {
                **attributes_of(operation, self.model, request_id),
                "headrace.caller": identity,
                **{f"headrace.label.{name}": value for name, value in labels.items()},
            },
            links,
        )
        return ServedSpan(span, self._live)

    def on_step(self, step: StepOutputs) -> None:
        """Record a step's outputs: the ends of requests, and the tokens if content is enabled."""
        self._live.on_step(step)

    def close(self) -> None:
        """End the spans of requests that are lost with the server."""
        self._live.close()


class ServedSpan(RequestSpan):
    """The span of a caller's request."""

    __slots__ = ()

    def refused(self, error: BaseException) -> None:
        """End the span, because the request was not accepted or its caller left meanwhile."""
        self.forget()
        if isinstance(error, Exception):
            _set_refusal(self.span, reason_of(error))
            if (code := code_of(error)) in SERVER_FAULTS:
                set_error(self.span, code.name)
        self.span.end()


def _set_refusal(span: Span, reason: str) -> None:
    if reason:
        span.set_attribute("headrace.refusal.reason", reason)
