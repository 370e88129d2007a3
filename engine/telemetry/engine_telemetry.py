"""`engine.Telemetry`: metrics and spans of what managers of the Python API do.

    LoadedModel(telemetry=…) ── a manager's ManagerObserver ◀── its requests, steps, start and end
                                          └──▶ one set of instruments, which sums up all managers

The metrics are those of a server that concern the engine, with the same names (docs/offline.md
lists them). Gauges and counters sum over the running managers; the counts of those that have ended
are kept. So the number of series depends neither on the number of managers nor on the content of
requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

from opentelemetry import metrics, trace
from opentelemetry.context import Context, get_current
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import SpanKind, TracerProvider

from engine.contract.outputs import StepOutputs
from engine.contract.request import GenerationRequest
from engine.contract.stats import EngineStats
from engine.telemetry.instruments import TEXT, StepInstruments, counts, observe_stats
from engine.telemetry.spans import LiveSpans, RequestSpan, attributes_of, wall_offset_ns

_NAME: Final = "headrace"
_SUMMED: Final = tuple(one.name for one in fields(EngineStats) if one.type == "int")


class Telemetry:
    """Collects what managers report. Pass it to `engine.load` or `engine.from_model`; one instance
    may serve several models.

    A request's span begins when the request is added, as a child of the current span, and ends with
    the request. Refused requests have no span.
    """

    def __init__(
        self,
        *,
        meter_provider: MeterProvider | None = None,
        tracer_provider: TracerProvider | None = None,
        trace_steps: bool = False,
    ) -> None:
        """Create the instruments.

        Args:
            meter_provider, tracer_provider: where metrics and spans go. The defaults are
                OpenTelemetry's global providers, which do nothing unless they have been set. The
                code that created the providers must shut them down.
            trace_steps: whether each step also has a span.
        """
        meter = (meter_provider or metrics.get_meter_provider()).get_meter(_NAME)
        self._tracer = (tracer_provider or trace.get_tracer_provider()).get_tracer(_NAME)
        self._meter = meter
        self._trace_steps = trace_steps
        self._lock = threading.Lock()
        self._running: dict[ManagerObserver, _Running] = {}
        self._before: dict[str, int] = {}
        self._steps: dict[str, StepInstruments] = {}
        observe_stats(meter, self._present, self._totals)

    def observer(self, model: str) -> ManagerObserver:
        """Create the observer of a new manager. `model`: the name of its model."""
        with self._lock:
            if model not in self._steps:
                self._steps[model] = StepInstruments(self._meter, model)
            steps = self._steps[model]
        return ManagerObserver(self, model, steps, self._tracer if self._trace_steps else None)

    def started(self, observer: ManagerObserver, stats: Callable[[], EngineStats]) -> None:
        """Record that a manager runs."""
        with self._lock:
            self._running[observer] = _Running(stats, counts(stats()))

    def ended(self, observer: ManagerObserver) -> None:
        """Record that a manager no longer runs; its counts are kept."""
        with self._lock:
            running = self._running.pop(observer, None)
            if running is not None:
                self._before = _sum(self._before, running.grown())

    def _present(self) -> EngineStats | None:
        with self._lock:
            all_stats = [running.stats() for running in self._running.values()]
        return _together(all_stats) if all_stats else None

    def _totals(self) -> Mapping[str, int]:
        with self._lock:
            totals = self._before
            for running in self._running.values():
                totals = _sum(totals, running.grown())
        return totals


@dataclass(frozen=True, slots=True)
class _Running:
    """A running manager. `at_start`: its counts when it was started."""

    stats: Callable[[], EngineStats]
    at_start: Mapping[str, int]

    def grown(self) -> dict[str, int]:
        """Return its counts since it was started."""
        return {name: count - self.at_start[name] for name, count in counts(self.stats()).items()}


class ManagerObserver:
    """Reports what one manager does; see `engine.api.observer.Observer`."""

    def __init__(
        self,
        telemetry: Telemetry,
        model: str,
        steps: StepInstruments,
        step_tracer: trace.Tracer | None,
    ) -> None:
        """`step_tracer`: creates a span for each step; None for no such spans."""
        self._telemetry = telemetry
        self._tracer = telemetry._tracer
        self._model = model
        self._steps = steps
        self._step_tracer = step_tracer
        self._live = LiveSpans()

    def started(self, stats: Callable[[], EngineStats]) -> None:
        """Record that the manager's thread was started."""
        self._telemetry.started(self, stats)

    def ended(self) -> None:
        """Record that the manager has ended."""
        self._telemetry.ended(self)

    def submitting(self, requests: Sequence[GenerationRequest], arrival: float) -> None:
        """Begin the spans of requests that go to the engine, whose outputs may come immediately.
        `arrival`: monotonic seconds.
        """
        parent, offset_ns = get_current(), wall_offset_ns()
        for request in requests:
            span = self._tracer.start_span(
                f"{TEXT} {self._model}",
                parent,
                SpanKind.INTERNAL,
                attributes_of(TEXT, self._model, request.request_id),
                start_time=int(arrival * 1e9) + offset_ns,
            )
            RequestSpan(span, self._live).submitted(request)

    def refused(self, requests: Sequence[GenerationRequest]) -> None:
        """Forget the spans of requests that were refused."""
        for request in requests:
            self._live.remove(request.request_id)

    def on_step(self, step: StepOutputs) -> None:
        """Record a step's outputs. Called on the engine's thread."""
        self._steps.on_step(step)
        self._live.on_step(step)
        record, tracer = step.step, self._step_tracer
        if record is None or tracer is None:
            return
        end_ns = int(step.time * 1e9) + wall_offset_ns()
        span = tracer.start_span(
            "headrace.step",
            Context(),
            attributes={
                "gen_ai.request.model": self._model,
                "headrace.step.requests": record.num_requests,
                "headrace.step.prompt_tokens": record.num_prompt_tokens,
                "headrace.step.decode_tokens": record.num_decode_tokens,
            },
            start_time=end_ns - int(record.duration_s * 1e9),
        )
        span.end(end_ns)


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def _together(all_stats: Sequence[EngineStats]) -> EngineStats:
    summed = {name: sum(getattr(stats, name) for stats in all_stats) for name in _SUMMED}
    return EngineStats(**summed, last_step_s=max(stats.last_step_s for stats in all_stats))
