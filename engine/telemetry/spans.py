"""The spans of requests.

    submitted ──▶ RequestSpan ──▶ LiveSpans ◀── on_step ── StepOutputs
                                     └──▶ attributes, phases and the end of the span

When a request ends, its span is ended with the engine's times, so there is no work per token. Its
events are the phases: accepted, scheduled, first token, last token. Prompts and outputs are
recorded on it only if a decoding function was provided.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from opentelemetry.trace import Span, Status, StatusCode

from engine.contract.outputs import Finish, FinishReason, RequestOutput, StepOutputs
from engine.contract.request import GenerationRequest
from engine.contract.types import RequestId, TokenId

MAX_CONTENT_TOKENS = 16_384
"""The most tokens of a prompt, and of each output, that are recorded on a span."""
Decode = Callable[[Sequence[int]], str]
_NEUTRAL: Final = (
    ("top_p", 1.0), ("top_k", 0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0),
)  # fmt: skip
"""Parameters that are recorded on a span only if they have an effect: every attribute costs time to
export.
"""


def attributes_of(operation: str, model: str, request_id: str) -> dict[str, str]:
    """Return the initial attributes of a request's span."""
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request_id,
        "headrace.request.id": request_id,
    }


def wall_offset_ns() -> int:
    """Return the offset in nanoseconds from the engine's clock, which has an arbitrary origin, to
    the wall clock.
    """
    return time.time_ns() - time.monotonic_ns()


def set_error(span: Span, kind: str) -> None:
    """Mark a span as an error of this kind."""
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))


class LiveSpans:
    """The spans of the requests in the engine.

    Attributes:
        decode: converts token ids to text; None if spans do not record prompts and outputs.
    """

    def __init__(self) -> None:
        self.decode: Decode | None = None
        self.spans: dict[RequestId, RequestSpan] = {}

    def __len__(self) -> int:
        return len(self.spans)

    def add(self, request_id: RequestId, span: RequestSpan) -> None:
        """Add a request's span."""
        self.spans[request_id] = span

    def remove(self, request_id: RequestId) -> None:
        """Forget a span. Does nothing if there is none."""
        self.spans.pop(request_id, None)

    def on_step(self, step: StepOutputs) -> None:
        """Record a step's outputs: the ends of requests, and tokens if content is recorded."""
        spans, decodes = self.spans, self.decode is not None
        if not spans:
            return
        for output in step.outputs:
            if (output.finish is not None or decodes) and output.request_id in spans:
                spans[output.request_id].push(output)

    def close(self) -> None:
        """End the spans of requests that are lost with the engine."""
        for span in list(self.spans.values()):
            span.lost()


@dataclass(slots=True)
class _Choice:
    tokens: list[TokenId] = field(default_factory=list)
    finish: Finish | None = None


class RequestSpan:
    """The span of one request."""

    __slots__ = ("_choices", "_decode", "_engine_id", "_live", "_offset_ns", "_prompt", "span")

    def __init__(self, span: Span, live: LiveSpans) -> None:
        """Wrap a span that has begun. `live`: the collection that holds it until its end."""
        self.span = span
        self._live = live
        self._decode = live.decode
        self._engine_id: RequestId | None = None
        self._prompt: list[int] = []
        self._choices: dict[int, _Choice] = {}
        self._offset_ns = wall_offset_ns()

    def submitted(self, request: GenerationRequest) -> None:
        """Record that the request goes to the engine; `LiveSpans.on_step` ends the span."""
        span, sampling = self.span, request.sampling
        if not span.is_recording():  # it is not sampled
            return
        self._engine_id = request.request_id
        self._live.add(request.request_id, self)
        attributes: dict[str, int | float] = {
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.usage.input_tokens": len(request.prompt),
        }
        for name, neutral in _NEUTRAL:
            if (value := getattr(sampling, name)) != neutral:
                attributes[f"gen_ai.request.{name}"] = value
        if request.adapter:
            span.set_attribute("headrace.adapter", request.adapter)
        if request.n > 1:
            attributes["gen_ai.request.choice.count"] = request.n
        if request.stop.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = request.stop.max_tokens
        span.set_attributes(attributes)
        if self._decode is not None:
            self._prompt = list(islice(request.prompt, MAX_CONTENT_TOKENS))

    def push(self, output: RequestOutput) -> None:
        """Record one step's output of one choice."""
        choice = self._choices.setdefault(output.choice, _Choice())
        if self._decode is not None and len(choice.tokens) < MAX_CONTENT_TOKENS:
            choice.tokens.extend(output.token_ids)
        if output.finish is not None:
            choice.finish = output.finish
            if output.ends_request:
                self._end(output.finish)

    def lost(self) -> None:
        """End the span because the engine is lost."""
        self.forget()
        set_error(self.span, "unavailable")
        self.span.end()

    def forget(self) -> None:
        """Expect no more outputs of the request. A span that is not ended is not exported."""
        if self._engine_id is not None:
            self._live.remove(self._engine_id)

    def _end(self, finish: Finish) -> None:
        self.forget()
        span, timings, usage = self.span, finish.timings, finish.usage
        finishes = [one.finish for _, one in sorted(self._choices.items()) if one.finish]
        span.set_attributes(
            {
                "gen_ai.response.finish_reasons": [one.reason.value for one in finishes],
                "gen_ai.usage.output_tokens": sum(one.usage.completion_tokens for one in finishes),
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "headrace.usage.draft_tokens": sum(one.usage.draft_tokens for one in finishes),
                "headrace.usage.accepted_draft_tokens": sum(
                    one.usage.accepted_draft_tokens for one in finishes
                ),
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
            set_error(span, "unavailable" if failure.retryable else "internal")
        span.end(self._wall(timings.finished))

    def _wall(self, at: float) -> int:
        """Convert seconds of the engine's clock to nanoseconds of the wall clock."""
        return int(at * 1e9) + self._offset_ns

    def _add_content(self) -> None:
        decode = self._decode
        if decode is None:
            return
        prompt = {"role": "user", "parts": [{"type": "text", "content": decode(self._prompt)}]}
        self.span.set_attribute("gen_ai.input.messages", json.dumps([prompt]))
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
        self.span.set_attribute("gen_ai.output.messages", json.dumps(outputs))
