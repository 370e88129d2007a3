"""What is measured, as an OpenTelemetry reader gets it."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any, cast

import pytest
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from engine.contract.outputs import (
    Finish,
    FinishReason,
    RequestFailure,
    RequestOutput,
    StepOutputs,
    StepRecord,
    Timings,
    Usage,
)
from engine.contract.stats import CallerStats, EngineStats
from engine.contract.types import CallerKey, RequestId
from service.telemetry import metrics
from service.telemetry import setup as telemetry
from service.telemetry.figures import Figures
from service.telemetry.metrics import MAX_CALLERS, Metrics
from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import serving, spec, until
from tests.service.readme import ROOT

FIGURES = Figures(
    live_request_bytes=lambda: 12345,
    unknown_field_messages=lambda: 3,
    refusals=lambda: {},
    phase=lambda: "ready",
    engine_restarts=lambda: 0,
    door_restarts=lambda: 2,
    open_sessions=lambda: 0,
    transfer=lambda: None,
    startup=lambda: {},
)


class Book:
    """Metrics and their reader."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.provider = MeterProvider([self._reader], shutdown_on_exit=False)
        self.metrics = Metrics(self.provider.get_meter("test"), FIGURES)

    def points(self, name: str) -> list[Any]:
        """The data points of a metric now."""
        data = self._reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]

    def value(self, name: str) -> Any:
        """The one value of a gauge or counter."""
        [point] = self.points(name)
        return point.value

    def sum(self, name: str, **wanted: str) -> tuple[int, float]:
        """How often a histogram was recorded with these attributes (dots as __), and the sum."""
        attributes = {key.replace("__", "."): value for key, value in wanted.items()}
        found = [p for p in self.points(name) if attributes.items() <= dict(p.attributes).items()]
        return sum(p.count for p in found), sum(p.sum for p in found)


def test_steps_and_requests_are_recorded_once() -> None:
    book = Book()
    book.metrics.loaded("m", tuple)
    timings = Timings(10.0, 10.5, 11.0, 13.0, 13.5, 0)
    one = RequestId("one")
    finish = Finish(FinishReason.STOP, Usage(5, 3, 5), timings)
    failure = Finish(
        FinishReason.ERROR,
        Usage(5, 0, 0),
        Timings(10.0, None, None, None, 12.0, 0),
        failure=RequestFailure("broken", "id", retryable=True),
    )
    outputs = (
        RequestOutput(one, prompt_done=3),
        RequestOutput(one, finish=finish),
        RequestOutput(one, choice=1, finish=finish, ends_request=True),
        RequestOutput(RequestId("two"), finish=failure, ends_request=True),
    )
    late = replace(failure, usage=Usage(5, 0, 44), timings=timings)  # of four choices together
    outputs = (*outputs, RequestOutput(RequestId("three"), finish=late, ends_request=True))
    book.metrics.on_step(StepOutputs(1.0, outputs, StepRecord(0.25, 2, 40, 7)))
    book.metrics.on_step(StepOutputs(2.0, ()))
    assert book.sum("headrace.step.duration") == (1, 0.25)
    assert book.sum("headrace.step.requests") == (1, 2)
    assert book.sum("headrace.step.tokens", headrace__step__phase="prompt") == (1, 40)
    assert book.sum("headrace.step.tokens", headrace__step__phase="decode") == (1, 7)
    assert book.sum("headrace.request.cached_tokens") == (1, 3)
    assert book.sum("headrace.request.queue.duration") == (2, 1.0)
    duration = "gen_ai.server.request.duration"
    assert book.sum(duration, gen_ai__request__model="m") == (3, 9.0)
    assert book.sum(duration, error__type="unavailable") == (2, 5.5)
    assert book.sum(duration, gen_ai__response__finish_reasons="stop") == (1, 3.5)
    assert book.sum("gen_ai.server.time_to_first_token") == (2, 2.0)
    assert book.sum("gen_ai.server.time_per_output_token") == (2, 1.0)  # 2 s, 4 gaps: each choice
    book.provider.shutdown()


async def test_a_server_records_its_requests_and_the_engine_s_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    book = Book()
    made = telemetry.ServerTelemetry(metrics=book.metrics, meter_provider=book.provider)
    monkeypatch.setattr(telemetry, "set_up", lambda *_: made)
    figures = EngineStats(
        running=1, waiting=2, blocks_total=3, blocks_used=4, steps=5, prompt_tokens=6,
        generated_tokens=7, requests_accepted=8, requests_finished=9, preemptions=10,
        last_step_s=0.5, blocks_cached=11, host_blocks_total=12, host_blocks_used=13,
        offloads=14, restores=15, prefix_queries=16, prefix_hits=17, held=18, holds=19,
        steps_with_decodes=20, steps_over_target=21,
    )  # fmt: skip

    class Engine(FakeEngine):
        async def stats(self) -> EngineStats:
            return figures

    async with serving(Engine(script=says("abc")), served_name="mine") as h:
        await h.generate(spec(n=2))
        await h.generate(spec())
        await until(lambda: book.points("headrace.steps"))
        found = {
            name: book.value(f"headrace.{name}")
            for name in (
                "requests.running", "requests.waiting", "kv_cache.blocks.limit",
                "kv_cache.blocks.used", "steps", "tokens.prompt", "tokens.generated",
                "requests.accepted", "requests.finished", "preemptions", "kv_cache.blocks.cached",
                "kv_cache.host_blocks.limit", "kv_cache.host_blocks.used", "kv_cache.offloads",
                "kv_cache.restores", "prefix_cache.queries", "prefix_cache.hits",
                "requests.held", "holds",
                "steps.with_decodes", "steps.over_target",
            )
        }  # fmt: skip
        duration = "gen_ai.server.request.duration"
        requests, _ = book.sum(duration, gen_ai__request__model="mine")
        steps, seconds = book.sum("headrace.step.duration")
        per_token, _ = book.sum("gen_ai.server.time_per_output_token")
    assert list(found.values()) == list(range(1, 22))
    assert (requests, per_token) == (2, 3)
    assert steps == h.engine.steps
    assert seconds == 0.25 * steps


async def test_counters_go_on_and_gauges_say_nothing_when_the_engine_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    book = Book()
    made = telemetry.ServerTelemetry(metrics=book.metrics, meter_provider=book.provider)
    monkeypatch.setattr(telemetry, "set_up", lambda *_: made)
    monkeypatch.setattr(metrics, "POLL_S", 0.01)
    figures = EngineStats(
        running=7, waiting=0, blocks_total=9, blocks_used=3, steps=100, prompt_tokens=50,
        generated_tokens=20, requests_accepted=4, requests_finished=0, preemptions=0,
        last_step_s=0.5,
    )  # fmt: skip

    class Engine(FakeEngine):
        async def stats(self) -> EngineStats:
            self._running()
            return figures

    engine = Engine(restartable=True)
    running, steps = "headrace.requests.running", "headrace.steps"
    async with serving(engine) as h:
        await until(lambda: book.points(running))
        assert (book.value(running), book.value(steps)) == (7, 100)
        for restarts, total in ((1, 103), (2, 353)):
            engine.load_gate = asyncio.Event()
            engine.die(RuntimeError("gone"))
            await until(lambda: not book.points(running))
            before = book.value(steps)
            await until(lambda: h.server.state.phase.value == "restarting")
            # The new one counts from 0, and may soon have counted more than the last one.
            figures = replace(figures, running=restarts, steps=total - before)
            engine.load_gate.set()
            engine.load_gate = None
            await until(lambda: book.points(running))
            assert (book.value(running), book.value(steps)) == (restarts, total)
            assert book.value("headrace.tokens.prompt") == 50 * (restarts + 1)


async def test_callers_are_told_of_by_name_and_the_others_never_shrink() -> None:
    book = Book()
    rows = (CallerStats(CallerKey("a"), 2.0, 3, 4, 50), CallerStats(CallerKey("b"), 1.0, 0, 1, 7))
    others = CallerStats(running=1, waiting=2, service=100)
    figures = [
        EngineStats(waiting=5, callers=rows, other_callers=others),
        EngineStats(callers=rows[:1]),
    ]

    class Engine(FakeEngine):
        async def stats(self) -> EngineStats:
            return figures[0]

    def told(name: str) -> dict[str, float]:
        points = book.points(f"headrace.callers.{name}")
        assert all(len(point.attributes) == 1 for point in points)
        return {
            point.attributes.get("headrace.caller", point.attributes.get("headrace.callers")): (
                point.value
            )
            for point in points
        }

    async def poll_once() -> None:
        task = asyncio.create_task(book.metrics.poll(Engine()))
        await asyncio.sleep(0)
        task.cancel()

    await poll_once()
    assert told("running") == {"a": 3, "b": 0, "other": 1}
    assert told("waiting") == {"a": 4, "b": 1, "other": 2}
    assert told("service") == {"a": 50, "b": 7, "other": 100}
    book.metrics.engine_starts()  # what the one before gave is the others'
    figures.pop(0)
    await poll_once()
    assert told("service") == {"a": 50, "other": 157}
    book.provider.shutdown()


async def test_ten_thousand_callers_make_few_series() -> None:
    book = Book()
    figures = EngineStats()
    total = 0

    class Engine(FakeEngine):
        async def stats(self) -> EngineStats:
            return figures

    for first in range(0, 10_000, 32):
        names = range(first, first + 32)
        rows = tuple(CallerStats(CallerKey(f"user-{i}"), 1.0, 1, 2, 3) for i in names)
        others = CallerStats(service=total) if total else None  # those before are forgotten
        figures = replace(figures, callers=rows, other_callers=others)
        task = asyncio.create_task(book.metrics.poll(Engine()))
        await asyncio.sleep(0)
        task.cancel()
        total += 3 * len(rows)
        for name, wanted in (("running", 32), ("waiting", 64), ("service", total)):
            points = book.points(f"headrace.callers.{name}")
            assert len(points) <= 33
            assert sum(point.value for point in points) == wanted
    # A point that is not exported any more is still kept by the library, and by collectors.
    kept = book.metrics._named
    assert len(kept) == MAX_CALLERS
    book.provider.shutdown()


def test_the_documentation_lists_them_all() -> None:
    names: set[str] = set()

    class Names:
        """A meter that only takes note of names."""

        def __getattr__(self, _create: str) -> Any:
            return lambda name, *_arguments, **_options: names.add(name)

    Metrics(cast(Meter, Names()), FIGURES)
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*`) \| (?:histogram|gauge|counter) \|", text, re.M)
    listed = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert sorted(listed) == sorted(names)
