"""A call's `timeout` is kept by the client whatever its server does: one that takes every call and
never answers, one whose process is stopped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import headrace
import pytest
from headrace.cli.app import app
from typer.testing import CliRunner

from tests.clients.python.farm import silent_server
from tests.clients.python.scripted import ScriptedServer

TIMEOUT = 0.3
LATE = 0.2


class Mute:
    """A server that does not answer, once it was told to `hush`."""

    def __init__(self, target: str, hush: Callable[[], None] | None = None) -> None:
        self.target = target
        self.is_stopped = hush is not None
        self.hush = hush or (lambda: None)

    def targets(self, count: int) -> list[str]:
        return [self.target, self.target.replace("127.0.0.1", "localhost")][:count]

    def expects(self, servers: int) -> Any:
        """What a call raises. Of several servers none may be ready, which some tell at once."""
        if servers > 1:
            return (headrace.DeadlineExceededError, headrace.UnavailableError)
        return headrace.DeadlineExceededError


@pytest.fixture(params=["silent", "stopped"])
def mute(request: pytest.FixtureRequest) -> Iterator[Mute]:
    if request.param == "silent":
        with silent_server() as silent:
            yield Mute(silent.target)
        return
    with subprocess.Popen(
        [sys.executable, "-m", "tests.clients.python.scripted"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None

        def stop() -> None:
            process.send_signal(signal.SIGSTOP)
            # The signal is only on its way: until it stops, the server may answer once more.
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)

        yield Mute(process.stdout.readline().strip(), stop)
        process.kill()


def read(stream: Any) -> None:
    for _ in stream:
        pass


def one_of_batch(client: headrace.Client, **options: Any) -> None:
    for _, outcome in client.batch(["hi"], **options):
        assert isinstance(outcome, headrace.HeadraceError)
        raise outcome


def in_session(client: headrace.Client, lease: float | None = None, **options: Any) -> None:
    session = client.session(lease=lease)
    try:
        session.submit("hi", **options).result()
    finally:
        session._streams.drop()  # a close waits for the server's word


CALLS: dict[str, Callable[..., Any]] = {
    "generate": lambda client, **given: client.generate("hi", **given),
    "stream": lambda client, **given: read(client.stream("hi", **given)),
    "add_request": lambda client, **given: client.add_request("hi", **given),
    "get_result": lambda client, **given: client.get_result("a", **given),
    "attach": lambda client, **given: read(client.attach("a", **given)),
    "cancel": lambda client, **given: client.cancel("a", **given),
    "model": lambda client, **given: client.model(**given),
    "tokenize": lambda client, **given: client.tokenize("hi", **given),
    "detokenize": lambda client, **given: client.detokenize([1], **given),
    "health": lambda client, **given: client.health(**given),
    "run_tools": lambda client, **given: client.run_tools(
        [headrace.Message.user("hi")], [], **given
    ).result(),
    "session": in_session,
    "leased": lambda client, **given: in_session(client, 5, **given),
}


async def read_async(stream: Any) -> None:
    async for _ in stream:
        pass


async def in_async_session(
    client: headrace.AsyncClient, lease: float | None = None, **options: Any
) -> None:
    session = await client.session(lease=lease).__aenter__()
    try:
        await session.submit("hi", **options)
    finally:
        session._streams.drop()


ASYNC_CALLS: dict[str, Callable[..., Awaitable[Any]]] = {
    **{
        name: CALLS[name]
        for name in (
            "generate", "add_request", "get_result", "cancel", "model", "tokenize", "detokenize",
            "health", "run_tools",
        )
    },
    "stream": lambda client, **given: read_async(client.stream("hi", **given)),
    "attach": lambda client, **given: read_async(client.attach("a", **given)),
    "session": in_async_session,
    "leased": lambda client, **given: in_async_session(client, 5, **given),
}  # fmt: skip


def check_ends(call: Callable[[], Any], expects: Any = headrace.DeadlineExceededError) -> None:
    began = time.monotonic()
    with pytest.raises(expects) as caught:
        call()
    seconds = time.monotonic() - began
    assert seconds < TIMEOUT + LATE
    if isinstance(caught.value, TimeoutError):
        assert isinstance(caught.value, headrace.DeadlineExceededError)
        assert seconds > TIMEOUT - 0.05
        assert "timeout" in caught.value.message or "within" in caught.value.message


@pytest.mark.parametrize("servers", [1, 2])
def test_every_call_ends_in_time(mute: Mute, servers: int) -> None:
    targets, expects = mute.targets(servers), mute.expects(servers)
    with headrace.Client(targets) as client, headrace.Client(targets, timeout=TIMEOUT) as limited:
        if mute.is_stopped:
            assert client.health(timeout=30) is limited.health(timeout=30)
        mute.hush()
        for call in CALLS.values():
            check_ends(lambda call=call: call(client, timeout=TIMEOUT), expects)  # type: ignore[misc]
        for name in ("generate", "stream", "session", "health"):
            check_ends(lambda name=name: CALLS[name](limited), expects)  # type: ignore[misc]
        check_ends(lambda: read(client.stream("hi", read_timeout=TIMEOUT)), expects)
        check_ends(lambda: read(client.attach("a", read_timeout=TIMEOUT)), expects)
        began = time.monotonic()
        with pytest.raises(headrace.UnavailableError):
            client.wait_until_ready(timeout=TIMEOUT)
        assert time.monotonic() - began < TIMEOUT + 2 * LATE + 0.2


@pytest.mark.parametrize("servers", [1, 2])
async def test_every_call_for_asyncio_ends_in_time(mute: Mute, servers: int) -> None:
    targets, expects = mute.targets(servers), mute.expects(servers)

    async def check(call: Awaitable[Any]) -> None:
        began = time.monotonic()
        with pytest.raises(expects):
            await call
        assert time.monotonic() - began < TIMEOUT + LATE

    async with (
        headrace.AsyncClient(targets) as client,
        headrace.AsyncClient(targets, timeout=TIMEOUT) as limited,
    ):
        if mute.is_stopped:
            assert await client.health(timeout=30) is await limited.health(timeout=30)
        mute.hush()
        for call in ASYNC_CALLS.values():
            await check(call(client, timeout=TIMEOUT))
        for name in ("generate", "stream", "session", "health"):
            await check(ASYNC_CALLS[name](limited))
        await check(read_async(client.stream("hi", read_timeout=TIMEOUT)))
        await check(read_async(client.attach("a", read_timeout=TIMEOUT)))


def test_the_command_ends_in_time() -> None:
    with silent_server() as silent:
        for words in (
            ["generate", "hi", "--target", silent.target, "--timeout", str(TIMEOUT)],
            ["--timeout", str(TIMEOUT), "--target", silent.target, "generate", "hi"],
        ):
            began = time.monotonic()
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 1
            assert "timeout passed" in done.output
            assert time.monotonic() - began < TIMEOUT + LATE + 0.5  # it reads its options, too
    done = CliRunner().invoke(app, ["generate", "hi", "--timeout", "-1"])
    assert done.exit_code == 2
    assert "timeout" in done.output


def test_a_batch_ends_each_request_in_time(server: ScriptedServer) -> None:
    with headrace.Client(server.target) as client:
        found = dict(client.batch(["a", "hold on", "b"], timeout=TIMEOUT))
        assert isinstance(found[1], headrace.DeadlineExceededError)
        assert isinstance(found[0], headrace.Result)
        assert isinstance(found[2], headrace.Result)
        server.wait_for(lambda: not server.live)


@pytest.mark.parametrize("lease", [None, 5])
def test_a_session_goes_on_after_a_timeout(
    lease: float | None, server: ScriptedServer, client: headrace.Client
) -> None:
    with client.session(lease=lease) as session:
        late, none = session.submit("hold on", timeout=TIMEOUT), session.submit("hold on")
        later = session.submit("hold on", timeout=2 * TIMEOUT)
        for handle in (late, later):
            with pytest.raises(headrace.DeadlineExceededError) as caught:
                handle.result()
            assert caught.value.request_id == handle.request_id
            assert caught.value.partial is not None
            assert caught.value.partial.text == "hold"
            server.wait_for(lambda handle=handle: handle.request_id not in server.live)  # type: ignore[misc]
        assert session.submit("a b", timeout=60).result().text == "a b"
        assert not none.done
        none.cancel()


def test_a_read_timeout_is_that_of_each_message(
    server: ScriptedServer, client: headrace.Client
) -> None:
    with client.stream("hold on", read_timeout=TIMEOUT) as stream:
        assert next(stream).text == "hold"
        time.sleep(2 * TIMEOUT)  # of the reader's own, which does not count
        began = time.monotonic()
        with pytest.raises(headrace.DeadlineExceededError):
            next(stream)
        assert time.monotonic() - began < TIMEOUT + LATE
    server.wait_for(lambda: not server.live)
    assert client.stream("a b", read_timeout=60, timeout=60).result().text == "a b"


async def test_a_read_timeout_for_asyncio_is_that_of_each_message(
    server: ScriptedServer, aclient: headrace.AsyncClient
) -> None:
    async with aclient.stream("hold on", read_timeout=TIMEOUT) as stream:
        assert (await anext(stream)).text == "hold"
        await asyncio.sleep(2 * TIMEOUT)
        with pytest.raises(headrace.DeadlineExceededError):
            await anext(stream)
    await asyncio.to_thread(server.wait_for, lambda: not server.live)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_what_is_no_length_of_time_is_refused(seconds: float, client: headrace.Client) -> None:
    for call in CALLS.values():
        with pytest.raises(headrace.InvalidArgumentError, match="timeout"):
            call(client, timeout=seconds)
    with pytest.raises(headrace.InvalidArgumentError, match="timeout"):
        headrace.Client(timeout=seconds)
