"""Callers that send what nobody should: bytes of any kind, messages that are too large, wrong
tokens, services that are not theirs. Each gets the code that says so, and those who behave are
served meanwhile as if nothing had been.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError, Message
from headrace.v1 import generation_service_pb2 as rpc

from tests.service.door.callers_file import CALLERS, bearer, entry, replace
from tests.service.fake_engine import FakeEngine, default_script
from tests.service.helpers import (
    DEADLINE_S,
    Harness,
    Refused,
    Session,
    check_course,
    ids_of,
    refused,
    serving,
    spec,
    text_of,
    until,
)
from tests.service.methods import METHODS

TOKEN = "mallory's secret"
MAX_BYTES = 4 << 20
NEIGHBOURS = 6
CONTROL = "/headrace.v1.ControlService/"
EXPECTED = {
    "OK", "INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE", "UNIMPLEMENTED", "ALREADY_EXISTS",
    "FAILED_PRECONDITION",
}  # fmt: skip
"""What a message may be answered with that can be read: nothing that blames the server."""


class SteadyEngine(FakeEngine):
    """A step every few milliseconds, so that there is always somebody to disturb."""

    async def _run_loop(self) -> None:
        while True:
            self.step()
            await asyncio.sleep(0.002)


@asynccontextmanager
async def neighbours(h: Harness) -> AsyncIterator[None]:
    """Requests that run all the while, begin again when they end, and must all be whole."""
    over = asyncio.Event()

    async def stay(number: int) -> int:
        done = 0
        session = Session(h.generation.StreamResult(metadata=bearer("alice")))
        while not (over.is_set() and done):
            name = f"n{number}-{done}"
            await session.add(spec(name, request_id=name, stop={"max_tokens": 60}))
            await session.read_until(
                lambda message: any(event.HasField("finished") for event in message.events)
            )
            done += 1
        await session.end()
        for name, events in session.events().items():
            check_course(events)
            [sent] = [one for one in engine.submitted if f"/{name}#" in one.request_id]
            right = default_script(sent)[:60]
            assert ids_of(events) == list(right)
            assert text_of(events) == bytes(right).decode()
        return done

    engine = h.engine
    staying = [asyncio.ensure_future(stay(number)) for number in range(NEIGHBOURS)]
    await until(lambda: engine.num_live == NEIGHBOURS)
    yield
    assert not any(task.done() for task in staying)
    over.set()
    async with asyncio.timeout(DEADLINE_S):
        assert all(await asyncio.gather(*staying))


@asynccontextmanager
async def place(tmp_path: Path) -> AsyncIterator[Harness]:
    path = tmp_path / "callers.toml"
    everything = '["GenerationService", "ModelService", "ControlService"]'
    replace(path, CALLERS + entry("mallory", everything, TOKEN))
    engine = SteadyEngine()
    async with serving(engine, auth_file=str(path), max_receive_bytes=MAX_BYTES) as h:
        async with neighbours(h):
            yield h
        await until(lambda: not h.registry.streams)
        assert h.registry.live == engine.num_live == 0


async def send(h: Harness, method: str, raw: bytes) -> Refused | None:
    """Send a message as it is and read all that comes; None: it was answered."""
    _, streams_up, streams_down = METHODS[method]
    metadata = (("authorization", f"Bearer {TOKEN}"),)

    async def one() -> AsyncIterator[bytes]:
        yield raw

    async def read(call: Any) -> None:
        async for _ in call:
            pass

    call: Any
    if streams_up:
        call = read(h.channel.stream_stream(method)(one(), metadata=metadata))
    elif streams_down:
        call = read(h.channel.unary_stream(method)(raw, metadata=metadata))
    else:
        call = h.channel.unary_unary(method)(raw, metadata=metadata)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await call
    except grpc.aio.AioRpcError as error:
        return Refused(error)
    return None


def is_readable(kind: type[Message], raw: bytes) -> bool:
    try:
        kind.FromString(raw)
    except DecodeError:
        return False
    return True


def valid(method: str) -> bytes:
    """A message that the method takes; its requests end soon."""
    short = spec("mutant", stop={"max_tokens": 3})
    kind, _, _ = METHODS[method]
    if "spec" in kind.DESCRIPTOR.fields_by_name:
        return kind(spec=short).SerializeToString()
    if kind is rpc.StreamResultRequest:
        return rpc.StreamResultRequest(add=rpc.AddCommand(spec=short)).SerializeToString()
    return b""


def inputs(source: random.Random, method: str) -> Iterator[bytes]:
    """Random bytes, and a valid message with some bytes changed, cut off or added."""
    for _ in range(25):
        yield source.randbytes(source.choice([1, 2, 5, 20, 300]))
    for _ in range(25):
        raw = bytearray(valid(method))
        for _ in range(source.randint(1, 3)):
            if raw:
                raw[source.randrange(len(raw))] = source.randrange(256)
        yield bytes(raw[: source.randint(0, len(raw))]) + source.randbytes(source.choice([0, 0, 3]))


async def test_bytes_of_any_kind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = random.Random(20)
    seen: Counter[str] = Counter()
    async with place(tmp_path) as h:
        for method, (kind, _, _) in METHODS.items():
            for raw in inputs(source, method):
                readable = is_readable(kind, raw)
                if readable and method.startswith(CONTROL):
                    continue  # it may ask for a drain, and would get it
                error = await send(h, method, raw)
                name = "OK" if error is None else error.code.name
                if readable:
                    assert name in EXPECTED, (method, raw, error and error.message)
                else:
                    assert error is not None
                    assert (name, error.reason) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE"), raw
                seen[f"{readable} {name}"] += 1
    assert min(seen["False INVALID_ARGUMENT"], seen["True OK"]) > 20, seen
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_messages_that_are_too_large(tmp_path: Path) -> None:
    async with place(tmp_path) as h:
        for method in METHODS:
            error = await send(h, method, bytes(MAX_BYTES + 1))
            assert error is not None
            assert error.reason == "MESSAGE_TOO_LARGE", method
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            assert str(MAX_BYTES) in error.message
            error = await send(h, method, bytes(2 * MAX_BYTES))
            assert error is not None
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED, method


async def test_wrong_tokens_and_services(tmp_path: Path) -> None:
    """In a crowd, with messages that would have been refused otherwise too."""
    async with place(tmp_path) as h:
        for raw in (b"", b"\xff\xff", bytes(MAX_BYTES + 1)):
            calls = []
            for method in METHODS:
                for metadata in ((), (("authorization", "Bearer wrong"),), bearer("probe")):
                    call = h.channel.unary_unary(method)(raw, metadata=metadata)
                    calls.append((method, metadata == bearer("probe"), call))
            for method, is_known, call in calls:
                if is_known and "ModelService" in method:
                    continue  # that one it may call
                error = await refused(call)
                right = "PERMISSION_DENIED" if is_known else "UNAUTHENTICATED"
                assert error.code.name == right, (method, raw[:9])
        for path in ("/headrace.v1.GenerationService/Nothing", "/nothing.Nothing/Nothing", "/x"):
            error = await refused(h.channel.unary_unary(path)(b"\xff", metadata=bearer("alice")))
            assert error.code is grpc.StatusCode.UNIMPLEMENTED
