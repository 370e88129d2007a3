"""How many sessions and Watches may be open: more are refused before anything is made for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import control_service_pb2 as control
from headrace.v1 import generation_service_pb2 as rpc

from service.admission.accounts import account_of
from service.admission.bounds import Kind
from service.admission.places import Places
from service.errors.call_errors import LimitReachedError
from tests.service.door.callers_file import bearer, guarded
from tests.service.helpers import DEADLINE_S, Harness, Refused, refused, serving, until

Open = Callable[[], Awaitable[Any]]


class Call:
    """A call's context, as far as places look at it."""

    def __init__(self) -> None:
        self.end: Callable[[Any], None] = lambda _: None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.end = callback


async def read(call: Any) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        return await call.read()


async def session(h: Harness, who: str | None = None) -> Any:
    call = h.generation.StreamResult(metadata=bearer(who) if who is not None else ())
    await call.write(rpc.StreamResultRequest(open=rpc.OpenCommand()))
    await read(call)
    return call


async def health_watch(h: Harness) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(h.channel)
    call = stub.Watch(health_pb2.HealthCheckRequest())
    await read(call)
    return call


async def statistics_watch(h: Harness) -> Any:
    call = h.control.WatchStatistics(control.WatchStatisticsRequest())
    await read(call)
    return call


def check_refusal(error: Refused, reason: str, option: str, present: int) -> None:
    assert (error.code.name, error.reason) == ("RESOURCE_EXHAUSTED", reason)
    metadata = dict(error.details["ErrorInfo"].metadata)
    assert metadata == {"limit": option, option: str(present), "present": str(present)}
    assert error.details["RetryInfo"].retry_delay.ToMilliseconds() > 0
    assert error.trailers["grpc-retry-pushback-ms"]


@pytest.mark.parametrize(
    ("open_one", "options", "reason"),
    [
        (session, {"max_sessions": 3}, "TOO_MANY_SESSIONS"),
        (health_watch, {"max_watches": 3}, "TOO_MANY_WATCHES"),
        (statistics_watch, {"max_watches": 3}, "TOO_MANY_WATCHES"),
    ],
)
async def test_one_too_many_is_refused_and_an_end_makes_room(
    open_one: Callable[[Harness], Awaitable[Any]], options: dict[str, int], reason: str
) -> None:
    [option] = options
    async with serving(**options) as h:
        calls = [await open_one(h) for _ in range(3)]
        streams = len(h.registry.streams)
        check_refusal(await refused(open_one(h)), reason, option, 3)
        assert len(h.registry.streams) == streams
        stub: Any = health_pb2_grpc.HealthStub(h.channel)
        for _ in range(10):  # checks need no place
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        for call in calls:
            call.cancel()
        places = (h.server.limits.sessions, h.server.limits.watches, h.server.health.watches)
        await until(lambda: not any(kind.taken for kind in places))
        again = [await open_one(h) for _ in range(3)]
        await refused(open_one(h))
        del again


async def test_a_session_that_ends_well_gives_its_place_back() -> None:
    async with serving(max_sessions=1) as h:
        for _ in range(3):
            call = await session(h)
            await call.done_writing()
            assert await read(call) is grpc.aio.EOF
            await until(lambda: not h.server.limits.sessions.taken)


async def test_one_identity_leaves_room_for_others(callers: Path) -> None:
    async with guarded(callers, max_sessions=3, max_sessions_per_identity=2) as h:
        kept = [await session(h, "alice"), await session(h, "alice")]
        check_refusal(
            await refused(session(h, "alice")),
            "TOO_MANY_SESSIONS_OF_IDENTITY",
            "max_sessions_per_identity",
            2,
        )
        kept.append(await session(h, "bob"))
        error = await refused(session(h, "bob"))
        assert (error.reason, error.details["ErrorInfo"].metadata["share"]) == (
            "TOO_MANY_SESSIONS",
            "1",
        )


def test_nobody_who_left_is_remembered() -> None:
    now = 100.0
    places = Places(
        Kind(what="", remedy="", reason="FULL", option="max_tests", limit=2),
        lambda: now,
        lambda: 0.0,
    )
    calls = [Call() for _ in range(3)]
    for call, identity in zip(calls, "abc", strict=True):  # the last one has the reserve
        places.take(call, account_of(identity))
    with pytest.raises(LimitReachedError) as caught:
        places.take(Call(), account_of("d"))
    assert caught.value.retry_after_s > 0
    now += 4.0
    for call in calls:
        call.end(None)
    assert places.taken == 0
    assert places.is_empty
