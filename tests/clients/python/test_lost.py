"""A stream that is lost is told as lost, whatever gRPC calls it; and what a server has under a
lease is waited for until the lease has passed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import grpc
import headrace
import pytest
from headrace import AsyncClient, Client

from tests.clients.python.farm import WAIT_S, Farm, Member
from tests.clients.python.losing import RESETS, losing


def a_stream(client: Client, prompt: str = "x") -> object:
    return client.stream(prompt).result()


def a_session(client: Client, prompt: str = "x") -> object:
    return client.session().submit(prompt).result(WAIT_S)


def a_batch(client: Client, prompt: str = "x") -> object:
    [(_, outcome)] = client.batch([prompt])
    if isinstance(outcome, headrace.HeadraceError):
        raise outcome
    return outcome


@pytest.mark.parametrize("way", [*RESETS, "GOAWAY", "closed"])
@pytest.mark.parametrize("call", [a_stream, a_session, a_batch])
def test_what_is_lost_is_unavailable(call: Callable[[Client], object], way: str) -> None:
    with losing(way) as target, Client(target, retries=0) as client:
        with pytest.raises(headrace.UnavailableError) as caught:
            call(client)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert target in caught.value.message


def test_a_stream_that_ends_without_a_status_is_lost() -> None:
    with (
        losing("no trailers") as target,
        Client(target) as client,
        pytest.raises(headrace.UnavailableError, match="closed or lost"),
    ):
        client.stream("x").result()


async def an_async_stream(client: AsyncClient, prompt: str = "x") -> object:
    return await client.stream(prompt).result()


async def an_async_session(client: AsyncClient, prompt: str = "x") -> object:
    async with client.session() as session:
        return await session.submit(prompt)


async def an_async_batch(client: AsyncClient, prompt: str = "x") -> object:
    [outcome] = [one async for _, one in client.batch([prompt])]
    if isinstance(outcome, headrace.HeadraceError):
        raise outcome
    return outcome


@pytest.mark.parametrize("way", [*RESETS, "GOAWAY", "closed"])
@pytest.mark.parametrize("call", [an_async_stream, an_async_session, an_async_batch])
async def test_what_is_lost_is_unavailable_under_asyncio(
    call: Callable[[AsyncClient], Awaitable[object]], way: str
) -> None:
    with losing(way) as target:
        async with AsyncClient(target, retries=0) as client:
            with pytest.raises(headrace.UnavailableError) as caught:
                await call(client)
            assert target in caught.value.message


@pytest.mark.parametrize("call", [a_stream, a_session, a_batch])
def test_a_status_with_a_reason_is_the_servers_own(
    call: Callable[..., object], client: Client
) -> None:
    with pytest.raises(headrace.InternalError, match="broken"):
        call(client, "defect")


@pytest.mark.parametrize("call", [an_async_stream, an_async_session, an_async_batch])
async def test_a_status_with_a_reason_is_the_servers_own_under_asyncio(
    call: Callable[..., Awaitable[object]], aclient: AsyncClient
) -> None:
    with pytest.raises(headrace.InternalError, match="broken"):
        await call(aclient, "defect")


def test_closing_the_client_loses_its_streams(client: Client) -> None:
    stream = client.stream("hold on")
    assert next(stream).text == "hold"
    client.close()
    with pytest.raises(headrace.UnavailableError) as caught:
        stream.result()
    assert caught.value.partial is not None
    assert caught.value.partial.text == "hold"


async def test_closing_an_async_client_loses_its_streams(aclient: AsyncClient) -> None:
    stream = aclient.stream("hold on")
    assert (await anext(stream)).text == "hold"
    await aclient.close()
    with pytest.raises(headrace.UnavailableError) as caught:
        await stream.result()
    assert caught.value.partial is not None


# ---- under a lease -------------------------------------------------------------------------------


@pytest.fixture
def farm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Farm]:
    monkeypatch.setattr("headrace._fleet_session.PATIENCE_SECONDS", 0.1)
    opened = Farm()
    yield opened
    opened.close()


def unplugged(member: Member, client: Client) -> None:
    """The network goes away, for longer than a request waits that no server has had."""
    member.unplug()
    with client.session(lease=60) as session:
        never_sent = session.submit("x", max_tokens=1)
        with pytest.raises(headrace.UnavailableError, match="none of 1 servers is ready"):
            never_sent.result(WAIT_S)


def test_a_lease_keeps_what_waits(farm: Farm) -> None:
    member = farm.start(auto=False)
    with Client(member.target) as client, client.session(lease=60) as session:
        begun, waiting = (session.submit(one, max_tokens=2 + (one == "a")) for one in "ab")
        farm.until(lambda: member.count == 2)
        for handle in (begun, waiting):
            handle.accepted(WAIT_S)
        unplugged(member, client)
        assert not waiting.done
        member.plug_in()
        member.go_on()
        assert len(waiting.result(WAIT_S).token_ids) == 2
        assert len(begun.result(WAIT_S).token_ids) == 3
    assert member.count == 2  # nothing was computed twice


def test_what_waits_is_given_up_when_its_lease_has_passed(farm: Farm) -> None:
    member = farm.start(auto=False)
    with Client(member.target) as client, client.session(lease=1) as session:
        waiting = session.submit("x", max_tokens=2)
        waiting.accepted(WAIT_S)
        member.unplug()
        with pytest.raises(headrace.UnavailableError, match="none of 1 servers is ready"):
            waiting.result(WAIT_S)
