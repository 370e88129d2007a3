"""One asyncio client with several servers; what it shares with the client for threads is tried in
test_fleet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import headrace
import pytest
from headrace import CancelStatus
from headrace._deadline import Deadline

from tests.clients.python.farm import WAIT_S, Farm, Member, silent_server
from tests.service.fake_engine import FakeEngine


@pytest.fixture
def farm() -> Iterator[Farm]:
    opened = Farm()
    yield opened
    opened.close()


@asynccontextmanager
async def client_of(*members: Member) -> AsyncIterator[headrace.AsyncClient]:
    """A client that knows all of these servers to be ready."""
    async with headrace.AsyncClient([member.target for member in members]) as client:
        servers: Any = client._servers
        await servers._settle(Deadline(None))
        assert all(one.state.value == "ready" for one in servers.state.servers.values())
        yield client


async def until(condition: Callable[[], Any]) -> None:
    """Waits until something is true of the servers."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


async def test_everything_spreads(farm: Farm) -> None:
    members = [farm.start(auto=False) for _ in range(3)]
    async with client_of(*members) as client:
        async with client.session() as session:
            handles = [session.submit(f"{i}", max_tokens=5) for i in range(12)]
            calls = [asyncio.create_task(client.generate(f"{i}", max_tokens=2)) for i in range(12)]
            await until(lambda: sum(member.count for member in members) == 24)
            assert [member.count for member in members] == [8, 8, 8]
            await asyncio.gather(*(asyncio.to_thread(member.go_on) for member in members))
            assert [len(one.token_ids) for one in await asyncio.gather(*handles)] == [5] * 12
            assert [len(one.token_ids) for one in await asyncio.gather(*calls)] == [2] * 12
        batch = client.batch([f"{i}" for i in range(30)], max_tokens=3, max_in_flight=9)
        outcomes = {index: outcome async for index, outcome in batch}
        assert sorted(outcomes) == list(range(30))
        assert all(isinstance(one, headrace.Result) for one in outcomes.values())
        assert all(member.count >= 14 for member in members)
        assert (await client.model()).name == "fake"


async def test_ids_are_found_where_they_are(farm: Farm) -> None:
    members = [farm.start() for _ in range(2)]
    async with client_of(*members) as client, client_of(*members) as stranger:
        ids = [(await client.add_request("hi", max_tokens=4)).request_id for _ in range(6)]
        assert [member.count for member in members] == [3, 3]
        for other in (client, stranger):
            assert [len((await other.get_result(one)).token_ids) for one in ids] == [4] * 6
        assert set((await stranger.cancel([*ids, "nobody"])).values()) == {
            CancelStatus.ALREADY_FINISHED,
            CancelStatus.NOT_FOUND,
        }
        with pytest.raises(headrace.NotFoundError):
            await stranger.get_result("nobody")


@pytest.mark.parametrize("way", ["kill", "drain"])
async def test_what_was_not_delivered_goes_elsewhere(farm: Farm, way: str) -> None:
    doomed, other = farm.start(auto=False), farm.start()
    async with client_of(doomed, other) as client, client.session() as session:
        handles = [session.submit(f"{i}", max_tokens=3) for i in range(6)]
        calls = [asyncio.create_task(client.generate(f"{i}", max_tokens=4)) for i in range(4)]
        await until(lambda: doomed.count == 5)
        if way == "kill":
            await asyncio.to_thread(doomed.kill)
        else:
            await asyncio.to_thread(doomed.drain)
            await session.submit("new", max_tokens=1)
            await client.generate("new", max_tokens=1)
            assert doomed.count == 5
            await asyncio.to_thread(doomed.go_on)
        assert [len(one.token_ids) for one in await asyncio.gather(*handles)] == [3] * 6
        assert [len(one.token_ids) for one in await asyncio.gather(*calls)] == [4] * 4
        async with client.stream("streamed", max_tokens=3) as stream:
            assert len((await stream.result()).token_ids) == 3


async def test_begun_requests_are_attached_again(farm: Farm) -> None:
    one, other = farm.start(auto=False), farm.start(auto=False)
    async with client_of(one, other) as client, client.session(lease=60) as session:
        handles = [session.submit(f"{i}", max_tokens=6) for i in range(2)]
        await until(lambda: one.count == other.count == 1)
        await asyncio.to_thread(one.step)
        [begun] = [handle for handle in handles if handle.request_id in one.names]
        async for _ in begun:
            break
        for act in (one.cut, one.go_on, other.go_on):
            await asyncio.to_thread(act)
        assert [len(one.token_ids) for one in await asyncio.gather(*handles)] == [6, 6]
    assert one.count == other.count == 1


async def test_a_client_that_is_closed_leaves_nobody_waiting(farm: Farm) -> None:
    members = [farm.start(auto=False) for _ in range(2)]
    async with client_of(*members) as client:
        session = client.session()
        async with session:
            handles = [session.submit(f"{i}", max_tokens=5) for i in range(4)]
            await until(lambda: sum(member.count for member in members) == 4)
            await client.close()
            for handle in handles:
                with pytest.raises(headrace.UnavailableError):
                    await handle
        with pytest.raises(headrace.UnavailableError, match="closed"):
            await client.generate("hi")


async def test_a_server_that_never_answers_delays_nothing(
    farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.async_fleet.CHECK_SECONDS", 60.0)
    member = farm.start()
    with silent_server() as silent:
        async with (
            headrace.AsyncClient([silent.target, member.target]) as client,
            client.session() as session,
        ):
            handle = session.submit("hi", max_tokens=3)
            assert len((await client.generate("hi", max_tokens=3)).token_ids) == 3
            assert len((await asyncio.wait_for(handle, WAIT_S)).token_ids) == 3


async def test_a_stream_that_is_left_while_it_waits_for_a_server_is_not_sent(farm: Farm) -> None:
    gate = asyncio.Event()
    members = [farm.start(engine=FakeEngine(load_gate=gate)) for _ in range(2)]
    async with headrace.AsyncClient([member.target for member in members]) as client:
        stream = client.stream("left")
        waiting = asyncio.create_task(stream.result())
        await until(lambda: stream._events is not None)
        stream.close()
        await asyncio.to_thread(farm.call, gate.set)
        assert len((await client.generate("hi", max_tokens=1)).token_ids) == 1
        with pytest.raises(headrace.CallCancelledError, match="closed"):
            await waiting
    assert sum(member.count for member in members) == 1
