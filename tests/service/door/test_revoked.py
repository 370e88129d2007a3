"""Callers who lose what they were granted while a call of theirs is open: what they do next on it
is refused as a new call would be.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from headrace.v1 import control_service_pb2 as control
from headrace.v1 import generation_service_pb2 as rpc

from service.door.auth import Authenticator, Permit
from service.errors.call_errors import UnknownCallerError
from tests.service.door.callers_file import (
    CALLERS,
    TOKENS,
    UNAUTHENTICATED,
    bearer,
    entry,
    guarded,
    replace,
)
from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import (
    DEADLINE_S,
    Harness,
    Refused,
    Session,
    check_course,
    details,
    refused,
    spec,
    until,
)

PERMISSION_DENIED = grpc.StatusCode.PERMISSION_DENIED
NOT_BOB = entry("alice", '"*"', TOKENS["alice"])
LOSSES = {
    "the token is gone": (NOT_BOB, UNAUTHENTICATED, "TOKEN_INVALID"),
    "the service is gone": (
        NOT_BOB + entry("bob", '["ModelService"]', TOKENS["bob"]),
        PERMISSION_DENIED,
        "SERVICE_NOT_GRANTED",
    ),
    "the token is somebody else's": (
        entry("carol", '"*"', TOKENS["bob"]),
        UNAUTHENTICATED,
        "IDENTITY_CHANGED",
    ),
}
COMMANDS: dict[str, Any] = {
    "add": {"add": rpc.AddCommand(spec=spec(request_id="b"))},
    "attach": {"attach": rpc.AttachCommand(request_id="a")},
    "cancel": {"cancel": rpc.CancelCommand(request_id="a")},
    "credit": {"credit": rpc.CreditCommand(request_id="a", tokens=1)},
    "open": {"open": rpc.OpenCommand()},
    "nothing": {},
}


async def opened(h: Harness, who: str = "bob", **fields: Any) -> Session:
    """A session with one request, `a`, that runs."""
    session = Session(h.generation.StreamResult(metadata=bearer(who)))
    await session.send(1, open=rpc.OpenCommand(**fields))
    await session.add(spec(request_id="a"), 2)
    await session.read_until(lambda message: message.events)
    return session


async def end_of(session: Session) -> Refused:
    """Read to the session's end, which must be an error."""

    async with asyncio.timeout(DEADLINE_S):
        return await refused(session.rest())


@pytest.mark.parametrize("command", COMMANDS)
async def test_every_command_is_refused_and_the_session_ends(callers: Path, command: str) -> None:
    engine = FakeEngine(auto=False)
    async with guarded(callers, engine) as h:
        session = await opened(h, initial_credit=5)
        replace(callers, NOT_BOB)
        await session.send(7, **COMMANDS[command])
        error = await end_of(session)
        assert (error.code, error.reason) == (UNAUTHENTICATED, "TOKEN_INVALID")
        [rejection] = [
            rejection for message in session.messages for rejection in message.rejections
        ]
        assert rejection.command_id == 7
        assert rejection.status.code == UNAUTHENTICATED.value[0]
        assert details(rejection.status)["ErrorInfo"].reason == "TOKEN_INVALID"
        assert len(engine.submitted) == 1
        await until(lambda: engine.cancelled)  # as when its stream is lost
        engine.run()
        await until(lambda: not h.registry.live)


@pytest.mark.parametrize("loss", LOSSES)
async def test_what_runs_is_that_of_a_lost_stream(callers: Path, loss: str) -> None:
    """With a lease it goes on, for those who are still that identity."""
    text, code, reason = LOSSES[loss]
    engine = FakeEngine(script=says("abc"), auto=False)
    async with guarded(callers, engine) as h:
        session = await opened(h, lease={"seconds": 60})
        replace(callers, text)
        await session.add(spec(request_id="b"))
        error = await end_of(session)
        assert (error.code, error.reason) == (code, reason)
        await until(lambda: not h.registry.streams)
        assert h.registry.live == 1
        assert not engine.cancelled
        replace(callers, text.replace("carol", "dave") + entry("bob", '"*"', "another token"))
        metadata = (("authorization", "Bearer another token"),)
        successor = Session(h.generation.StreamResult(metadata=metadata))
        await successor.send(1, attach=rpc.AttachCommand(request_id="a"))
        await successor.read()
        engine.run()
        await successor.end()
        check_course(successor.events()["a"])
        assert len(engine.submitted) == 1


async def test_a_session_ends_though_results_keep_coming(callers: Path) -> None:
    class Endless(FakeEngine):
        async def _run_loop(self) -> None:
            while True:
                self.step()
                await asyncio.sleep(0)

    async with guarded(callers, Endless(script=says("x", eos=False))) as h:
        session = Session(h.generation.StreamResult(metadata=bearer("bob")))
        for name in "abcdef":
            await session.add(spec(request_id=name, stop={"max_tokens": 100_000}))
        await session.read_until(lambda message: message.events)
        replace(callers, NOT_BOB)
        await session.send(7, cancel=rpc.CancelCommand(request_id="a"))
        assert (await end_of(session)).code is UNAUTHENTICATED
        assert any(message.rejections for message in session.messages)


async def test_a_file_that_changes_nothing_for_them_changes_nothing(callers: Path) -> None:
    engine = FakeEngine(script=says("abc"), auto=False)
    async with guarded(callers, engine) as h:
        session = await opened(h, "alice")
        for text in (
            CALLERS + entry("carol", '"*"', "carol's"),
            "broken",
            entry("alice", '["GenerationService"]', TOKENS["alice"]),
        ):
            replace(callers, text)
            await session.send(7, cancel=rpc.CancelCommand(request_id="unknown"))
            await session.read_until(lambda message: message.cancelled)
        engine.run()
        await session.end()
        check_course(session.events()["a"])


async def test_a_watch_of_control_ends(callers: Path) -> None:
    async with guarded(callers) as h:
        watch = h.control.WatchStatistics(
            control.WatchStatisticsRequest(interval={"nanos": 100_000_000}), metadata=bearer("bob")
        )
        await watch.read()
        await watch.read()
        replace(callers, LOSSES["the service is gone"][0])

        async def rest() -> None:
            while await watch.read() is not grpc.aio.EOF:
                pass

        async with asyncio.timeout(DEADLINE_S):
            error = await refused(rest())
        assert (error.code, error.reason) == (PERMISSION_DENIED, "SERVICE_NOT_GRANTED")


async def test_a_file_that_changes_before_the_account_is_known_counts(callers: Path) -> None:
    permit = Authenticator(str(callers)).by_token(
        "/headrace.v1.GenerationService/StreamResult", bearer("bob")
    )
    assert isinstance(permit, Permit)
    replace(callers, NOT_BOB)
    of_call = permit.of_call(bearer("bob"), "ipv4:192.0.2.7:1")
    with pytest.raises(UnknownCallerError):
        await of_call.check()


async def test_nobody_is_looked_for_again_while_the_file_is_as_it_was(
    callers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    permit = Authenticator(str(callers)).by_token(
        "/headrace.v1.GenerationService/StreamResult", bearer("bob")
    )
    assert isinstance(permit, Permit)
    lookups = 0
    find = permit._find

    def counted(table: Any) -> Any:
        nonlocal lookups
        lookups += 1
        assert find is not None
        return find(table)

    monkeypatch.setattr(permit, "_find", counted)
    for _ in range(3):
        await permit.check()
    assert lookups == 0
    replace(callers, CALLERS + "\n")
    for _ in range(3):
        await permit.check()
    assert lookups == 1
    replace(callers, NOT_BOB)
    for _ in range(3):
        with pytest.raises(UnknownCallerError):
            await permit.check()
