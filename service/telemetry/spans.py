"""Spans: one for each RPC, and one for each request.

    the caller's span ─┬─▶ the RPC's span     from its arrival to its end
                       └─▶ a request's span   from its start to its last token; linked to the RPC's

A session is one RPC that may last for days, so its requests are not its span's children: they
belong to whoever wanted them. Their parent is the context that came with the RPC, or the one that
the request itself brings in the labels `traceparent` and `tracestate`.

A request's span is made from the engine's own times when the request ends, so nothing is done for
it at a token. Its events are the phases: accepted, scheduled, first token, last token. What callers
do wrong is no error of a server: only the codes that the conventions name mark a span as an error,
and no span carries a traceback. Prompts and outputs are on spans only if the operator opts in.

The spans of RPCs are begun and ended by `service.telemetry.calls`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import grpc
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine.outputs import Finish, FinishReason, RequestOutput, StepOutputs
from engine.request import GenerationRequest
from engine.types import RequestId, TokenId
from service.interceptors import SERVER_FAULTS
from service.logs.context import current_trace
from service.status_table import code_of, reason_of

MAX_CONTENT_TOKENS = 16_384
"""At most this many tokens of a prompt, and of each output, are on a span."""
_W3C: Final = TraceContextTextMapPropagator()
_Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class _Rpc:
    """The RPC of this task: its span, and the context that its caller sent."""

    span: Span
    parent: Context


_current: ContextVar[_Rpc | None] = ContextVar("rpc", default=None)


class Spans:
    """Makes all spans. Its methods run on the event loop."""

    def __init__(self, provider: TracerProvider, *, content: bool = False) -> None:
        """`content`: whether prompts and outputs are on spans."""
        self.provider = provider
        self._tracer = provider.get_tracer("headrace")
        self._content = content
        self._live: dict[RequestId, RequestSpan] = {}
        self.model = ""
        self.decode: _Decode | None = None

    def loaded(self, model: str, decode: _Decode | None) -> None:
        """Note that the model is loaded, under this name. `decode`: turns token ids into text."""
        self.model = model
        self.decode = decode if self._content else None

    # RPCs

    def enter(self, context: Any) -> None:
        """Note the RPC of this task, whose span is the current one."""
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
        """Set on the span how the RPC of this task ends. `reason`: ErrorInfo's, or empty."""
        span = trace.get_current_span()
        span.set_attribute("rpc.grpc.status_code", code.value[0])
        _set_refusal(span, reason)
        if code in SERVER_FAULTS:
            _set_error(span, code.name)

    # Requests

    def begin(
        self, request_id: str, labels: Mapping[str, str], *, identity: str, is_chat: bool
    ) -> RequestSpan:
        """Begin the span of a request that is being started."""
        rpc = _current.get()
        parent = rpc.parent if rpc is not None else Context()
        if "traceparent" in labels:
            parent = _W3C.extract(dict(labels), parent)
        links = [] if rpc is None else [Link(rpc.span.get_span_context())]
        operation = "chat" if is_chat else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {self.model}",
            parent,
            SpanKind.INTERNAL,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "headrace",
                "gen_ai.request.model": self.model,
                "gen_ai.response.model": self.model,
                "gen_ai.response.id": request_id,
                "headrace.request.id": request_id,
                "headrace.caller": identity,
                **{f"headrace.label.{name}": value for name, value in labels.items()},
            },
            links,
        )
        return RequestSpan(span, self._live, self.decode)

    def on_step(self, step: StepOutputs) -> None:
        """Note a step's outputs: the ends of requests, and tokens where content is wanted."""
        live, decodes = self._live, self.decode is not None
        if not live:
            return
        for output in step.outputs:
            if (output.finish is not None or decodes) and output.request_id in live:
                live[output.request_id].push(output)

    def close(self) -> None:
        """End the spans of requests that are lost with the server."""
        for span in list(self._live.values()):
            span.lost()


@dataclass(slots=True)
class _Choice:
    tokens: list[TokenId] = field(default_factory=list)
    finish: Finish | None = None


class RequestSpan:
    """The span of one request."""

    __slots__ = ("_choices", "_decode", "_engine_id", "_live", "_offset_ns", "_prompt", "_span")

    def __init__(
        self, span: Span, live: dict[RequestId, RequestSpan], decode: _Decode | None
    ) -> None:
        self._span = span
        self._live = live
        self._decode = decode
        self._engine_id: RequestId | None = None
        self._prompt: list[int] = []
        self._choices: dict[int, _Choice] = {}
        # Of the wall clock to the engine's, which counts from an arbitrary time.
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def submitted(self, request: GenerationRequest) -> None:
        """Note that the request goes to the engine; `Spans.on_step` ends the span."""
        span, sampling = self._span, request.sampling
        if not span.is_recording():  # it is not sampled
            return
        self._engine_id = request.request_id
        self._live[request.request_id] = self
        attributes: dict[str, int | float] = {
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.usage.input_tokens": len(request.prompt),
        }
        if request.n > 1:
            attributes["gen_ai.request.choice.count"] = request.n
        if request.stop.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = request.stop.max_tokens
        span.set_attributes(attributes)
        if self._decode is not None:
            self._prompt = list(islice(request.prompt, MAX_CONTENT_TOKENS))

    def refused(self, error: BaseException) -> None:
        """End it: the request was not accepted, or its caller left meanwhile."""
        self._forget()
        if isinstance(error, Exception):
            _set_refusal(self._span, reason_of(error))
            if (code := code_of(error)) in SERVER_FAULTS:
                _set_error(self._span, code.name)
        self._span.end()

    def push(self, output: RequestOutput) -> None:
        """Note one step's output of one choice."""
        choice = self._choices.setdefault(output.choice, _Choice())
        if self._decode is not None and len(choice.tokens) < MAX_CONTENT_TOKENS:
            choice.tokens.extend(output.token_ids)
        if output.finish is not None:
            choice.finish = output.finish
            if output.ends_request:
                self._end(output.finish)

    def lost(self) -> None:
        """End it: the server ends."""
        self._forget()
        _set_error(self._span, "unavailable")
        self._span.end()

    def _forget(self) -> None:
        if self._engine_id is not None:
            self._live.pop(self._engine_id, None)

    def _end(self, finish: Finish) -> None:
        self._forget()
        span, timings, usage = self._span, finish.timings, finish.usage
        finishes = [one.finish for _, one in sorted(self._choices.items()) if one.finish]
        span.set_attributes(
            {
                "gen_ai.response.finish_reasons": [one.reason.value for one in finishes],
                "gen_ai.usage.output_tokens": sum(one.usage.completion_tokens for one in finishes),
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "headrace.request.preemptions": timings.preemptions,
            }
        )
        for name, at in (
            ("accepted", timings.arrival),
            ("scheduled", timings.first_scheduled),
            ("first_token", timings.first_token),
            ("last_token", timings.last_token),
        ):
            if at is not None:
                span.add_event(f"headrace.{name}", timestamp=self._wall(at))
        self._add_content()
        failure = finish.failure
        if finish.reason is FinishReason.ERROR and failure is not None and failure.field is None:
            span.set_attribute("headrace.error_id", failure.error_id)
            _set_error(span, "unavailable" if failure.retryable else "internal")
        span.end(self._wall(timings.finished))

    def _wall(self, at: float) -> int:
        """Nanoseconds of the wall clock for seconds of the engine's."""
        return int(at * 1e9) + self._offset_ns

    def _add_content(self) -> None:
        decode = self._decode
        if decode is None:
            return
        prompt = {"role": "user", "parts": [{"type": "text", "content": decode(self._prompt)}]}
        self._span.set_attribute("gen_ai.input.messages", json.dumps([prompt]))
        outputs = []
        for _, choice in sorted(self._choices.items()):
            if (finish := choice.finish) is not None:
                text = decode(choice.tokens[: finish.usage.completion_tokens])
                outputs.append(
                    {
                        "role": "assistant",
                        "parts": [{"type": "text", "content": text}],
                        "finish_reason": finish.reason.value,
                    }
                )
        self._span.set_attribute("gen_ai.output.messages", json.dumps(outputs))


def _set_refusal(span: Span, reason: str) -> None:
    if reason:
        span.set_attribute("headrace.refusal.reason", reason)


def _set_error(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))
