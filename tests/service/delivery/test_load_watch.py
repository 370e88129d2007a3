"""The load that sessions are told: at most once in their interval, with what is sent anyway, and at
no cost to the engine for each message.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.protobuf import duration_pb2
from headrace.v1 import generation_service_pb2 as rpc

from engine.contract.errors import EngineUnavailableError
from service.delivery.load_watch import LoadWatch
from tests.service.fake_engine import FakeEngine
from tests.service.helpers import Harness, Session, details, serving, spec, until


async def step(h: Harness, session: Session) -> rpc.StreamResultResponse:
    """One step, and the message that tells it."""
    h.engine.step()
    return await session.read_until(lambda m: m.events)


async def opened(h: Harness, **interval: int) -> Session:
    """A session that asks for the load, or not, with one request."""
    session = h.session()
    load_interval = duration_pb2.Duration(**interval) if interval else None
    await session.send(1, open=rpc.OpenCommand(load_interval=load_interval))
    await session.add(spec(stop={"max_tokens": 1000}))
    await session.read_until(lambda m: m.events)
    return session


async def test_the_load_is_told_once_in_an_interval_with_what_is_sent_anyway() -> None:
    now = [100.0]
    engine = FakeEngine(auto=False, blocks=(3, 12), stats_gate=asyncio.Event())
    async with serving(engine, clock=lambda: now[0]) as h:
        session, other = await opened(h, seconds=60), await opened(h)
        assert not any(message.HasField("load") for message in session.messages)
        assert engine.stats_gate is not None
        engine.stats_gate.set()
        while not (message := await step(h, session)).HasField("load"):
            pass
        assert (message.load.running, message.load.waiting) == (2, 0)
        assert message.load.kv_cache_usage == 0.25
        for _ in range(5):
            now[0] += 11.9
            assert not (await step(h, session)).HasField("load")
        now[0] += 0.6
        assert (await step(h, session)).HasField("load")
        told = [message for message in session.messages if message.HasField("load")]
        assert len(told) == 2
        assert all(message.events for message in told)
        for one in (session, other):
            one.call.cancel()
        await until(lambda: not h.registry.streams)
    assert not any(message.HasField("load") for message in other.messages)


@pytest.mark.parametrize(
    "interval", [{"nanos": 99_000_000}, {"seconds": 3600, "nanos": 1}, {"seconds": -1}, {}]
)
async def test_an_interval_out_of_bounds_is_refused(interval: dict[str, int]) -> None:
    async with serving() as h:
        session = h.session()
        command = rpc.OpenCommand(load_interval=duration_pb2.Duration(**interval))
        await session.send(7, open=command)
        [rejection] = (await session.read()).rejections
        assert rejection.command_id == 7
        info = details(rejection.status)["ErrorInfo"]
        assert (info.reason, info.metadata["field"]) == ("INVALID_FIELD", "open.load_interval")
        await session.add(spec(stop={"max_tokens": 1}))
        assert any(message.events for message in await session.end())


async def test_an_engine_that_does_not_answer_has_no_load() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        session = await opened(h, nanos=100_000_000)
        while not (await step(h, session)).HasField("load"):
            pass
        h.engine.die(EngineUnavailableError("it has died"))
        await until(lambda: h.server.loads.current is None)
        session.call.cancel()


class Follower:
    """A session that lasts as long as a test says."""

    def __init__(self) -> None:
        self.is_over = False


class CountingClient:
    """Tells figures, and counts how often."""

    def __init__(self) -> None:
        self.asked = 0

    async def stats(self) -> Any:
        """Not the figures, but something in their place."""
        self.asked += 1
        if self.asked == 1:
            raise EngineUnavailableError("not yet")
        return f"figures {self.asked}"


async def test_the_engine_is_asked_while_a_session_wants_to_know_and_not_for_messages() -> None:
    client: Any = CountingClient()
    watch, followers = LoadWatch(client, lambda: 0.0), [Follower(), Follower()]
    reports = [watch.follow(follower, 0.1) for follower in followers]
    await until(lambda: watch.current is not None)
    assert client.asked == 2
    assert [report.take() for report in reports * 2] == ["figures 2", "figures 2", None, None]
    assert client.asked == 2
    followers[0].is_over = True
    await until(lambda: client.asked > 3)
    followers[1].is_over = True
    await until(lambda: watch.current is None)
    asked = client.asked
    again = watch.follow(Follower(), 0.1)
    assert again.take() is None  # what was known then is old
    await until(lambda: watch.current is not None)
    assert client.asked == asked + 1
    await watch.close()
