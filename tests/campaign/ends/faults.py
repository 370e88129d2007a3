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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault.

    Attributes:
        name: its name in the campaign's issue and in the record.
        what: a one-line description.
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
    strike: Callable[[Stage, int], None] = lambda stage, later: None
    process: bool = False
    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


def _forward(stage: Stage, later: int) -> None:
    def fail() -> None:
        stage.engine.runner.fail_results = 1

    stage.at_step(later, fail)


def _device_memory(stage: Stage, later: int) -> None:
    def fail() -> None:
        raise MemoryError("out of device memory: tried to allocate 20.00 GiB")

    stage.at_step(later, fail)


def _sampler(stage: Stage, later: int) -> None:
    stage.at_step(later, lambda: stage.gate.break_target(True))


def _allocator(stage: Stage, later: int) -> None:
    kv_cache = stage.engine.kv_cache
    allocate = kv_cache.allocate

    def fail(*_: object) -> bool:
        kv_cache.allocate = allocate
        raise RuntimeError("the allocator fails")

    def arm() -> None:
        kv_cache.allocate = fail

    stage.at_step(later, arm)


class _BrokenText:
    """A text stream that fails to convert a token to text."""

    stop = None

    def push(self, *_: object, **__: object) -> str:
        raise ValueError("the tokenizer fails")

    def finish(self) -> str:
        return ""


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


def _log(stage: Stage, later: int) -> None:
    logger = logging.getLogger("service.trust")
    for number in range(LINES):
        logger.error("line %d of a log that nobody reads: %s", number, "x" * 400)


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


def _slow(stage: Stage, later: int) -> None:
    stage.at_step(later, lambda: time.sleep(SLOW_S))


def _send(number: signal.Signals) -> Callable[[Stage, int], None]:
    def strike(stage: Stage, later: int) -> None:
        if stage.engine.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stage.engine.pid, number)

    return strike


def _pipe(stage: Stage, later: int) -> None:
    writer = stage.engine._writer
    if writer is not None:
        raw = writer._writer.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            raw.shutdown(socket.SHUT_RDWR)


def _client(stage: Stage, later: int) -> None:
    stage.proxy.cut()


FAULTS: dict[str, Fault] = {
    one.name: one
    for one in (
        Fault(
            name="forward",
            what="the forward pass of a step fails when its results are collected",
            row=OWN_ERROR,
            hits=ALL,
            strike=_forward,
        ),
        Fault(
            name="sampler",
            what="no token can be sampled for the request",
            row=OWN_ERROR,
            hits=TARGET,
            strike=_sampler,
        ),
        Fault(
            name="allocator",
            what="the block allocator raises while a step is scheduled",
            row=DEATH,
            hits=ALL,
            strike=_allocator,
        ),
        Fault(
            name="device memory",
            what="the device has no memory for a step",
            row=OWN_ERROR,
            hits=ALL,
            strike=_device_memory,
        ),
        Fault(
            name="tokenizer",
            what="a token cannot be made text",
            row=OWN_ERROR,
            hits=TARGET,
            strike=_tokenizer,
        ),
        Fault(
            name="exporter",
            what="every export of spans and metrics raises",
            around=_broken_exporters,
        ),
        Fault(
            name="log",
            what=f"stderr is a full pipe that nobody reads, and {LINES} errors are logged",
            strike=_log,
            around=_unread_log,
        ),
        Fault(
            name="clock",
            what=f"monotonic clocks jump {AHEAD_S} s ahead, the wall clock a day back",
            strike=_clock,
        ),
        Fault(name="slow step", what=f"a step takes {SLOW_S} s longer", strike=_slow),
        Fault(
            name="client cut",
            what="the caller's connection is reset",
            row=CUT,
            hits=TARGET,
            strike=_client,
        ),
        Fault(
            name="engine killed",
            what="the engine's process gets SIGKILL",
            row=DEATH,
            hits=ALL,
            strike=_send(signal.SIGKILL),
            process=True,
        ),
        Fault(
            name="engine stopped",
            what="the engine's process gets SIGSTOP, and is a hung one",
            row=DEATH,
            hits=ALL,
            strike=_send(signal.SIGSTOP),
            process=True,
        ),
        Fault(
            name="pipe cut",
            what="the socket between front end and engine is shut",
            row=DEATH,
            hits=ALL,
            strike=_pipe,
            process=True,
        ),
    )
}
