"""`engine.Telemetry`: what the Python API's managers tell OpenTelemetry is what happened."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import engine
from engine.api.offline import LoadedModel, from_model
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.errors import DuplicateRequestError, InvalidRequestError, QueueFullError
from tests.engine.rig import Rig, result
from tests.tiny_models import make_prompts

SMALL = ContinuousBatchingConfig(block_size=8, num_blocks=64, max_batch_tokens=64)
PHASES = ["headrace.accepted", "headrace.scheduled", "headrace.first_token", "headrace.last_token"]


class Book:
    """A Telemetry and what it told."""

    def __init__(self, *, trace_steps: bool = False) -> None:
        self._reader = InMemoryMetricReader()
        self._exported = InMemorySpanExporter()
        meters = MeterProvider([self._reader], shutdown_on_exit=False)
        tracers = TracerProvider(shutdown_on_exit=False)
        tracers.add_span_processor(SimpleSpanProcessor(self._exported))
        self.tracer = tracers.get_tracer("test")
        self.telemetry = engine.Telemetry(
            meter_provider=meters, tracer_provider=tracers, trace_steps=trace_steps
        )

    def points(self) -> dict[str, list[Any]]:
        """The data points of all metrics now."""
        data = self._reader.get_metrics_data()
        return {
            metric.name: list(metric.data.data_points)
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def values(self) -> dict[str, float]:
        """The values of gauges and counters now."""
        return {
            name: points[0].value
            for name, points in self.points().items()
            if hasattr(points[0], "value")
        }

    def spans(self, name: str = "") -> list[Any]:
        """The spans that have ended, in order."""
        return [one for one in self._exported.get_finished_spans() if name in one.name]


def observed(loaded: Callable[[str], LoadedModel], book: Book) -> LoadedModel:
    return from_model(loaded("llama").model, telemetry=book.telemetry)


def test_metrics_and_spans_are_those_of_the_run(loaded: Callable[[str], LoadedModel]) -> None:
    book = Book(trace_steps=True)
    model = observed(loaded, book)
    manager = model.init_continuous_batching(None, SMALL)
    manager.start()
    prompts = make_prompts((20, 9, 5))
    with book.tracer.start_as_current_span("caller") as caller:
        names = [
            manager.add_request(prompt, max_new_tokens=4 + number, eos_token_id=-1)
            for number, prompt in enumerate(prompts)
        ]
    outputs = {name: manager.get_result(name, timeout=60) for name in names}
    live = book.values()
    assert live["headrace.kv_cache.blocks.limit"] == manager.stats().blocks_total
    manager.stop()
    stats = manager.stats()

    values = book.values()
    assert {
        name: values[name]
        for name in (
            "headrace.steps", "headrace.requests.accepted", "headrace.requests.finished",
            "headrace.tokens.prompt", "headrace.tokens.generated", "headrace.preemptions",
            "headrace.prefix_cache.queries", "headrace.prefix_cache.hits",
        )
    } == {
        "headrace.steps": stats.steps,
        "headrace.requests.accepted": 3,
        "headrace.requests.finished": 3,
        "headrace.tokens.prompt": 34,
        "headrace.tokens.generated": 4 + 5 + 6,
        "headrace.preemptions": 0,
        "headrace.prefix_cache.queries": stats.prefix_queries,
        "headrace.prefix_cache.hits": stats.prefix_hits,
    }  # fmt: skip
    assert "headrace.requests.running" not in values  # nothing runs any more

    points = book.points()
    [step] = points["headrace.step.duration"]
    assert step.count == stats.steps
    of_phases = {
        point.attributes["headrace.step.phase"]: point.sum
        for point in points["headrace.step.tokens"]
    }
    assert of_phases == {"prompt": 34, "decode": 3 + 4 + 5}
    [duration] = points["gen_ai.server.request.duration"]
    assert duration.count == 3
    assert dict(duration.attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": model._name,
        "gen_ai.response.finish_reasons": "length",
    }
    lifespans = [output.lifespan[1] - output.created_time for output in outputs.values() if output]
    assert duration.sum == pytest.approx(sum(lifespans), abs=1e-3)

    spans = {one.attributes["headrace.request.id"]: one for one in book.spans("text_completion")}
    assert sorted(spans) == sorted(names)
    for number, name in enumerate(names):
        span, output = spans[name], outputs[name]
        assert output is not None
        assert span.parent.span_id == caller.get_span_context().span_id
        assert span.attributes["gen_ai.usage.input_tokens"] == len(prompts[number])
        assert span.attributes["gen_ai.usage.output_tokens"] == len(output.generated_tokens)
        assert span.attributes["gen_ai.response.finish_reasons"] == ("length",)
        assert [event.name for event in span.events] == PHASES
        assert span.status.status_code is StatusCode.UNSET
        took_s = (span.end_time - span.start_time) / 1e9
        assert took_s == pytest.approx(output.lifespan[1] - output.created_time, abs=1e-3)
    steps = book.spans("headrace.step")
    assert len(steps) == stats.steps
    assert sum(one.attributes["headrace.step.decode_tokens"] for one in steps) == 3 + 4 + 5


def test_managers_are_summed_and_what_has_ended_is_kept(
    loaded: Callable[[str], LoadedModel],
) -> None:
    book = Book()
    model = observed(loaded, book)
    for _ in range(2):  # a manager each time, which is dropped
        model.generate_batch(
            make_prompts((5, 3)),
            continuous_batching_config=SMALL,
            max_new_tokens=3,
            eos_token_id=-1,
            progress_bar=False,
        )
    assert book.values()["headrace.tokens.generated"] == 12
    one, other = (model.init_continuous_batching(None, SMALL) for _ in range(2))
    one.start()
    other.start()
    both = one.stats().blocks_total + other.stats().blocks_total
    assert book.values()["headrace.kv_cache.blocks.limit"] == both
    for manager in (one, other):
        name = manager.add_request([1, 2, 3], max_new_tokens=3, eos_token_id=-1)
        manager.get_result(name, timeout=60)
    one.stop()
    one.start()  # it goes on counting where it was
    assert book.values()["headrace.tokens.generated"] == 18
    one.stop()
    other.stop()
    values = book.values()
    assert (values["headrace.tokens.generated"], values["headrace.requests.finished"]) == (18, 6)
    assert all(len(points) <= 2 for points in book.points().values())
    dropped = weakref.ref(other)
    del manager, one, other
    gc.collect()
    assert dropped() is None


def test_refused_requests_have_no_span_and_take_no_others() -> None:
    book = Book()
    rig = Rig(max_queue_size=1, max_requests=1, observer=book.telemetry.observer("scripted"))
    rig.hold()
    manager = rig.manager
    manager.start()
    manager.add_request([1, 2], request_id="a", max_new_tokens=3)
    rig.wait_for_step()
    manager.add_request([1, 2], request_id="b", max_new_tokens=3)
    with pytest.raises(QueueFullError):
        manager.add_request([1, 2], request_id="c", max_new_tokens=3)
    with pytest.raises(DuplicateRequestError):
        manager.add_request([1, 2], request_id="a", max_new_tokens=3)
    with pytest.raises(InvalidRequestError):
        manager.add_request([], request_id="d", max_new_tokens=3)
    rig.let()
    for name in ("a", "b"):
        assert result(manager, name).is_finished()
        # A name may be used again as soon as its result was read.
        manager.add_request([1, 2], request_id=name, max_new_tokens=2)
        assert result(manager, name).is_finished()
    manager.stop()
    told = [
        (one.attributes["headrace.request.id"], one.attributes["gen_ai.usage.output_tokens"])
        for one in book.spans()
    ]
    assert sorted(told) == [("a", 2), ("a", 3), ("b", 2), ("b", 3)]


def test_what_is_lost_is_an_error() -> None:
    book = Book()
    rig = Rig(observer=book.telemetry.observer("scripted"))
    rig.hold()
    rig.manager.start()
    rig.manager.add_request([1, 2], request_id="a", max_new_tokens=1000)
    rig.wait_for_step()
    rig.manager.stop(block=False, hard_stop=True)
    rig.let()
    rig.manager.join()
    [span] = book.spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "unavailable"


def test_an_observer_that_fails_costs_no_results(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def started(self, stats: object) -> None: ...
        def ended(self) -> None: ...
        def submitting(self, requests: object, arrival: float) -> None: ...
        def refused(self, requests: object) -> None: ...
        def on_step(self, step: object) -> None:
            raise RuntimeError("no room")

    rig = Rig(observer=Broken())
    rig.manager.start()
    rig.manager.add_request([1, 2], request_id="a", max_new_tokens=3)
    assert result(rig.manager, "a").is_finished()
    rig.manager.stop()
    assert "the telemetry of a step failed" in caplog.text


def test_without_opentelemetry_the_engine_works() -> None:
    lines = [
        "import sys",
        "sys.modules['opentelemetry'] = None",
        "import engine",
        "model = engine.load('models/demo', dtype='float32', device='cpu')",
        "done = model.generate_batch([[1, 2]], max_new_tokens=2, progress_bar=False, warmup=False)",
        "assert len(done) == 1",
        "try: engine.Telemetry",
        "except ImportError: print('only Telemetry needs it')",
    ]
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(lines)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "only Telemetry needs it"
