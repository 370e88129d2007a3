"""gRPC keeps a closed channel's connection while one of its calls is kept: by an error's traceback,
for example, which a cancelled task keeps. A closed client keeps none, whoever keeps such an error.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import headrace
import pytest

from tests.clients.python.farm import WAIT_S, Farm, SilentServer, silent_server
from tests.service.fault_proxy import FaultProxy, fault_proxy


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage is collected: what keeps itself is kept."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def farm() -> Iterator[Farm]:
    opened = Farm()
    yield opened
    opened.close()


@pytest.fixture
async def silent() -> AsyncIterator[list[tuple[SilentServer, FaultProxy]]]:
    """Two servers that take every call and never answer, and the proxies before them."""
    async with AsyncExitStack() as ends:
        servers = [ends.enter_context(silent_server()) for _ in range(2)]
        proxies = [await ends.enter_async_context(fault_proxy(one.target)) for one in servers]
        yield list(zip(servers, proxies, strict=True))


async def until(condition: Callable[[], Any]) -> None:
    """Waits until something is true."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


async def generate(client: headrace.AsyncClient) -> None:
    await client.generate("hi")


async def read(client: headrace.AsyncClient) -> None:
    async with client.stream("hi") as stream:
        await anext(stream)


async def watch(client: headrace.AsyncClient) -> None:
    async for _ in client.control.watch():
        pass


async def wait_in_session(client: headrace.AsyncClient) -> None:
    async with client.session() as session:
        await session.submit("hi")


@pytest.mark.parametrize("call", [generate, read, watch, wait_in_session])
@pytest.mark.parametrize("ended_by", ["task", "timeout", "client"])
async def test_what_ends_a_call_keeps_no_connection(
    call: Callable[[headrace.AsyncClient], Awaitable[None]],
    ended_by: str,
    silent: list[tuple[SilentServer, FaultProxy]],
    uncollected: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.async_session.CLOSE_SECONDS", 0.0)
    server, proxy = silent[0]
    client = headrace.AsyncClient(proxy.target)
    limit = asyncio.timeout(None)
    kept: list[BaseException] = []

    async def begin() -> None:
        try:
            async with limit:
                await call(client)
        except BaseException as error:
            kept.append(error)
            raise

    task = asyncio.create_task(begin())
    await until(lambda: server.calls)
    assert proxy.connections
    if ended_by == "task":
        task.cancel()
    elif ended_by == "timeout":
        limit.reschedule(asyncio.get_running_loop().time())
    if ended_by != "client":
        await asyncio.wait([task])
    await client.close()
    with suppress(asyncio.CancelledError, TimeoutError, headrace.HeadraceError):
        await task
    assert len(kept) == 1
    await until(lambda: not proxy.connections)


async def test_a_client_that_is_closed_while_it_asks_its_servers_keeps_no_connection(
    silent: list[tuple[SilentServer, FaultProxy]],
    uncollected: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.async_fleet.CHECK_SECONDS", 2 * WAIT_S)
    client = headrace.AsyncClient([proxy.target for _, proxy in silent])
    waiting = asyncio.create_task(client.generate("hi"))
    await until(lambda: all(server.calls == ["Check"] for server, _ in silent))
    assert all(proxy.connections for _, proxy in silent)
    await client.close()
    with pytest.raises(headrace.UnavailableError, match="closed"):
        await waiting
    await until(lambda: not any(proxy.connections for _, proxy in silent))


async def refused(client: headrace.AsyncClient) -> None:
    await client.generate("hi", temperature=-1.0)


async def refused_stream(client: headrace.AsyncClient) -> None:
    async with client.stream("hi", temperature=-1.0) as stream:
        await anext(stream)


async def refused_in_session(client: headrace.AsyncClient) -> None:
    async with client.session() as session:
        await session.submit("hi", temperature=-1.0)


@pytest.mark.parametrize("call", [refused, refused_stream, refused_in_session])
@pytest.mark.parametrize("count", [1, 2])
async def test_a_refusal_that_is_kept_keeps_no_connection(
    call: Callable[[headrace.AsyncClient], Awaitable[None]],
    count: int,
    farm: Farm,
    uncollected: None,
) -> None:
    members = [farm.start() for _ in range(count)]
    async with headrace.AsyncClient([member.target for member in members]) as client:
        with pytest.raises(headrace.InvalidArgumentError) as kept:
            await call(client)
    await asyncio.to_thread(farm.until, lambda: not any(one.connections for one in members))
    assert "temperature" in str(kept.value)
