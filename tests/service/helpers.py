"""A server around a fake engine, real gRPC over loopback, and short ways to say what tests say
often.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.control_service_pb2_grpc import ControlServiceStub
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub
from headrace.v1.model_service_pb2_grpc import ModelServiceStub

from engine.text import Tokenizer
from service.config import ServiceConfig
from service.server import NO_TELEMETRY, HeadraceServer
from service.telemetry.telemetry_config import TelemetryConfig
from tests.service.fake_engine import FakeEngine, byte_tokenizer

DEADLINE_S = 30.0
"""No single wait of a test takes longer: what does is stuck. Busy virtual machines stand still for
ten seconds now and then.
"""


class Harness:
    """A running server and a client of it."""

    def __init__(self, server: HeadraceServer, engine: FakeEngine, channel: Any) -> None:
        self.server = server
        self.engine = engine
        self.channel = channel
        self.generation: Any = GenerationServiceStub(channel)
        self.models: Any = ModelServiceStub(channel)
        self.control: Any = ControlServiceStub(channel)

    @property
    def registry(self) -> Any:
        """The server's registry."""
        return self.server.registry

    def session(self, **options: Any) -> Session:
        """A new session."""
        return Session(self.generation.StreamResult(**options))

    async def generate(self, spec: pb.GenerationSpec) -> rpc.GenerateResponse:
        """Call Generate."""
        return await self.generation.Generate(rpc.GenerateRequest(spec=spec), timeout=DEADLINE_S)

    async def stream(self, spec: pb.GenerationSpec) -> list[rpc.GenerateStreamResponse]:
        """Call GenerateStream and read it to its end."""
        call = self.generation.GenerateStream(
            rpc.GenerateStreamRequest(spec=spec), timeout=DEADLINE_S
        )
        return [message async for message in call]


class Names:
    """Whose the events of a session are, by the numbers that the server gives its requests."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def take(self, message: rpc.StreamResultResponse) -> list[tuple[str, pb.ResultEvent]]:
        """A message's events with their requests' ids; without numbers, as GetResult has them."""
        for attached in message.attached:
            self._name(attached.request_number, attached.request_id)
        found = []
        for event in message.events:
            if event.HasField("accepted"):
                self._name(event.request_number, event.accepted.request_id)
            plain = pb.ResultEvent()
            plain.CopyFrom(event)
            plain.request_number = 0
            found.append((self._names[event.request_number], plain))
        for detached in message.detached:
            assert self._names[detached.request_number] == detached.request_id
        return found

    def _name(self, number: int, name: str) -> None:
        assert number, "a session's requests are numbered from 1 on"
        assert self._names.setdefault(number, name) == name


class Session:
    """A client's side of StreamResult."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.messages: list[rpc.StreamResultResponse] = []

    async def send(self, command_id: int = 0, **command: Any) -> None:
        """Send a command, such as add=AddCommand(...)."""
        await self.call.write(rpc.StreamResultRequest(command_id=command_id, **command))

    async def add(self, spec: pb.GenerationSpec, command_id: int = 0) -> None:
        """Send an add."""
        await self.send(command_id, add=rpc.AddCommand(spec=spec))

    async def read(self) -> rpc.StreamResultResponse:
        """The next message."""
        async with asyncio.timeout(DEADLINE_S):
            message = await self.call.read()
        assert message is not grpc.aio.EOF, "the session ended"
        self.messages.append(message)
        return message

    async def read_until(
        self, wanted: Callable[[rpc.StreamResultResponse], Any]
    ) -> rpc.StreamResultResponse:
        """Read until a message fits."""
        while True:
            message = await self.read()
            if wanted(message):
                return message

    async def end(self) -> list[rpc.StreamResultResponse]:
        """Half-close and read the rest; returns all messages of the session."""
        await self.call.done_writing()
        return await self.rest()

    async def rest(self) -> list[rpc.StreamResultResponse]:
        """Read to the end, which must be OK; returns all messages of the session."""
        while True:
            async with asyncio.timeout(DEADLINE_S):
                message = await self.call.read()
            if message is grpc.aio.EOF:
                break
            self.messages.append(message)
        async with asyncio.timeout(DEADLINE_S):
            assert await self.call.code() is grpc.StatusCode.OK
        return self.messages

    def events(self) -> dict[str, list[pb.ResultEvent]]:
        """All events so far, by request."""
        names = Names()
        found: dict[str, list[pb.ResultEvent]] = {}
        for message in self.messages:
            for name, event in names.take(message):
                found.setdefault(name, []).append(event)
        return found


@asynccontextmanager
async def serving(
    engine: FakeEngine | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    has_tokenizer: bool = True,
    ready: bool = True,
    clock: Callable[[], float] = time.monotonic,
    telemetry: TelemetryConfig = NO_TELEMETRY,
    **options: Any,
) -> AsyncIterator[Harness]:
    """A server on a free loopback port (unless `listen` says otherwise), stopped at the end. Its
    advice when to come again has no jitter.
    """
    engine = engine or FakeEngine()
    if has_tokenizer:
        tokenizer = tokenizer or byte_tokenizer()
    config = ServiceConfig(**{"listen": ("127.0.0.1:0",), **options})
    server = HeadraceServer(
        config,
        engine,
        telemetry_config=telemetry,
        tokenizer_loader=lambda _info: tokenizer,
        restart_delay_s=0.01,
        clock=clock,
        jitter=lambda: 0.0,
    )
    await server.start()
    try:
        if ready:
            await server.ready()
        async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
            yield Harness(server, engine, channel)
    finally:
        await server.stop()


def spec(text: str = "hi", **fields: Any) -> pb.GenerationSpec:
    """A spec with a text input; fields as of the message, such as stop={"max_tokens": 5}."""
    if not {"tokens", "chat"} & fields.keys():
        fields["text"] = {"text": text}
    if isinstance(labels := fields.get("labels"), dict):
        fields["labels"] = [{"name": name, "value": value} for name, value in labels.items()]
    return pb.GenerationSpec(**fields)


def kinds(events: Iterable[pb.ResultEvent]) -> list[str]:
    """What each event is."""
    return [event.WhichOneof("event") for event in events]


def text_of(events: Iterable[pb.ResultEvent], choice: int = 0) -> str:
    """The text of all deltas of a choice."""
    return "".join(event.delta.text for event in events if event.choice_index == choice)


def ids_of(events: Iterable[pb.ResultEvent], choice: int = 0) -> list[int]:
    """The token ids of all deltas of a choice."""
    return [
        token_id
        for event in events
        if event.choice_index == choice
        for token_id in (*event.delta.token_ids, *(token.id for token in event.delta.tokens))
    ]


def finished_of(events: Iterable[pb.ResultEvent], choice: int = 0) -> pb.Finished:
    """How a choice finished."""
    [found] = [
        event.finished
        for event in events
        if event.choice_index == choice and event.HasField("finished")
    ]
    return found


def check_course(events: list[pb.ResultEvent], *, first: int = 1, n: int = 1) -> None:
    """The laws of a request's events: numbers without gaps; one end for each choice and nothing of
    it after that, or one failure of the request; the end of the request at the end.
    """
    assert [event.seq for event in events] == list(range(first, first + len(events)))
    names = kinds(events)
    if first == 1:
        assert names[0] == "accepted"
        assert events[0].accepted.n == n
    assert names[-1] in ("finished", "failed")
    assert "failed" not in names[:-1]
    assert names.count("accepted") == (first == 1)
    assert names.count("prompt") <= 1
    over = set()
    for event in events:
        kind, choice = event.WhichOneof("event"), event.choice_index
        assert choice < n
        if kind == "delta":
            assert choice not in over
        elif kind == "finished":
            assert choice not in over
            over.add(choice)
    if first == 1 and names[-1] == "finished":
        assert over == set(range(n))


def details(status: status_pb2.Status) -> dict[str, Any]:
    """A status's details, by their type's name."""
    found: dict[str, Any] = {}
    for detail in status.details:
        for kind in (
            error_details_pb2.ErrorInfo,
            error_details_pb2.BadRequest,
            error_details_pb2.RetryInfo,
        ):
            message = kind()
            if detail.Unpack(message):
                found[kind.DESCRIPTOR.name] = message
    return found


class Refused:
    """An RPC's error, taken apart."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.message = error.details() or ""
        self.trailers = dict(error.trailing_metadata() or ())
        raw = self.trailers.get("grpc-status-details-bin", b"")
        self.status = status_pb2.Status.FromString(raw if isinstance(raw, bytes) else raw.encode())
        self.details = details(self.status)

    @property
    def reason(self) -> str:
        """ErrorInfo's reason."""
        return str(self.details["ErrorInfo"].reason)

    @property
    def field(self) -> str:
        """The first violated field."""
        return str(self.details["BadRequest"].field_violations[0].field)


async def refused(call: Any) -> Refused:
    """The error that an RPC must end with; its details must be consistent."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        found = Refused(error)
        if found.status.code:
            assert found.status.code == found.code.value[0]
            assert found.status.message == found.message
            assert found.details["ErrorInfo"].domain == "headrace.dev"
            assert found.status.ByteSize() < 4096
        return found
    raise AssertionError("the RPC was not refused")


async def until(condition: Callable[[], Any]) -> None:
    """Let the event loop run until something is true."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


async def step(h: Harness, count: int = 1) -> None:
    """Steps, with passes of the event loop between them in which holds reach the engine."""
    for _ in range(count):
        h.engine.step()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
