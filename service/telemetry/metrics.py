"""The service's metrics, recorded with OpenTelemetry: what every step did, how long requests took,
and the engine's statistics.

    engine ── StepOutputs ──▶ Metrics.on_step ──▶ histograms of steps and requests, token counters
    engine ◀── stats ──────── Metrics.poll ─────▶ gauges and counters, read when they are exported
    front end ── Figures ───────────────────────▶ likewise
    calls ── their ends ────▶ Metrics.watch ─────▶ a histogram

Names that begin with `gen_ai.` and `rpc.` come from OpenTelemetry's semantic conventions for
generative AI and for RPCs; ours begin with `headrace.`. The times of requests come from the
engine's clock. docs/operations.md lists all metrics.

Attributes are names of this code, the name of the served model, and names of callers: of these at
most MAX_CALLERS of one process, because every series is kept, here and by who collects them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation

from engine.client import EngineClient
from engine.errors import HeadraceError
from engine.outputs import Finish, RequestOutput, StepOutputs
from engine.stats import CallerStats, EngineStats
from engine.types import CallerKey
from service.figures import Figures
from service.interceptors import SERVER_FAULTS, CallEnd
from service.state import Phase

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""How often the engine is asked for its statistics, in seconds."""

MAX_CALLERS = 256
"""How many callers of one process are named; the others are summed."""

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
_CALL: Final = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 40.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_SIZES: Final = tuple(float(2**power) for power in range(15))

_GAUGES: Final[tuple[tuple[str, str, str, Callable[[EngineStats], float]], ...]] = (
    (
        "headrace.kv_cache.usage",
        "1",
        "The part of the KV cache that requests hold.",
        lambda s: s.kv_usage,
    ),
    ("headrace.requests.running", "{request}", "In the batch.", lambda s: s.running),
    ("headrace.requests.waiting", "{request}", "In the queue.", lambda s: s.waiting),
    (
        "headrace.requests.held",
        "{request}",
        "Neither: their results are not read.",
        lambda s: s.held,
    ),
    ("headrace.kv_cache.blocks.limit", "{block}", "All there are.", lambda s: s.blocks_total),
    ("headrace.kv_cache.blocks.used", "{block}", "Held by requests.", lambda s: s.blocks_used),
    (
        "headrace.kv_cache.blocks.cached",
        "{block}",
        "Held by nobody; they keep a prefix until they are needed.",
        lambda s: s.blocks_cached,
    ),
    (
        "headrace.kv_cache.host_blocks.limit",
        "{block}",
        "On the host, for preempted requests.",
        lambda s: s.host_blocks_total,
    ),
    (
        "headrace.kv_cache.host_blocks.used",
        "{block}",
        "On the host, in use.",
        lambda s: s.host_blocks_used,
    ),
)
_COUNTERS: Final[tuple[tuple[str, str, str, Callable[[EngineStats], int]], ...]] = (
    ("headrace.steps", "{step}", "Steps executed.", lambda s: s.steps),
    ("headrace.requests.accepted", "{request}", "Taken in.", lambda s: s.requests_accepted),
    (
        "headrace.requests.finished",
        "{request}",
        "Ended, whatever the reason.",
        lambda s: s.requests_finished,
    ),
    (
        "headrace.tokens.prompt",
        "{token}",
        "Computed for prompts; again after a preemption.",
        lambda s: s.prompt_tokens,
    ),
    (
        "headrace.holds",
        "{hold}",
        "How often a request was held, because its results were not read.",
        lambda s: s.holds,
    ),
    (
        "headrace.steps.with_decodes",
        "{step}",
        "Steps in which at least one request decoded.",
        lambda s: s.num_decode_steps,
    ),
    (
        "headrace.steps.over_target",
        "{step}",
        "Those of them that took longer than the target.",
        lambda s: s.num_steps_over_target,
    ),
    ("headrace.tokens.generated", "{token}", "Generated.", lambda s: s.generated_tokens),
    (
        "headrace.preemptions",
        "{preemption}",
        "How often a request gave up its blocks.",
        lambda s: s.preemptions,
    ),
    (
        "headrace.kv_cache.offloads",
        "{offload}",
        "How often a preempted request's KV was kept on the host.",
        lambda s: s.offloads,
    ),
    (
        "headrace.kv_cache.restores",
        "{restore}",
        "How often it was brought back.",
        lambda s: s.restores,
    ),
    (
        "headrace.prefix_cache.queries",
        "{token}",
        "Prompt tokens that were looked up in the prefix cache.",
        lambda s: s.prefix_queries,
    ),
    (
        "headrace.prefix_cache.hits",
        "{token}",
        "Prompt tokens that were found there.",
        lambda s: s.prefix_hits,
    ),
)
_CALLER_GAUGES: Final[tuple[tuple[str, str, Callable[[CallerStats], int]], ...]] = (
    ("headrace.callers.running", "In the batch, by caller.", lambda c: c.running),
    ("headrace.callers.waiting", "In the queue, by caller.", lambda c: c.waiting),
)
_OTHERS: Final = {"headrace.callers": "other"}
"""The attribute for the callers that the engine sums up."""


@dataclass(frozen=True, slots=True)
class _Figures:
    """The engine's statistics for exporters.

    Attributes:
        before: the sums of the counters of earlier engines, by the counter's name.
        service_before: the service that earlier engines gave to all callers.
        stats: the last statistics of this engine; None: there are none yet. Callers beyond
            MAX_CALLERS are among the others.
        is_there: whether it answered when it was last asked.
    """

    before: Mapping[str, int] = field(default_factory=dict)
    service_before: int = 0
    stats: EngineStats | None = None
    is_there: bool = False

    def totals(self) -> Mapping[str, int]:
        """The values of all counters; empty if no engine has given statistics yet."""
        stats = self.stats
        if stats is None:
            return self.before
        return {name: self.before.get(name, 0) + read(stats) for name, *_, read in _COUNTERS}

    def callers(self) -> Iterator[tuple[CallerStats, Mapping[str, str]]]:
        """The callers of this engine, each with its attribute; the engine only names a few."""
        if self.stats is not None:
            for caller in self.stats.callers:
                yield caller, {"headrace.caller": caller.caller}
            if self.stats.other_callers is not None:
                yield self.stats.other_callers, _OTHERS

    def services(self) -> Iterator[tuple[int, Mapping[str, str]]]:
        """The service that each caller was given; that of earlier engines is counted for
        "other".
        """
        others = self.service_before
        for caller, attributes in self.callers():
            if attributes is _OTHERS:
                others += caller.service
            else:
                yield caller.service, attributes
        if others:
            yield others, _OTHERS


class Metrics:
    """All instruments. Its methods run on the event loop; exporters read from a thread."""

    def __init__(self, meter: Meter, figures: Figures) -> None:
        """Make the instruments.

        Args:
            meter: the exporting provider's meter.
            figures: where the front end's figures are read.
        """
        self._figures = _Figures()  # replaced as a whole: exporters read it from their own thread
        self._named: set[CallerKey] = set()
        self._attributes = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "headrace",
        }

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
        self._call = histogram(
            "rpc.server.call.duration", "s", "From a call's arrival to its end.", _CALL
        )
        self._observe_front_end(meter, figures)
        for name, unit, text, read in _GAUGES:
            meter.create_observable_gauge(name, [self._gauge(read)], unit, text)
        for name, unit, text, _ in _COUNTERS:
            meter.create_observable_counter(name, [self._counter(name)], unit, text)
        for name, text, read_caller in _CALLER_GAUGES:
            meter.create_observable_gauge(
                name, [self._caller_gauge(read_caller)], "{request}", text
            )
        meter.create_observable_counter(
            "headrace.callers.service",
            [self._observe_service],
            "{token}",
            "Tokens computed, by caller: 1 for each of a prompt, 2 for each of an output.",
        )

    def _observe_front_end(self, meter: Meter, figures: Figures) -> None:
        def one(read: Callable[[], int]) -> Callable[[CallbackOptions], Iterable[Observation]]:
            return lambda _options: (Observation(read()),)

        def refusals(_options: CallbackOptions) -> Iterable[Observation]:
            return [
                Observation(
                    count,
                    {
                        "headrace.refusal.reason": refusal.reason,
                        "rpc.method": refusal.method,
                        "rpc.response.status_code": refusal.code,
                    },
                )
                for refusal, count in figures.refusals().items()
            ]

        def phases(_options: CallbackOptions) -> Iterable[Observation]:
            now = figures.phase()
            return [
                Observation(int(phase.value == now), {"headrace.server.phase": phase.value})
                for phase in Phase
            ]

        def startup(_options: CallbackOptions) -> Iterable[Observation]:
            return [
                Observation(seconds, {"headrace.startup.phase": phase})
                for phase, seconds in figures.startup().items()
            ]

        meter.create_observable_gauge(
            "headrace.requests.bytes",
            [one(figures.live_bytes)],
            "By",
            "About how many bytes live requests hold, in both processes.",
        )
        meter.create_observable_counter(
            "headrace.messages.unknown_fields",
            [one(figures.unknown_fields)],
            "{message}",
            "Messages of clients with fields that this server does not know, and ignored.",
        )
        meter.create_observable_counter(
            "headrace.refusals",
            [refusals],
            "{refusal}",
            "Calls and commands of sessions that were refused, by reason.",
        )
        meter.create_observable_gauge(
            "headrace.server.phase", [phases], "{server}", "1 for the phase of the server."
        )
        meter.create_observable_counter(
            "headrace.engine.restarts",
            [one(figures.restarts)],
            "{restart}",
            "How often the engine was started again, because it had stopped.",
        )
        meter.create_observable_gauge(
            "headrace.sessions.open", [one(figures.sessions)], "{session}", "Open sessions."
        )
        meter.create_observable_gauge(
            "headrace.startup.duration",
            [startup],
            "s",
            "How long the last start took, by what was started.",
        )

    def engine_starts(self) -> None:
        """Note that an engine is being started, the first one or a new one. It counts from 0, so
        its counts are added to those of earlier engines.
        """
        figures = self._figures
        self._figures = _Figures(
            figures.totals(), service_before=sum(service for service, _ in figures.services())
        )

    def loaded(self, model: str) -> None:
        """Note that the model is loaded, under this name."""
        self._attributes = {**self._attributes, "gen_ai.request.model": model}

    def model_and_stats(self) -> tuple[str, EngineStats | None]:
        """The model's name, and the engine's statistics; None: they are not known now."""
        figures = self._figures
        name = self._attributes.get("gen_ai.request.model", "")
        return name, figures.stats if figures.is_there else None

    def watch(self, method: str, _context: object) -> Callable[[CallEnd], None] | None:
        """Watch a call; returns what records its end. `method`: one of this server's."""
        return None if method.startswith("grpc.health.") else partial(self._call_ended, method)

    def _call_ended(self, method: str, call: CallEnd) -> None:
        code = call.code_at_end()
        attributes = {
            "rpc.system.name": "grpc",
            "rpc.method": method,
            "rpc.response.status_code": code.name,
        }
        if code in SERVER_FAULTS:
            attributes["error.type"] = code.name
        self._call.record(call.seconds(), attributes)

    def on_step(self, step: StepOutputs) -> None:
        """Record a step, and the requests that ended in it."""
        record = step.step
        if record is not None:
            self._step.record(record.duration_s)
            self._step_requests.record(record.num_requests)
            self._step_tokens.record(record.num_prompt_tokens, {"headrace.step.phase": "prompt"})
            self._step_tokens.record(record.num_decode_tokens, {"headrace.step.phase": "decode"})
        for output in step.outputs:
            if output.prompt_done is not None:
                self._cached.record(output.prompt_done)
            if output.finish is not None:
                self._record(output, output.finish)

    def _record(self, output: RequestOutput, finish: Finish) -> None:
        timings, tokens = finish.timings, finish.usage.completion_tokens
        first, last = timings.first_token, timings.last_token
        # A failure has the tokens of all choices that had not ended, and the times of one of them.
        if finish.failure is None and first is not None and last is not None and tokens > 1:
            self._per_token.record(max(last - first, 0.0) / (tokens - 1), self._attributes)
        if not output.ends_request:
            return  # with several choices, the request counts once, with its last one
        attributes = {**self._attributes, "gen_ai.response.finish_reasons": finish.reason.value}
        if finish.failure is not None:
            attributes["error.type"] = "unavailable" if finish.failure.retryable else "internal"
        self._duration.record(max(timings.finished - timings.arrival, 0.0), attributes)
        if timings.first_scheduled is not None:
            self._queued.record(max(timings.first_scheduled - timings.arrival, 0.0))
        if first is not None:
            self._first_token.record(max(first - timings.arrival, 0.0), self._attributes)

    async def poll(self, client: EngineClient) -> None:
        """Ask for the engine's statistics every POLL_S, until cancelled."""
        while True:
            try:
                stats = self._with_few_names(await client.stats())
                self._figures = replace(self._figures, stats=stats, is_there=True)
            except HeadraceError as error:  # it is being stopped, or has died: reported elsewhere
                self._figures = replace(self._figures, is_there=False)
                logger.debug("no figures from the engine: %s", error)
            await asyncio.sleep(POLL_S)

    def _with_few_names(self, stats: EngineStats) -> EngineStats:
        """The statistics with at most MAX_CALLERS callers named since the start."""
        for caller in stats.callers:
            if len(self._named) < MAX_CALLERS:
                self._named.add(caller.caller)
        unnamed = [caller for caller in stats.callers if caller.caller not in self._named]
        if not unnamed:
            return stats
        if stats.other_callers is not None:
            unnamed.append(stats.other_callers)
        others = CallerStats(
            running=sum(caller.running for caller in unnamed),
            waiting=sum(caller.waiting for caller in unnamed),
            service=sum(caller.service for caller in unnamed),
        )
        named = tuple(caller for caller in stats.callers if caller.caller in self._named)
        return replace(stats, callers=named, other_callers=others)

    def _gauge(
        self, read: Callable[[EngineStats], float]
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_options: CallbackOptions) -> Iterable[Observation]:
            figures = self._figures
            if figures.stats is None or not figures.is_there:
                return ()  # unknown: neither the old value nor 0 would be true
            return (Observation(read(figures.stats)),)

        return observe

    def _caller_gauge(
        self, read: Callable[[CallerStats], int]
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_options: CallbackOptions) -> Iterable[Observation]:
            figures = self._figures
            callers = figures.callers() if figures.is_there else ()
            return [Observation(read(caller), attributes) for caller, attributes in callers]

        return observe

    def _observe_service(self, _options: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(service, attributes) for service, attributes in self._figures.services()
        ]

    def _counter(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_options: CallbackOptions) -> Iterable[Observation]:
            total = self._figures.totals().get(name)
            return () if total is None else (Observation(total),)

        return observe
