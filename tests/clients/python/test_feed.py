"""Output passed on at the moment when it comes: `headrace.async_session.feed`."""

from __future__ import annotations

import asyncio

import pytest
from headrace import AsyncClient, Chunk, HeadraceError
from headrace.async_session import feed

from tests.clients.python.scripted import WAIT, ScriptedServer


async def nothing() -> None:
    """There is always room."""


async def test_chunks_come_in_order_and_then_the_result(aclient: AsyncClient) -> None:
    texts: list[str] = []

    def take(chunk: Chunk) -> bool:
        texts.append(chunk.text)
        return True

    async with aclient.session() as session:
        handle = session.submit("one two three")
        result = await feed(handle, take, nothing)
        assert texts == ["one", " two", " three"]
        assert result.text == "one two three"
        # What has come before is given, too.
        texts.clear()
        await feed(handle, take, nothing)
        assert texts == ["one", " two", " three"]


async def test_without_room_nothing_is_given(aclient: AsyncClient) -> None:
    texts: list[str] = []
    free = asyncio.Event()

    def take(chunk: Chunk) -> bool:
        texts.append(chunk.text)
        return False

    async with aclient.session() as session:
        handle = session.submit("one two three")
        task = asyncio.create_task(feed(handle, take, free.wait))
        assert (await handle).text == "one two three"  # another reader is not held up
        await asyncio.sleep(0)
        assert texts == ["one"]
        free.set()
        await asyncio.wait_for(task, WAIT)
    assert texts == ["one", " two", " three"]


async def test_a_fault_of_the_taker_is_its_own(aclient: AsyncClient) -> None:
    def take(chunk: Chunk) -> bool:
        raise ZeroDivisionError

    async with aclient.session() as session:
        first, second = session.submit("one two"), session.submit("three four")
        with pytest.raises(ZeroDivisionError):
            await feed(first, take, nothing)
        assert (await second).text == "three four"
        assert (await first).text == "one two"


async def test_a_failure_comes_after_what_was_said(
    aclient: AsyncClient, server: ScriptedServer
) -> None:
    texts: list[str] = []

    def take(chunk: Chunk) -> bool:
        texts.append(chunk.text)
        return True

    async with aclient.session() as session:
        with pytest.raises(HeadraceError):
            await feed(session.submit("fail now"), take, nothing)
    assert texts == ["so far"]


async def test_who_gives_up_is_given_no_more(aclient: AsyncClient) -> None:
    texts: list[str] = []
    came = asyncio.Event()

    def take(chunk: Chunk) -> bool:
        texts.append(chunk.text)
        came.set()
        return True

    async with aclient.session() as session:
        handle = session.submit("hold on", request_id="r")
        task = asyncio.create_task(feed(handle, take, nothing))
        await asyncio.wait_for(came.wait(), WAIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        handle.cancel()
        assert (await handle).text == "hold"
    assert texts == ["hold"]
