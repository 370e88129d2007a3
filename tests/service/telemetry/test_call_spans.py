"""The spans of RPCs, by a real server whose handlers end in every way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from headrace.v1 import model_service_pb2
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from service.door.interceptors import Entrance, Recovery
from service.errors.call_errors import FieldError
from service.errors.refusals import Refusals
from service.logs.context import current_trace
from service.server import grpc_servers
from service.telemetry import setup as telemetry
from service.telemetry.call_spans import CallSpans
from service.telemetry.request_spans import Spans
from tests.service.helpers import refused, serving, until

NAMES = ("Unary", "Stream")


class Place:
    """A server with two methods, which do as `course` does."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.course: Any = None
        self.channel: Any = None
        self.recovery = Recovery(Refusals())

    async def unary(self, _requests: Any, context: Any) -> Any:
        """The last of what the course yields."""
        response = None
        async for one in self.course(context):
            response = one
        return response

    async def stream(self, _requests: Any, context: Any) -> AsyncIterator[Any]:
        """All that the course yields."""
        async for one in self.course(context):
            yield one

    def call(self, name: str, **options: Any) -> Any:
        """Begin a call of a method."""
        kind = self.channel.unary_stream if name == "Stream" else self.channel.unary_unary
        return kind(f"/test.Test/{name}", lambda message: message.SerializeToString())(
            Empty(), **options
        )

    async def end_of(self, name: str, **options: Any) -> grpc.StatusCode:
        """How a call of a method ends."""
        call = self.call(name, **options)
        if name == "Stream":
            with suppress(grpc.aio.AioRpcError):
                _ = [one async for one in call]
        code: grpc.StatusCode = await call.code()
        return code

    async def span(self) -> ReadableSpan:
        """The one span."""
        await until(self.exporter.get_finished_spans)
        [span] = self.exporter.get_finished_spans()
        return span


@asynccontextmanager
async def place() -> AsyncIterator[Place]:
    """A server that listens, and a channel to it."""
    made = Place()
    server = grpc.aio.server(interceptors=(made.recovery, CallSpans(Spans(made.provider))))
    codec: dict[str, Any] = {
        "request_deserializer": Empty.FromString,
        "response_serializer": lambda message: message.SerializeToString(),
    }
    handlers = {
        "Unary": grpc.stream_unary_rpc_method_handler(made.unary, **codec),
        "Stream": grpc.stream_stream_rpc_method_handler(made.stream, **codec),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as made.channel:
        yield made
    await server.stop(None)


def told(span: ReadableSpan) -> tuple[str, Any, Any, Any]:
    """Status, code, type of error and reason of a span."""
    attributes = span.attributes or {}
    names = ("rpc.grpc.status_code", "error.type", "headrace.refusal.reason")
    code, error, reason = map(attributes.get, names)
    assert span.status.description is None
    assert not span.events
    return span.status.status_code.name, code, error, reason


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged at WARNING or above. gRPC itself logs a write that failed, at times."""
    return [
        one.getMessage()
        for one in caplog.records
        if one.levelno >= logging.WARNING and not one.name.startswith("grpc.")
    ]


async def _well(_context: Any) -> AsyncIterator[Any]:
    yield Empty()


async def _crashes(_context: Any) -> AsyncIterator[Any]:
    yield Empty()
    raise ZeroDivisionError


async def _refuses(_context: Any) -> AsyncIterator[Any]:
    yield Empty()
    raise FieldError("spec", "it is wrong")


async def _aborts(context: Any) -> AsyncIterator[Any]:
    yield Empty()
    await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing")


async def _breaks(context: Any) -> AsyncIterator[Any]:
    yield Empty()
    await context.abort(grpc.StatusCode.UNAVAILABLE, "secret")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("course", "status", "code", "error", "reason"),
    [
        (_well, "UNSET", grpc.StatusCode.OK, None, None),
        (_crashes, "ERROR", grpc.StatusCode.INTERNAL, "INTERNAL", "INTERNAL"),
        (_refuses, "UNSET", grpc.StatusCode.INVALID_ARGUMENT, None, "INVALID_FIELD"),
        (_aborts, "UNSET", grpc.StatusCode.NOT_FOUND, None, None),
        (_breaks, "ERROR", grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", None),
    ],
)
async def test_a_span_tells_the_end_of_its_call(
    name: str, course: Any, status: str, code: grpc.StatusCode, error: str, reason: str
) -> None:
    async with place() as p:
        p.course = course
        assert await p.end_of(name) is code
        span = await p.span()
        await until(lambda: not p.recovery.open)
    assert told(span) == (status, code.value[0], error, reason)
    assert span.kind is SpanKind.SERVER


@pytest.mark.parametrize("name", NAMES)
async def test_calls_that_are_cut_off(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async def waits(_context: Any) -> AsyncIterator[Any]:
        entered.set()
        await asyncio.Event().wait()
        yield Empty()

    async with place() as p:
        p.course = waits
        entered = asyncio.Event()
        call = p.call(name)
        await entered.wait()
        call.cancel()
        assert told(await p.span()) == ("UNSET", 1, None, None)
        p.exporter.clear()
        assert await p.end_of(name, timeout=0.5) is grpc.StatusCode.DEADLINE_EXCEEDED
        # The server learns of it from its own clock, or from the client that gives up.
        over = ("ERROR", 4, "DEADLINE_EXCEEDED", None)
        assert told(await p.span()) in (over, ("UNSET", 1, None, None))
    assert not complaints(caplog)


async def test_a_caller_leaves_while_a_message_is_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Large:
        def SerializeToString(self) -> bytes:  # protobuf's name
            return bytes(16 << 20)

    async def writes(_context: Any) -> AsyncIterator[Any]:
        entered.set()
        while True:
            yield Large()

    async with place() as p:
        p.course = writes
        entered = asyncio.Event()
        call = p.call("Stream")
        await entered.wait()  # nothing is read, so the write waits
        call.cancel()
        assert told(await p.span()) == ("UNSET", 1, None, None)
        await until(lambda: not p.recovery.open)
    assert not complaints(caplog)


@pytest.mark.parametrize("name", NAMES)
async def test_the_span_is_the_current_one(name: str) -> None:
    async def course(_context: Any) -> AsyncIterator[Any]:
        seen.append((trace.get_current_span().get_span_context(), current_trace.get()))
        yield Empty()

    seen: list[Any] = []
    async with place() as p:
        p.course = course
        await p.end_of(name)
        ids = (await p.span()).get_span_context()
    assert ids is not None
    [(found, logged)] = seen
    assert found == ids
    assert logged == (f"{ids.trace_id:032x}", f"{ids.span_id:016x}")


async def test_too_large_answers_and_odd_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "set_up", lambda *_: telemetry.ServerTelemetry(Spans(provider)))
    monkeypatch.setattr(grpc_servers, "Entrance", lambda *parts: Entrance(*parts[:3], 100))
    async with serving() as h:
        for path in ("/", "//", "a", "/a"):
            call = h.channel.unary_unary(path)(b"")
            assert (await refused(call)).code is grpc.StatusCode.UNIMPLEMENTED
        assert not exporter.get_finished_spans()
        too_large = await refused(h.models.GetModel(model_service_pb2.GetModelRequest()))
        assert too_large.reason == "ANSWER_TOO_LARGE"

        def calls() -> list[ReadableSpan]:
            return [one for one in exporter.get_finished_spans() if one.kind is SpanKind.SERVER]

        await until(calls)
        [span] = calls()
    assert told(span) == ("UNSET", too_large.code.value[0], None, too_large.reason)
