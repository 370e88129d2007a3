"""Spans of calls and of requests, as real receivers of OTLP get them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from headrace.v1 import control_service_pb2 as control
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from opentelemetry.proto.trace.v1 import trace_pb2

from engine.contract.errors import QueueFullError
from engine.contract.outputs import RequestFailure
from service.logs.form import Json
from service.telemetry.telemetry_config import TelemetryConfig
from tests.service.fake_engine import FakeEngine, model_info, says
from tests.service.helpers import Harness, refused, serving, spec, until
from tests.service.receivers import RECEIVERS, Received, attributes_of, by_grpc, by_http

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = (("traceparent", f"00-{TRACE}-{CALLER}-01"),)
SERVER, INTERNAL = trace_pb2.Span.SPAN_KIND_SERVER, trace_pb2.Span.SPAN_KIND_INTERNAL
ERROR = trace_pb2.Status.STATUS_CODE_ERROR
UNSET = trace_pb2.Status.STATUS_CODE_UNSET
PHASES = ["headrace.accepted", "headrace.scheduled", "headrace.first_token", "headrace.last_token"]


@asynccontextmanager
async def traced(
    monkeypatch: pytest.MonkeyPatch,
    received: Received,
    engine: FakeEngine,
    protocol: str = "grpc",
    **variables: str,
) -> AsyncIterator[Harness]:
    """A server that sends its spans to a receiver."""
    environment = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": received.endpoint
        + ("/v1/traces" if protocol != "grpc" else ""),
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_BSP_SCHEDULE_DELAY": "20",
        **variables,
    }
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    config = TelemetryConfig.read(environment)
    async with serving(engine, telemetry=config, served_name="mine") as h:
        yield h


def of_kind(received: Received, kind: int) -> list[Any]:
    """The spans of a kind, in the order of their beginnings."""
    found = [span for span in received.spans() if span.kind == kind]
    return sorted(found, key=lambda span: span.start_time_unix_nano)


@pytest.mark.parametrize("protocol", list(RECEIVERS))
async def test_a_request_has_a_span_of_its_own(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RECEIVERS[protocol]() as received:
        engine = FakeEngine(script=says("abc"))
        async with traced(monkeypatch, received, engine, protocol) as h:
            before = time.time_ns()
            asked = spec(
                request_id="r1",
                labels={"team": "search"},
                stop={"max_tokens": 7},
                sampling={"temperature": 0.5, "seed": 9, "top_p": 1, "presence_penalty": 0.5},
            )
            await h.generation.Generate(rpc.GenerateRequest(spec=asked), metadata=CONTEXT)
            await until(lambda: len(received.spans()) == 2)
        [call], [request] = of_kind(received, SERVER), of_kind(received, INTERNAL)
    assert call.name == "/headrace.v1.GenerationService/Generate"
    assert request.name == "text_completion mine"
    # Both are the caller's children, and one knows the other.
    for span in (call, request):
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, CALLER)
        assert span.start_time_unix_nano >= before
        assert span.status.code == UNSET
    [link] = request.links
    assert link.span_id == call.span_id
    told = attributes_of(request)
    assert told["headrace.request.id"] == told["gen_ai.response.id"] == "r1"
    assert told["gen_ai.request.model"] == "mine"
    assert told["headrace.label.team"] == "search"
    assert told["headrace.caller"] == "anonymous"
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.seed"]) == (7, 9)
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.request.presence_penalty"] == 0.5
    assert not {"gen_ai.request.top_p", "gen_ai.request.frequency_penalty"} & told.keys()
    assert told["gen_ai.usage.input_tokens"] == 2
    assert told["gen_ai.usage.output_tokens"] == 4
    assert told["gen_ai.response.finish_reasons"] == ["stop"]
    assert [event.name for event in request.events] == PHASES
    times = [
        request.start_time_unix_nano,
        *(event.time_unix_nano for event in request.events),
        request.end_time_unix_nano,
    ]
    assert times == sorted(times)
    assert request.end_time_unix_nano <= call.end_time_unix_nano + 2_000_000
    assert not any("messages" in name for name in told)
    of_call = attributes_of(call)
    assert of_call["rpc.system"] == "grpc"
    assert of_call["rpc.service"] == "headrace.v1.GenerationService"
    assert of_call["rpc.method"] == "Generate"
    assert of_call["rpc.grpc.status_code"] == 0


async def test_a_conversation_is_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pb.GenerationSpec(chat={"messages": [{"role": pb.CHAT_ROLE_USER, "content": "hi"}]})
    with by_grpc() as received:
        async with traced(monkeypatch, received, FakeEngine(script=says("a"))) as h:
            await h.generate(asked)
        [request] = of_kind(received, INTERNAL)
    assert request.name == "chat mine"
    assert attributes_of(request)["gen_ai.operation.name"] == "chat"


async def test_a_span_and_a_log_line_name_the_adapter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However the request names it; a request without one has none, and neither has one that was
    refused because there is no such adapter.
    """
    engine = FakeEngine(info=model_info(serves_adapters=True), auto=False)
    with by_grpc() as received:
        async with traced(monkeypatch, received, engine) as h:
            await h.control.LoadAdapter(control.LoadAdapterRequest(name="team/a", source="s"))
            session = h.session()
            named = {"field": {"adapter": "team/a"}, "model": {"model": "team/a"}, "base": {}}
            for name, more in named.items():
                await session.add(spec(request_id=name, **more))
            await session.read_until(lambda _: len(session.events()) == 3)
            await refused(h.generate(spec(request_id="gone", adapter="gone")))
            for one in engine.submitted:
                engine.fail(one.request_id, RequestFailure("it broke", "id1"))
            engine.step()
            await session.end()
            await until(lambda: len(of_kind(received, INTERNAL)) == 4)
    told = [attributes_of(span) for span in of_kind(received, INTERNAL)]
    found = {one["headrace.request.id"]: one.get("headrace.adapter") for one in told}
    assert found == {"field": "team/a", "model": "team/a", "base": None, "gone": None}
    lines = [json.loads(Json().record(one, 0)) for one in caplog.records]
    assert {one["request_id"]: one.get("adapter") for one in lines if "id1" in one["message"]} == {
        "field": "team/a", "model": "team/a", "base": None,
    }  # fmt: skip


async def test_the_log_names_the_adapter_while_a_request_is_started() -> None:
    class Lines(logging.Handler):
        """Formats records where they are made, as the server's own handler does."""

        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(Json().record(record, 0)))

    lines: list[dict[str, str]] = []
    engine, handler = FakeEngine(info=model_info(serves_adapters=True)), Lines()
    async with serving(engine) as h:
        await h.control.LoadAdapter(control.LoadAdapterRequest(name="a", source="s"))
        logging.getLogger().addHandler(handler)
        try:
            for name in ("a", ""):
                engine.refuse_next.append(RuntimeError("a defect"))
                await refused(h.generate(spec(request_id=f"of-{name}", adapter=name)))
        finally:
            logging.getLogger().removeHandler(handler)
    found = {
        one.get("request_id"): one.get("adapter")
        for one in lines
        if one["message"].startswith("unexpected error")
    }
    assert found == {"of-a": "a", "of-": None}


async def test_each_request_of_a_session_belongs_to_whoever_wanted_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = "4bf92f3577b34da6a3ce929d0e0e4736"
    with by_grpc() as received:
        async with traced(monkeypatch, received, FakeEngine(script=says("a"))) as h:
            session = h.session(metadata=CONTEXT)
            for i in range(20):
                await session.add(spec(request_id=f"r{i}"))
            own = {"traceparent": f"00-{other}-00f067aa0ba902b7-01"}
            await session.add(spec(request_id="own", labels=own))
            await session.end()
            await until(lambda: len(received.spans()) == 22)
        [call], requests = of_kind(received, SERVER), of_kind(received, INTERNAL)
    ids = [attributes_of(span)["headrace.request.id"] for span in requests]
    assert sorted(ids) == sorted([*(f"r{i}" for i in range(20)), "own"])
    for span in requests:
        is_own = attributes_of(span)["headrace.request.id"] == "own"
        assert span.trace_id.hex() == (other if is_own else TRACE)
        assert [link.span_id for link in span.links] == [call.span_id]


async def test_callers_faults_are_no_errors_and_cost_no_more_than_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with by_http() as received:
        engine = FakeEngine(script=says("abc"))
        async with traced(monkeypatch, received, engine, "http/protobuf") as h:
            await h.generate(spec(request_id="answered"))
            await until(lambda: len(received.spans()) == 2)
            answer = sum(span.ByteSize() for span in received.spans())
            engine.refuse_next.append(QueueFullError(5, 1.0))
            await refused(h.generate(spec(request_id="refused")))
            await until(lambda: len(received.spans()) == 4)
            refusal = sum(span.ByteSize() for span in received.spans()) - answer
            await refused(h.generate(spec(sampling={"temperature": -1})))
            await until(lambda: len(received.spans()) >= 5)
        assert refusal <= answer
        for span in received.spans():
            assert span.status.code == UNSET
            assert not any(event.name == "exception" for event in span.events)
        said = [attributes_of(span).get("headrace.refusal.reason") for span in received.spans()]
        assert said.count("QUEUE_FULL") == 2  # the call and the request
        assert "INVALID_FIELD" in said


async def test_cancelled_and_failed_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    with by_grpc() as received:
        engine = FakeEngine(auto=False)
        async with traced(monkeypatch, received, engine) as h:
            session = h.session()
            for name in ("cancelled", "broken", "complex", "lost"):
                await session.add(spec(request_id=name))
            await session.read_until(lambda _: len(session.events()) == 4)
            names = {
                one.request_id.partition("/")[2].partition("#")[0]: one.request_id
                for one in engine.submitted
            }
            engine.fail(names["broken"], RequestFailure("it broke", "id1"))
            engine.fail(names["complex"], RequestFailure("too complex", "id2", field="grammar"))
            engine.fail(names["lost"], RequestFailure("it stopped", "id3", retryable=True))
            await session.send(cancel={"request_id": "cancelled"})
            await session.read_until(lambda message: bool(message.cancelled))
            engine.step()
            await session.end()
            await until(lambda: len(received.spans()) == 5)
        spans = {
            attributes_of(span)["headrace.request.id"]: span for span in of_kind(received, INTERNAL)
        }
    found = {
        name: (span.status.code, attributes_of(span).get("error.type"))
        for name, span in spans.items()
    }
    assert found == {
        "cancelled": (UNSET, None),
        "broken": (ERROR, "internal"),
        "complex": (UNSET, None),
        "lost": (ERROR, "unavailable"),
    }
    assert attributes_of(spans["broken"])["headrace.error_id"] == "id1"


async def test_requests_that_are_lost_with_the_server_have_spans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with by_grpc() as received:
        async with traced(monkeypatch, received, FakeEngine(auto=False)) as h:
            await h.generation.AddRequest(rpc.AddRequestRequest(spec=spec(request_id="r")))
        assert [
            attributes_of(span)["headrace.request.id"] for span in of_kind(received, INTERNAL)
        ] == ["r"]


async def test_content_only_when_opted_in(monkeypatch: pytest.MonkeyPatch) -> None:
    opted = {"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true"}
    with by_grpc() as received:
        engine = FakeEngine(script=says("secret out"))
        async with traced(monkeypatch, received, engine, **opted) as h:
            await h.generate(spec("secret in", n=2))
            await until(lambda: len(received.spans()) == 2)
        [request] = of_kind(received, INTERNAL)
    told = attributes_of(request)
    [prompt] = json.loads(told["gen_ai.input.messages"])
    outputs = json.loads(told["gen_ai.output.messages"])
    assert prompt["parts"][0]["content"] == "secret in"
    assert [one["parts"][0]["content"] for one in outputs] == ["secret out"] * 2
    with by_grpc() as received:
        engine = FakeEngine(script=says("secret out"))
        monkeypatch.delenv(next(iter(opted)))
        async with traced(monkeypatch, received, engine) as h:
            await h.generate(spec("secret in"))
            await until(lambda: len(received.spans()) == 2)
        assert not any(b"secret" in message.SerializeToString() for message in received.traces)


async def test_what_is_not_sampled_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with by_grpc() as received:
        engine = FakeEngine(script=says("a"))
        never = {"OTEL_TRACES_SAMPLER": "always_off"}
        async with traced(monkeypatch, received, engine, **never) as h:
            await h.generate(spec())
            assert h.server._telemetry.spans is not None
            assert not len(h.server._telemetry.spans._live)
        assert not received.spans()
