"""OpenTelemetry instruments for what an engine does: what every step did, how long requests took,
and the engine's statistics.

    engine ── StepOutputs ──▶ StepInstruments ──▶ histograms of steps and requests
    engine ◀── stats ──────── observe_stats ────▶ gauges and counters, read when they are exported

Both the service and the Python API create their metrics with these, so they have the same names.
Names that begin with `gen_ai.` come from OpenTelemetry's semantic conventions for generative AI;
Headrace's begin with `headrace.`. The times of requests come from the engine's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation

from engine.contract.outputs import Finish, RequestOutput, StepOutputs
from engine.contract.stats import STATISTICS, EngineStats, Statistic

Callback = Callable[[CallbackOptions], Iterable[Observation]]
"""Reads an instrument's values."""

TEXT, CHAT = "text_completion", "chat"
"""The operation names of the conventions."""

# The conventions' bounds, and smaller ones: a tiny model makes tokens in less than a millisecond.
_SECONDS: Final = (0.001, 0.0025, 0.005, *(0.01 * 2**power for power in range(14)))
_FIRST_TOKEN: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_PER_TOKEN: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.025, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_STEP: Final = tuple(0.00025 * 2**power for power in range(18))
_SIZES: Final = tuple(float(2**power) for power in range(15))

_PROMPT: Final = {"headrace.step.phase": "prompt"}
_DECODE: Final = {"headrace.step.phase": "decode"}


def counts(stats: EngineStats) -> dict[str, int]:
    """Return the values of all counters by name."""
    return {
        one.name: getattr(stats, attribute)
        for attribute, one in STATISTICS.items()
        if one.kind == "counter"
    }


def observe(meter: Meter, statistic: Statistic, read: Callback) -> None:
    """Create the instrument of a statistic. The threads of exporters call `read`."""
    create = (
        meter.create_observable_counter
        if statistic.kind == "counter"
        else meter.create_observable_gauge
    )
    create(statistic.name, [read], statistic.unit, statistic.text)


def observe_stats(
    meter: Meter,
    present: Callable[[], EngineStats | None],
    totals: Callable[[], Mapping[str, int]],
) -> None:
    """Create the gauges and counters of the engine's statistics. The threads of exporters call both
    functions.

    Args:
        meter: creates the instruments.
        present: returns the current statistics, or None if they are unknown. Gauges then report
            nothing, because neither an old value nor 0 would be true.
        totals: returns the counters' values since the start by name; missing ones are unknown.
    """

    def gauge(attribute: str, _options: CallbackOptions) -> Iterable[Observation]:
        stats = present()
        return () if stats is None else (Observation(getattr(stats, attribute)),)

    def counter(name: str, _options: CallbackOptions) -> Iterable[Observation]:
        total = totals().get(name)
        return () if total is None else (Observation(total),)

    for attribute, one in STATISTICS.items():
        is_counter = one.kind == "counter"
        observe(meter, one, partial(counter, one.name) if is_counter else partial(gauge, attribute))


class StepInstruments:
    """Histograms of steps and requests. Must be called by one thread only."""

    def __init__(self, meter: Meter, model: str = "") -> None:
        """Create the histograms. `model`: the name of the model; empty if not known yet."""

        def histogram(name: str, unit: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            return meter.create_histogram(
                name, unit, text, explicit_bucket_boundaries_advisory=bounds
            )

        self._duration = histogram(
            "gen_ai.server.request.duration", "s", "From arrival to end.", _SECONDS
        )
        self._first_token = histogram(
            "gen_ai.server.time_to_first_token", "s", "From arrival to first token.", _FIRST_TOKEN
        )
        self._per_token = histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Between tokens after the first, on average over a choice that did not fail.",
            _PER_TOKEN,
        )
        self._queued = histogram(
            "headrace.request.queue.duration", "s", "From arrival to first step.", _FIRST_TOKEN
        )
        self._cached = histogram(
            "headrace.request.cached_tokens",
            "{token}",
            "Prompt tokens found in the prefix cache.",
            (0.0, *_SIZES),
        )
        self._step = histogram(
            "headrace.step.duration", "s", "From a step's launch to its results.", _STEP
        )
        self._step_requests = histogram(
            "headrace.step.requests", "{request}", "Requests in a step.", _SIZES
        )
        self._step_tokens = histogram(
            "headrace.step.tokens", "{token}", "Tokens computed in a step.", (0.0, *_SIZES)
        )
        self._attributes: dict[str, dict[str, str]] = {}
        self.model = model

    @property
    def model(self) -> str:
        """The name of the model; empty if not known yet."""
        return self._model

    @model.setter
    def model(self, name: str) -> None:
        self._model = name
        asked = {"gen_ai.request.model": name} if name else {}
        self._attributes = {
            operation: {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "headrace",
                **asked,
            }
            for operation in (TEXT, CHAT)
        }

    def on_step(self, step: StepOutputs, is_chat: Callable[[str], bool] = lambda _: False) -> None:
        """Record a step, and the requests that ended in it. The cost does not depend on the number
        of tokens.

        `is_chat`: returns, for the id of a request that ends, whether it was a conversation.
        """
        record = step.step
        if record is not None:
            self._step.record(record.duration_s)
            self._step_requests.record(record.num_requests)
            self._step_tokens.record(record.num_prompt_tokens, _PROMPT)
            self._step_tokens.record(record.num_decode_tokens, _DECODE)
        for output in step.outputs:
            if output.prompt_done is not None:
                self._cached.record(output.prompt_done)
            if output.finish is not None:
                self._record(output, output.finish, CHAT if is_chat(output.request_id) else TEXT)

    def _record(self, output: RequestOutput, finish: Finish, operation: str) -> None:
        of_request = self._attributes[operation]
        timings, tokens = finish.timings, finish.usage.completion_tokens
        first, last = timings.first_token, timings.last_token
        # A failure has the tokens of all choices that had not ended, and the times of one of them.
        if finish.failure is None and first is not None and last is not None and tokens > 1:
            self._per_token.record(max(last - first, 0.0) / (tokens - 1), of_request)
        if not output.ends_request:
            return  # with several choices, the request counts once, with its last one
        attributes = {**of_request, "gen_ai.response.finish_reasons": finish.reason.value}
        if finish.failure is not None:
            attributes["error.type"] = "unavailable" if finish.failure.retryable else "internal"
        self._duration.record(max(timings.finished - timings.arrival, 0.0), attributes)
        if timings.first_scheduled is not None:
            self._queued.record(max(timings.first_scheduled - timings.arrival, 0.0))
        if first is not None:
            self._first_token.record(max(first - timings.arrival, 0.0), of_request)
