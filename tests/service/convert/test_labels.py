"""A request's labels: what they may be, and where they are told."""

from __future__ import annotations

import json
import logging
from typing import Any

import grpc
import pytest
from headrace.v1 import control_service_pb2 as control
from headrace.v1 import generation_service_pb2 as rpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from engine.contract.errors import InvalidRequestError
from engine.contract.outputs import RequestFailure
from service.convert.values import check_labels
from service.errors.call_errors import FieldError
from service.telemetry import setup as telemetry
from service.telemetry.request_spans import Spans
from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import Harness, details, refused, serving, spec, until

LABELS = {"team": "search", "job/step": "nightly \N{SNOWMAN}"}


@pytest.mark.parametrize(
    ("labels", "field", "said"),
    [
        ({f"name{i}": "" for i in range(17)}, "labels", "at most 16"),
        ({"": "x"}, "labels", "1 to 64"),
        ({"n" * 65: "x"}, "labels", "1 to 64"),
        ({"a b": "x"}, "labels", "1 to 64"),
        ({"a\n": "x"}, "labels", "1 to 64"),
        ({"\N{SNOWMAN}": "x"}, "labels", "1 to 64"),
        ({"a": "x" * 129}, "labels[a]", "128 bytes"),
        ({"a": "\N{SNOWMAN}" * 43}, "labels[a]", "128 bytes"),
        ({"a": "one\ntwo"}, "labels[a]", "control"),
        ({"a": "\x1b[1m"}, "labels[a]", "control"),
        ({"a": "\x9b"}, "labels[a]", "control"),
    ],
)
async def test_labels_out_of_bounds_are_refused(
    labels: dict[str, str], field: str, said: str
) -> None:
    with pytest.raises(FieldError, match=said):
        check_labels(spec(labels=labels).labels, "labels")
    async with serving() as h:
        session = h.session()
        await session.add(spec(labels=labels))
        [rejection] = (await session.read()).rejections
        error = await refused(h.generate(spec(labels=labels)))
        await session.end()
        assert not h.engine.submitted
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, f"spec.{field}")
    info = details(rejection.status)["ErrorInfo"]
    assert info.metadata["field"] == f"add.spec.{field}"


def test_the_largest_labels_pass() -> None:
    labels = {f"{i:064}": "é" * 64 for i in range(16)}
    assert check_labels(spec(labels=labels).labels, "labels") == labels


def test_a_name_stands_once() -> None:
    twice = [{"name": "a", "value": "1"}, {"name": "a", "value": "2"}]
    with pytest.raises(FieldError, match="two labels of one name"):
        check_labels(spec(labels=twice).labels, "labels")


async def listed(h: Harness) -> list[dict[str, str]]:
    """The labels of the live requests, as operators see them."""
    answer = await h.control.ListRequests(control.ListRequestsRequest())
    return [{label.name: label.value for label in one.labels} for one in answer.requests]


async def test_operators_see_the_labels_of_live_requests() -> None:
    async with serving(FakeEngine(script=says("abc"), auto=False)) as h:
        session = h.session()
        await session.add(spec(request_id="a", labels=LABELS))
        await session.add(spec(request_id="b"))
        await session.read_until(lambda _: len(session.events()) == 2)
        await h.generation.AddRequest(rpc.AddRequestRequest(spec=spec(labels={"x": ""})))
        assert await listed(h) == [LABELS, {}, {"x": ""}]
        kept = h.registry.requests["anonymous", "a"]
        h.engine.run()
        await session.end()
        assert await listed(h) == []
        assert not kept.labels  # nothing of what is kept is uncounted


async def test_a_failed_request_is_logged_with_its_labels(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine(auto=False)
    async with serving(engine) as h:
        session = h.session()
        for name in ("ours", "theirs", "died"):
            await session.add(spec(request_id=name, labels=LABELS))
        await session.read_until(lambda _: len(session.events()) == 3)
        ours, theirs, died = (request.request_id for request in engine.submitted)
        with caplog.at_level(logging.WARNING, "service"):
            engine.fail(ours, RequestFailure("it broke", "id1"))
            engine.fail(theirs, RequestFailure("too complex", "id2", field="grammar"))
            engine.fail(died, RequestFailure("the engine stopped", "id3", retryable=True))
            engine.step()
            await session.end()
    [line] = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    said, _, told = line.partition(": ")
    assert said == "request ours of anonymous failed [error_id=id1]"
    assert json.loads(told) == LABELS


async def test_spans_have_the_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    made = telemetry.ServerTelemetry(Spans(provider))
    monkeypatch.setattr(telemetry, "set_up", lambda *_: made)
    engine = FakeEngine(script=says("x"))
    async with serving(engine) as h:
        await h.generate(spec(labels=LABELS))
        retried = rpc.AddRequestRequest(spec=spec(request_id="r", labels=LABELS))
        for _ in range(2):
            await h.generation.AddRequest(retried)
        await h.stream(spec(labels=LABELS))
        engine.refuse_next.append(InvalidRequestError("n", "is refused"))
        await refused(h.generate(spec(labels=LABELS)))
        session = h.session()
        for name in ("a", "b"):
            await session.add(spec(request_id=name, labels={"name": name}))
        await session.add(spec(request_id="c"))
        await session.end()
        of_requests: list[Any] = []

        def ended() -> bool:
            of_requests[:] = [
                span for span in exporter.get_finished_spans() if span.kind is SpanKind.INTERNAL
            ]
            return len(of_requests) == 7

        await until(ended)
    # A retry that finds its request starts none.
    labels = {f"headrace.label.{name}": value for name, value in LABELS.items()}

    def labels_of(span: Any) -> dict[str, Any]:
        return {name: value for name, value in span.attributes.items() if "label" in name}

    def pairs(labels: dict[str, Any]) -> list[tuple[str, Any]]:
        return sorted(labels.items())

    expected = [labels] * 4 + [{"headrace.label.name": name} for name in ("a", "b")] + [{}]
    assert sorted(map(pairs, map(labels_of, of_requests))) == sorted(map(pairs, expected))
    rest = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert not any(map(labels_of, rest))
