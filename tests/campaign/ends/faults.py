"""The faults by name: how each is caused, and how a request that it affects may end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from service.logs.output import Output
from service.telemetry import setup as telemetry
from service.telemetry.telemetry_config import OTLP, TelemetryConfig
from tests.campaign.ends.stage import Stage
from tests.service.ends import NAME

OWN_ERROR, DEATH, CUT = "its own error", "engine dies", "connection lost"
"""Rows of the table of ends that describe how a fault ends a request."""
NOBODY, TARGET, ALL = "nobody", "the target", "all"
"""The requests that a fault may affect."""
AHEAD_S = 30
"""How far the clock jumps, in seconds; less than any time limit of the requests here."""
SLOW_S = 0.05
LINES = 300
"""The number of lines logged while nobody reads the log; more than fits in a pipe."""


Strike = Callable[[Stage, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault.

    Attributes:
        row: the row of the table of ends for affected requests; empty if it ends no request.
        hits: the requests that it may affect.
        strike: causes the fault. `later`: for a fault within a step, use the step after the one at
            the gate.
        process: whether the engine must run in a separate process.
        around: the setup required before the server starts.
    """

    name: str
    what: str
    row: str = ""
    hits: str = NOBODY
    strike: Strike
    process: bool = False
    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


FAULTS: dict[str, Fault] = {}
"""All faults in the order in which they are tried."""


def fault(name: str, what: str, **more: Any) -> Callable[[Strike], Strike]:
    """Add the fault that a function causes. `more`: as of a Fault."""

    def add(strike: Strike) -> Strike:
        FAULTS[name] = Fault(name=name, what=what, strike=strike, **more)
        return strike

    return add


@fault(
    "forward",
    "the forward pass of a step fails when its results are collected",
    row=OWN_ERROR,
    hits=ALL,
)
def _forward(stage: Stage, later: int) -> None:
    def fail() -> None:
        stage.engine.runner.fail_results = 1

    stage.at_step(later, fail)


@fault("sampler", "no token can be sampled for the request", row=OWN_ERROR, hits=TARGET)
def _sampler(stage: Stage, later: int) -> None:
    stage.at_step(later, lambda: stage.gate.break_target(True))


@fault("allocator", "the block allocator raises while a step is scheduled", row=DEATH, hits=ALL)
def _allocator(stage: Stage, later: int) -> None:
    kv_cache = stage.engine.kv_cache
    allocate = kv_cache.allocate

    def fail(*_: object) -> bool:
        kv_cache.allocate = allocate
        raise RuntimeError("the allocator fails")

    def arm() -> None:
        kv_cache.allocate = fail

    stage.at_step(later, arm)


@fault("device memory", "the device has no memory for a step", row=OWN_ERROR, hits=ALL)
def _device_memory(stage: Stage, later: int) -> None:
    def fail() -> None:
        raise MemoryError("out of device memory: tried to allocate 20.00 GiB")

    stage.at_step(later, fail)


class _BrokenText:
    """A text stream that fails to convert a token to text."""

    stop = None

    def push(self, *_: object, **__: object) -> str:
        raise ValueError("the tokenizer fails")

    def finish(self) -> str:
        return ""


@fault("tokenizer", "a token cannot be made text", row=OWN_ERROR, hits=TARGET)
def _tokenizer(stage: Stage, later: int) -> None:
    request = stage.h.registry.requests.get(("anonymous", NAME))
    if request is not None:
        broken: Any = _BrokenText()
        request.log._choices[0]._text_stream = broken


class _BrokenSpans(SpanExporter):
    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        raise OSError("the collector is gone")


class _BrokenMetrics(MetricExporter):
    def export(self, *_: Any, **__: Any) -> MetricExportResult:
        raise OSError("the collector is gone")

    def force_flush(self, timeout_millis: float = 0) -> bool:
        raise OSError("the collector is gone")

    def shutdown(self, timeout_millis: float = 0, **__: Any) -> None:
        raise OSError("the collector is gone")


@contextlib.contextmanager
def _broken_exporters() -> Iterator[None]:
    """Enable telemetry whose exports all fail."""

    def spans(_: object) -> TracerProvider:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(_BrokenSpans(), schedule_delay_millis=5))
        return provider

    def metrics(*_: object) -> MeterProvider:
        reader = PeriodicExportingMetricReader(_BrokenMetrics(), export_interval_millis=5)
        return MeterProvider([reader], shutdown_on_exit=False)

    make, everything = telemetry.set_up, TelemetryConfig(traces=(OTLP,), metrics=(OTLP,))
    logger = logging.getLogger("opentelemetry")
    before, logger.disabled = logger.disabled, True
    try:
        with (
            mock.patch.object(telemetry, "set_up", lambda _, figures: make(everything, figures)),
            mock.patch.object(telemetry, "_tracer_provider", spans),
            mock.patch.object(telemetry, "_meter_provider", metrics),
        ):
            yield
    finally:
        logger.disabled = before


@fault("exporter", "every export of spans and metrics raises", around=_broken_exporters)
def _exporter(stage: Stage, later: int) -> None:
    """Nothing more has to happen: exports fail all the time."""


@contextlib.contextmanager
def _unread_log() -> Iterator[None]:
    """Replace stderr with a full pipe that nobody reads, behind the process's log."""
    kept = os.dup(2)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    os.dup2(writing, 2)
    os.close(writing)
    output = Output("text", "info")
    # Its last words would wait for a second each time.
    output._queue.flush = lambda *_: None  # type: ignore[method-assign]
    try:
        with output:
            yield
    finally:
        os.close(reading)  # whoever writes on now fails, and is not stuck
        os.dup2(kept, 2)
        os.close(kept)


@fault(
    "log",
    f"stderr is a full pipe that nobody reads, and {LINES} errors are logged",
    around=_unread_log,
)
def _log(stage: Stage, later: int) -> None:
    logger = logging.getLogger("service.trust")
    for number in range(LINES):
        logger.error("line %d of a log that nobody reads: %s", number, "x" * 400)


@fault("clock", f"monotonic clocks jump {AHEAD_S} s ahead, the wall clock a day back")
def _clock(stage: Stage, later: int) -> None:
    """Simulate a resume from suspend: monotonic clocks jump ahead, and the wall clock goes back a
    day.
    """
    now = time.time

    def yesterday() -> float:
        return now() - 86_400

    stage.undo.enter_context(mock.patch("time.time", yesterday))
    stage.ahead_s += AHEAD_S
    stage.gate.ahead_s += AHEAD_S


@fault("slow step", f"a step takes {SLOW_S} s longer")
def _slow(stage: Stage, later: int) -> None:
    stage.at_step(later, lambda: time.sleep(SLOW_S))


@fault("client cut", "the caller's connection is reset", row=CUT, hits=TARGET)
def _client(stage: Stage, later: int) -> None:
    stage.proxy.cut()


def _send(stage: Stage, number: signal.Signals) -> None:
    if stage.engine.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stage.engine.pid, number)


@fault("engine killed", "the engine's process gets SIGKILL", row=DEATH, hits=ALL, process=True)
def _kill(stage: Stage, later: int) -> None:
    _send(stage, signal.SIGKILL)


@fault(
    "engine stopped",
    "the engine's process gets SIGSTOP, and is a hung one",
    row=DEATH,
    hits=ALL,
    process=True,
)
def _stop(stage: Stage, later: int) -> None:
    _send(stage, signal.SIGSTOP)


@fault(
    "pipe cut",
    "the socket between front end and engine is shut",
    row=DEATH,
    hits=ALL,
    process=True,
)
def _pipe(stage: Stage, later: int) -> None:
    writer = stage.engine._writer
    if writer is not None:
        raw = writer._writer.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            raw.shutdown(socket.SHUT_RDWR)
