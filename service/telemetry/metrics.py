"""The service's metrics, recorded with OpenTelemetry: what every step did, how long requests took,
and the engine's statistics.

    engine ── StepOutputs ──▶ Metrics.on_step ──▶ histograms of steps and requests
    engine ◀── stats ──────── Metrics.poll ─────▶ gauges and counters, read when they are exported
    front end ── Figures ───────────────────────▶ gauges and counters, too
    calls ── their ends ────▶ Metrics.watch ─────▶ a histogram
    operators' loads ───────▶ Metrics.adapter_loaded ─▶ a histogram

The engine's instruments are in `engine.telemetry.instruments`. Names that begin with `rpc.` come
from OpenTelemetry's semantic conventions for RPCs. docs/operations.md lists all metrics.

Attributes are names from this code, the name of the served model, and names of callers and of
adapters. At most MAX_CALLERS callers and MAX_NAMED adapters are named per process, because every
series is kept, both here and by the collector.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import grpc
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from engine.contract.engine_client import EngineClient
from engine.contract.errors import HeadraceError
from engine.contract.outputs import StepOutputs
from engine.contract.stats import AdapterStats, CallerStats, EngineStats, statistics_of
from engine.contract.types import CallerKey, RequestId
from engine.telemetry.instruments import Callback, StepInstruments, counts, observe, observe_stats
from service.admission.phases import Phase
from service.errors.call_outcome import SERVER_FAULTS, CallOutcome
from service.telemetry.adapter_series import AdapterSeries
from service.telemetry.figures import Figures

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""How often the engine is asked for its statistics, in seconds."""

MAX_CALLERS = 256
"""How many callers are named per process; the others are summed."""

_CALL: Final = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 40.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_LOAD: Final = tuple(0.005 * 2**power for power in range(14))
_OTHER: Final = "_OTHER"
"""The conventions' name for methods that the server does not know."""
_OTHERS: Final = {"headrace.callers": "other"}
"""The attribute for the callers that the engine sums."""
_OTHER_ADAPTERS: Final = {"headrace.adapters": "other"}
"""The attribute for the adapters that are not named."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """What is known of the engine, for pages that are made without asking it.

    Attributes:
        model: the model's name.
        stats: the engine's statistics; None if they are not known now.
        taken_at: when they were, in seconds of the wall clock.
        adapters: the adapters that requests may name, in the order of their names.
    """

    model: str = ""
    stats: EngineStats | None = None
    taken_at: float = 0.0
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Figures:
    """The engine's statistics for exporters.

    Attributes:
        before: the sums of the counters of earlier engines, by the counter's name.
        service_before: the service that earlier engines gave to all callers.
        stats: the latest statistics of this engine; None if there are none yet. Callers beyond
            MAX_CALLERS are summed with the others.
        taken_at: when these were told, in seconds of the wall clock.
        is_there: whether the engine answered when it was last asked.
    """

    before: Mapping[str, int] = field(default_factory=dict)
    service_before: int = 0
    stats: EngineStats | None = None
    taken_at: float = 0.0
    is_there: bool = False

    def totals(self) -> Mapping[str, int]:
        """Return the values of all counters; empty if no engine has given statistics yet."""
        stats = self.stats
        if stats is None:
            return self.before
        return {name: self.before.get(name, 0) + count for name, count in counts(stats).items()}

    def callers(self) -> Iterator[tuple[CallerStats, Mapping[str, str]]]:
        """Return the callers of this engine, each with its attribute. The engine names only a
        few.
        """
        if self.stats is not None:
            for caller in self.stats.callers:
                yield caller, {"headrace.caller": caller.caller}
            if self.stats.other_callers is not None:
                yield self.stats.other_callers, _OTHERS

    def services(self) -> Iterator[tuple[int, Mapping[str, str]]]:
        """Return the service that each caller was given. Service given by earlier engines is
        counted as "other".
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
    """All instruments. The methods run on the event loop; exporters read from a thread."""

    def __init__(self, meter: Meter, figures: Figures) -> None:
        """Make the instruments.

        Args:
            meter: the exporting provider's meter.
            figures: the source of the front end's metrics.
        """
        self._figures = _Figures()  # replaced as a whole: exporters read it from their own thread
        self._named: set[CallerKey] = set()
        self._adapters = AdapterSeries()
        self._loaded_adapters: Callable[[], Collection[str]] = tuple
        self._chats: set[RequestId] = set()  # of the requests that the engine has
        self._steps = StepInstruments(meter)
        self._call = meter.create_histogram(
            "rpc.server.call.duration",
            "s",
            "From a call's arrival to its end.",
            explicit_bucket_boundaries_advisory=_CALL,
        )
        self._adapter_load = meter.create_histogram(
            "headrace.adapters.load.duration",
            "s",
            "How long an operator's load of an adapter took, without those before it.",
            explicit_bucket_boundaries_advisory=_LOAD,
        )
        self._observe_front_end(meter, figures)
        observe_stats(meter, self._present, lambda: self._figures.totals())
        for attribute, one in statistics_of(CallerStats).items():
            of_callers = partial(self._observe_callers, attribute)
            observe(meter, one, self._observe_service if one.kind == "counter" else of_callers)
        for attribute, one in statistics_of(AdapterStats).items():
            observe(
                meter, one, partial(self._observe_adapters, attribute, adds=one.kind == "counter")
            )

    def _observe_front_end(self, meter: Meter, figures: Figures) -> None:
        def whole(read: Callable[[], int]) -> Callback:
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

        def transfer(_options: CallbackOptions) -> Iterable[Observation]:
            found = figures.transfer()
            if found is None:
                return []
            state = "headrace.download.state"
            return [
                Observation(found.done, {state: "here"}),
                Observation(found.total - found.done, {state: "missing"}),
            ]

        parts = {"refusals": refusals, "phase": phases, "startup": startup, "transfer": transfer}
        for attribute, one in statistics_of(Figures).items():
            observe(meter, one, parts.get(attribute) or whole(getattr(figures, attribute)))

    def engine_starts(self) -> None:
        """Record that an engine is being started, either the first one or a restart. It counts from
        0, so its counts are added to those of earlier engines.
        """
        figures = self._figures
        self._figures = _Figures(
            figures.totals(), service_before=sum(service for service, _ in figures.services())
        )
        self._adapters.engine_starts()
        self._chats.clear()

    def loaded(self, model: str, adapters: Callable[[], Collection[str]]) -> None:
        """Record that the model is loaded under this name. `adapters`: returns the names of the
        adapters that requests may name; called on any thread.
        """
        self._steps.model = model
        self._loaded_adapters = adapters

    def view(self) -> EngineView:
        """Return what is known of the engine. May be called on any thread."""
        figures = self._figures
        return EngineView(
            self._steps.model,
            figures.stats if figures.is_there else None,
            figures.taken_at,
            tuple(sorted(self._loaded_adapters())),
        )

    def _present(self) -> EngineStats | None:
        figures = self._figures
        return figures.stats if figures.is_there else None

    def adapter_loaded(self, seconds: float) -> None:
        """Record how long an operator's load of an adapter took."""
        self._adapter_load.record(seconds)

    def watch(self, method: str, _context: object) -> Callable[[CallOutcome], None] | None:
        """Watch a call and return a function that records its end. `method` is one of this
        server's.
        """
        return None if method.startswith("grpc.health.") else partial(self._call_ended, method)

    def _call_ended(self, method: str, call: CallOutcome) -> None:
        self._record_call(method, call.code_at_end(), call.seconds())

    def unknown_call_ended(self, code: grpc.StatusCode, seconds: float) -> None:
        """Record a call of an unknown method. All such methods share one name."""
        self._record_call(_OTHER, code, seconds)

    def _record_call(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        attributes = {
            "rpc.system.name": "grpc",
            "rpc.method": method,
            "rpc.response.status_code": code.name,
        }
        if code in SERVER_FAULTS:
            attributes["error.type"] = code.name
        self._call.record(seconds, attributes)

    def on_step(self, step: StepOutputs) -> None:
        """Record a step, and the requests that ended in it."""
        chats = self._chats
        self._steps.on_step(step, chats.__contains__)
        if chats:
            for output in step.outputs:
                if output.ends_request:
                    chats.discard(output.request_id)

    def submitting(self, request_id: RequestId, *, is_chat: bool) -> None:
        """Record that a request goes to the engine."""
        if is_chat:
            self._chats.add(request_id)

    def refused(self, request_id: RequestId) -> None:
        """Record that the engine refused the request."""
        self._chats.discard(request_id)

    async def poll(self, client: EngineClient) -> None:
        """Ask for the engine's statistics every POLL_S, until cancelled."""
        while True:
            try:
                stats = self._with_few_names(await client.stats())
                self._adapters.take(stats)
                self._figures = replace(
                    self._figures, stats=stats, taken_at=time.time(), is_there=True
                )
            except HeadraceError as error:  # it is being stopped, or has died: reported elsewhere
                self._figures = replace(self._figures, is_there=False)
                logger.debug("no figures from the engine: %s", error)
            await asyncio.sleep(POLL_S)

    def _with_few_names(self, stats: EngineStats) -> EngineStats:
        """Return the statistics with at most MAX_CALLERS callers named since the start."""
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

    def _observe_callers(self, name: str, _options: CallbackOptions) -> Iterable[Observation]:
        figures = self._figures
        callers = figures.callers() if figures.is_there else ()
        return [Observation(getattr(caller, name), attributes) for caller, attributes in callers]

    def _observe_service(self, _options: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(service, attributes) for service, attributes in self._figures.services()
        ]

    def _observe_adapters(
        self, name: str, _options: CallbackOptions, *, adds: bool
    ) -> Iterable[Observation]:
        """Read a statistic by adapter. `adds`: whether it counts on from one engine to the next."""
        told = self._adapters.totals() if adds else self._adapters.present()
        if not adds and not self._figures.is_there:
            return []
        return [
            Observation(
                getattr(one, name), {"headrace.adapter": adapter} if adapter else _OTHER_ADAPTERS
            )
            for adapter, one in told.items()
        ]
