"""Verbs on their way: from the protocol's signatures, over the socket, to an engine's methods."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import msgspec
import pytest

from engine.contract.engine_client import Admission, EngineClient, EngineVerbs
from engine.contract.errors import EngineUnavailableError, QueueFullError
from engine.contract.types import RequestId
from engine.process import engine_messages as messages
from engine.process.local_client import LocalEngineClient
from engine.process.process_client import ProcessEngineClient
from engine.process.verbs import VERBS, Verb, raw
from engine.process.wire import FrameReader, FrameWriter
from engine.process.worker import Worker
from tests.service.fake_engine import FakeEngine

DEADLINE_S = 30.0


@dataclass(frozen=True)
class Parcel:
    names: tuple[RequestId, ...]
    weight: float


class Toy(Protocol):
    """A verb that no engine has."""

    async def weigh(self, parcel: Parcel, factor: int = 1) -> Parcel | None:
        """Answers with a heavier one."""
        ...


class Engine:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Callable[..., object]:
        async def method(*arguments: object) -> object:
            self.asked.append((name, *arguments))
            if self.error is not None:
                raise self.error
            return {"submit": Admission(3, 1.5), "cancel": True}.get(name)

        return method

    async def weigh(self, parcel: Parcel, factor: int = 1) -> Parcel | None:
        assert isinstance(parcel, Parcel)
        return Parcel(parcel.names, parcel.weight * factor) if factor else None


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[ProcessEngineClient, Engine, asyncio.Task[None]]]:
    """A client, the engine that it speaks to, and the reading of the worker between them."""
    ours, theirs = socket.socketpair()
    stream, out = await asyncio.open_connection(sock=theirs)
    calls, answers = (
        FrameReader(stream, msgspec.msgpack.Decoder(messages.Command)),
        FrameWriter(out),
    )
    engine = Engine()
    serving = asyncio.create_task(Worker(cast(EngineClient, engine), calls, answers)._read())
    client = ProcessEngineClient("nowhere")
    stream, out = await asyncio.open_connection(sock=ours)
    client._writer = FrameWriter(out)
    frames = FrameReader(stream, msgspec.msgpack.Decoder(messages.Message))
    client._tasks = [asyncio.create_task(client._read(frames, print))]
    async with asyncio.timeout(DEADLINE_S):
        yield client, engine, serving
        await client._end_process()
        await asyncio.gather(serving, return_exceptions=True)
        await answers.close()


def test_the_set_is_the_protocol() -> None:
    names = {name for name in vars(EngineVerbs) if not name.startswith("_")}
    assert {verb.name for verb in VERBS.values()} == names
    assert not names & set(vars(EngineClient)), "what starts and ends an engine is no verb"


@pytest.mark.parametrize("client", [LocalEngineClient, ProcessEngineClient, FakeEngine])
def test_every_client_has_every_verb_with_its_signature(client: type) -> None:
    for method, verb in VERBS.items():
        ours = inspect.signature(getattr(client, verb.name))
        assert ours == inspect.signature(cast(Callable[..., object], method)), verb.name


async def test_a_new_verb_needs_nothing_but_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERBS, Toy.weigh, Verb(Toy.weigh))
    async with connected() as (client, _, _):
        call: Any = client._call
        parcel = Parcel((RequestId("a"), RequestId("b")), 1.5)
        assert await call(Toy.weigh, parcel, 2) == Parcel(parcel.names, 3.0)
        assert await call(Toy.weigh, parcel, 0) is None


async def test_calls_take_effect_in_their_order_whether_answered_or_not() -> None:
    async with connected() as (client, engine, _):
        name = RequestId("a")
        client._admitted.add(name)
        await client.hold(name)
        await client.finish(name, 7)
        pausing = asyncio.ensure_future(client.pause())
        await asyncio.sleep(0)  # it is sent
        await client.unhold(name)
        assert await client.cancel(name) is True
        await pausing
        assert engine.asked == [
            ("hold", "a"),
            ("finish", "a", 7, 0),
            ("pause",),
            ("unhold", "a"),
            ("cancel", "a"),
        ]


async def test_an_error_comes_to_who_asked_and_to_nobody_if_nobody_waits() -> None:
    async with connected() as (client, engine, _):
        engine.error = QueueFullError(3, 0.25)
        await client.finish(RequestId("a"), 7)
        with pytest.raises(QueueFullError) as caught:
            await client.reset_prefix_cache()
        assert (caught.value.limit, caught.value.retry_after_s) == (3, 0.25)
        engine.error = KeyError("inside")
        with pytest.raises(EngineUnavailableError, match="see its log") as hidden:
            await client.pause()
        assert "inside" not in str(hidden.value)
        engine.error = None
        await client.resume()
        assert client.failure is None


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("start", ()),
        ("close", ()),
        ("failure", ()),
        ("_running", ()),
        ("__class__", ()),
        ("asked", ()),
        ("cancel", ()),
        ("cancel", (3,)),
        ("cancel", ("a", "b")),
        ("finish", ("a", 1)),
        ("finish", ("a", "1", 0)),
        ("submit", ({"request_id": "a"},)),
    ],
)
async def test_what_is_no_verb_or_does_not_fit_its_signature_ends_the_service_of_the_socket(
    name: str, arguments: tuple[object, ...]
) -> None:
    async with connected() as (client, engine, serving):
        assert client._writer is not None
        client._writer.write(messages.Call(1, name, raw(arguments)))
        with pytest.raises(ValueError):  # noqa: PT011 - msgspec's is one, and says where
            await serving
        assert not engine.asked


async def test_an_answer_that_does_not_fit_its_signature_is_the_engines_failure() -> None:
    async with connected() as (client, engine, _):
        with pytest.raises(EngineUnavailableError):
            await client.stats()  # answered with None
        assert "not a message" in str(client.failure)
        assert engine.asked == [("stats",)]
