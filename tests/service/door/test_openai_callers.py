"""Each client of the HTTP door is a caller of its own, and nobody else can claim to be one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from headrace.v1 import generation_service_pb2 as rpc

from service.admission.accounts import origin_of
from service.door.auth import DOOR_PEER, DOOR_SECRET, Authenticator
from service.errors.call_errors import NotGrantedError
from tests.service.door.callers_file import bearer, guarded
from tests.service.fake_engine import FakeEngine
from tests.service.helpers import DEADLINE_S, Harness, Refused, refused, serving, spec

SECRET = "5ec3e7" * 11
UNIX = "unix:"
LIMIT = {"max_open_requests": 64}
DOOR = {"openai": "127.0.0.1:0"}


@pytest.mark.parametrize(
    ("told", "origin"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::1", "::1"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8::1", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("192.0.2.7:80", "unix"),
        ("ipv4:192.0.2.7", "unix"),
        ("", "unix"),
        (None, "unix"),
    ],
)
def test_the_door_s_client_is_known_by_the_address_that_the_door_tells(
    told: str | None, origin: str
) -> None:
    metadata = [(DOOR_SECRET, SECRET), *([] if told is None else [(DOOR_PEER, told)])]
    found = Authenticator(None, door_secret=SECRET).peer_of(metadata, UNIX)
    assert origin_of(found) == origin


@pytest.mark.parametrize(
    ("known", "given"),
    [
        (SECRET, [SECRET[:-1]]),
        (SECRET, [""]),
        (SECRET, ["wrong", SECRET]),
        (SECRET, [SECRET, "wrong"]),
        (SECRET, ["é"]),
        (None, [""]),
        (None, ["None"]),
        (None, [SECRET]),
    ],
)
def test_a_wrong_secret_is_refused_and_not_told(known: str | None, given: list[str]) -> None:
    metadata = [*((DOOR_SECRET, one) for one in given), (DOOR_PEER, "192.0.2.7")]
    with pytest.raises(NotGrantedError) as raised:
        Authenticator(None, door_secret=known).peer_of(metadata, UNIX)
    assert not any(one in str(raised.value) for one in (*given, SECRET) if one not in ("", "None"))


def add(h: Harness, *metadata: tuple[str, str]) -> Any:
    message = rpc.AddRequestRequest(spec=spec())
    return h.generation.AddRequest(message, metadata=metadata, timeout=DEADLINE_S)


async def fill(h: Harness, *metadata: tuple[str, str]) -> tuple[int, str]:
    """Add requests until one is refused; how many were taken in, and why no more."""
    number = 0
    while True:
        try:
            await add(h, *metadata)
        except grpc.aio.AioRpcError as error:
            return number, Refused(error).reason
        number += 1


def through_the_door(h: Harness, peer: str) -> tuple[tuple[str, str], ...]:
    return (DOOR_SECRET, h.server._door_secret), (DOOR_PEER, peer)


async def test_two_clients_of_the_door_have_shares_of_their_own() -> None:
    async with serving(FakeEngine(auto=False), **LIMIT, **DOOR) as h:
        one, other = through_the_door(h, "192.0.2.7"), through_the_door(h, "192.0.2.8")
        assert await fill(h, *one) == (64, "TOO_MANY_OPEN_REQUESTS")
        assert await fill(h, *other) == (4, "TOO_MANY_OPEN_REQUESTS")
        assert await fill(h, *one) == (0, "TOO_MANY_OPEN_REQUESTS")


async def test_without_the_secret_an_address_that_is_claimed_gains_nothing() -> None:
    async with serving(FakeEngine(auto=False), **LIMIT, **DOOR) as h:
        assert (await fill(h))[0] == 64
        assert (await fill(h, (DOOR_PEER, "192.0.2.8")))[0] == 0
        assert (await fill(h, *through_the_door(h, "192.0.2.8")))[0] == 4


async def test_who_guesses_the_secret_is_refused_and_the_log_does_not_tell_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(**DOOR) as h:
        error = await refused(add(h, (DOOR_SECRET, SECRET), (DOOR_PEER, "192.0.2.7")))
        assert (error.code, error.reason) == (grpc.StatusCode.PERMISSION_DENIED, "DOOR_UNKNOWN")
        assert "refused '/headrace.v1.GenerationService/AddRequest'" in caplog.text
        assert SECRET not in caplog.text
        assert h.server._door_secret not in caplog.text


async def test_where_there_is_no_door_no_secret_is_right() -> None:
    async with serving() as h:
        error = await refused(add(h, *through_the_door(h, "192.0.2.7")))
        assert (error.code, error.reason) == (grpc.StatusCode.PERMISSION_DENIED, "DOOR_UNKNOWN")


async def test_with_a_callers_file_the_token_decides(callers: Path) -> None:
    async with guarded(callers, FakeEngine(auto=False), **LIMIT, **DOOR) as h:
        assert (await refused(add(h, *through_the_door(h, "192.0.2.7")))).reason == "TOKEN_MISSING"
        assert (await fill(h, *bearer("alice"), *through_the_door(h, "192.0.2.7")))[0] == 64
        assert (await fill(h, *bearer("alice"), *through_the_door(h, "192.0.2.8")))[0] == 0
        assert (await fill(h, *bearer("bob"), *through_the_door(h, "192.0.2.7")))[0] == 4
