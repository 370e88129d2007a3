"""What strangers can make the server hold: messages that do not come, connections, calls. Each has
a bound, and those who behave are served meanwhile.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import generation_service_pb2 as rpc
from hyperframe.frame import RstStreamFrame, SettingsFrame

from service.door import reading
from tests.service.certificates import make_certificate, needs_openssl
from tests.service.door.callers_file import guarded
from tests.service.fake_engine import FakeEngine, says
from tests.service.fault_proxy import OWN_CONNECTION
from tests.service.helpers import DEADLINE_S, Harness, Refused, refused, serving, spec
from tests.service.raw_http2 import RawConnection

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
GENERATE = "/headrace.v1.GenerationService/Generate"
GENERATE_STREAM = "/headrace.v1.GenerationService/GenerateStream"


def target_of(h: Harness) -> str:
    return h.server.addresses[0]


async def check(h: Harness) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(h.channel)
    return await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)


async def unsent(h: Harness, method: str) -> Refused:
    """The end of a call whose client sends nothing."""

    async def nothing() -> Any:
        await asyncio.Event().wait()
        yield b""

    call = h.channel.stream_stream(method)(nothing())
    async with asyncio.timeout(DEADLINE_S):
        return await refused(call.read())


@pytest.mark.parametrize("method", [CHECK, WATCH, GENERATE, GENERATE_STREAM])
async def test_a_message_that_does_not_come_ends_the_call(method: str) -> None:
    async with serving(message_timeout_s=0.1) as h:
        error = await unsent(h, method)
        assert (error.code.name, error.reason) == ("DEADLINE_EXCEEDED", "MESSAGE_TIMEOUT")
        assert "0.1 s" in error.message
        assert not h.server.reading.patience.waiting


@pytest.mark.parametrize("method", [CHECK, GENERATE])
async def test_half_a_message_ends_the_call(method: str) -> None:
    async with serving(message_timeout_s=0.1) as h:

        def half() -> bytes:
            with RawConnection(target_of(h)) as raw:
                stream = raw.open(method)
                raw.half_message(stream, 1000, 500)
                return raw.end_of(stream)

        trailers = await asyncio.to_thread(half)
        assert b"grpc-status\x014" in trailers  # DEADLINE_EXCEEDED
        assert not h.server.reading.patience.waiting


@pytest.mark.parametrize("method", [CHECK, GENERATE, GENERATE_STREAM])
async def test_no_message_at_all(method: str) -> None:
    async with serving() as h:
        call = h.channel.stream_stream(method)(iter(()))
        async with asyncio.timeout(DEADLINE_S):
            error = await refused(call.read())
        assert (error.code.name, error.reason) == ("INVALID_ARGUMENT", "MESSAGE_MISSING")


async def test_a_second_message_is_not_read() -> None:
    """As in gRPC's own methods with one message."""
    async with serving(FakeEngine(script=says("x"))) as h:
        message = rpc.GenerateRequest(spec=spec()).SerializeToString()
        call = h.channel.stream_unary(GENERATE)(iter([message, message]))
        async with asyncio.timeout(DEADLINE_S):
            answer = rpc.GenerateResponse.FromString(await call)
        assert answer.request_id


async def test_who_goes_while_the_server_waits_leaves_nothing() -> None:
    async with serving() as h:

        async def nothing() -> Any:
            await asyncio.Event().wait()
            yield b""

        calls = [
            h.channel.stream_stream(method)(nothing(), timeout=timeout)
            for method in (CHECK, WATCH, GENERATE, GENERATE_STREAM)
            for timeout in (0.05, None)
        ]
        reading_ = h.server.reading
        async with asyncio.timeout(DEADLINE_S):
            while len(reading_.patience.waiting) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            for call in calls:
                call.cancel()
            while reading_.patience.waiting or h.server.recovery.open:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        for line in (reading_.lines.first, reading_.lines.others):
            assert line.free > 0
            assert not line.reading
        await check(h)


async def test_checks_are_answered_while_strangers_send_half_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They take all turns, and give way."""
    monkeypatch.setattr(reading, "MAX_TURNS", 2)
    async with serving() as h:
        lines = h.server.reading.lines
        connections = []

        def half(number: int) -> None:
            raw = RawConnection(target_of(h))
            for _ in range(number):
                raw.half_message(raw.open(CHECK), 1000, 500)
            connections.append(raw)

        for _ in range(3):
            await asyncio.to_thread(half, 10)
            assert (await check(h)).status == health_pb2.HealthCheckResponse.SERVING
            assert len(lines.first.reading) + len(lines.others.reading) <= 2
        for raw in connections:
            raw.close()


async def until(holds: Callable[[], Any]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_of_too_many_that_wait_for_their_turn_the_oldest_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "MAX_TURNS", 2)
    monkeypatch.setattr(reading, "MAX_QUEUED", 3)
    monkeypatch.setattr(reading, "TURN_S", 60.0)
    async with serving() as h:

        async def nothing() -> Any:
            await asyncio.Event().wait()
            yield b""

        lines = h.server.reading.lines
        calls = []
        for waiting in (0, 0, 1, 2, 3):  # one in each line is read
            calls.append(h.channel.stream_stream(CHECK)(nothing()))
            await until(
                lambda waiting=waiting: (
                    len(lines.others.waiting) == waiting
                    and len(lines.first.reading) + len(lines.others.reading) == min(2, len(calls))
                )
            )
        last = asyncio.ensure_future(check(h))
        async with asyncio.timeout(DEADLINE_S):
            error = await refused(calls[2].read())
        assert (error.code.name, error.reason) == ("RESOURCE_EXHAUSTED", "TOO_MANY_CALLS")
        assert error.details["RetryInfo"].retry_delay.seconds == 1
        assert not any(call.done() for call in (calls[0], calls[1], calls[3], calls[4], last))
        calls[1].cancel()
        await last  # the newest is next
        assert not any(call.done() for call in (calls[0], calls[3], calls[4]))
        for call in calls:
            call.cancel()
        await until(lambda: lines.first.free + lines.others.free == 2)
        await check(h)


def idle_checks(connections: list[RawConnection], number: int) -> None:
    """Checks without a message, on each connection."""
    for raw in connections:
        for _ in range(number):
            raw.open(CHECK)


def begun_calls(h: Harness) -> list[Any]:
    """Grows by each call that the server takes from now on."""
    begun: list[Any] = []
    add = h.server.recovery.begin

    def count(method: str, context: Any) -> Any:
        begun.append(context)
        return add(method, context)

    h.server.recovery.begin = count  # type: ignore[method-assign]
    return begun


async def honest_checks(h: Harness) -> None:
    """Fifty, each by a connection of its own: all are answered."""

    async def one() -> int:
        async with grpc.aio.insecure_channel(target_of(h), options=OWN_CONNECTION) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
            return int(answer.status)

    answers = await asyncio.gather(*(one() for _ in range(50)))
    assert answers == [health_pb2.HealthCheckResponse.SERVING] * 50


async def test_idle_checks_of_one_connection_keep_no_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Theirs are answered before the turn of any idle one is over."""
    monkeypatch.setattr(reading, "TURN_S", 3600.0)
    async with serving(max_streams_per_connection=600, message_timeout_s=3600.0) as h:
        lines = h.server.reading.lines
        begun = begun_calls(h)
        with RawConnection(target_of(h)) as raw:
            await asyncio.to_thread(idle_checks, [raw], 600)
            await until(lambda: len(begun) == 600)
            await honest_checks(h)
            assert len(lines.first.reading) == 1
            await until(lambda: len(h.server.recovery.open) == 600)  # the last honest ones are over


@asynccontextmanager
async def fifty(h: Harness) -> AsyncIterator[list[RawConnection]]:
    """Connections, closed at the end."""
    with ExitStack() as stack:
        yield [stack.enter_context(RawConnection(target_of(h))) for _ in range(50)]


async def test_idle_checks_of_many_connections_keep_no_others_waiting() -> None:
    """Not even when the first of them come: they give way."""
    async with serving(message_timeout_s=3600.0) as h, fifty(h) as connections:
        begun = begun_calls(h)
        await asyncio.to_thread(idle_checks, connections, 20)
        await until(lambda: len(begun) == 1000)
        await honest_checks(h)


async def test_who_has_held_up_others_stands_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are answered before the turn of any idle check is over, however many those are."""
    monkeypatch.setattr(reading, "TURN_S", 3600.0)
    async with serving(message_timeout_s=3600.0) as h, fifty(h) as connections:
        lines = h.server.reading.lines
        for raw in connections:
            raw.open(CHECK, ends=True)  # it brings no message
        await until(lambda: list(lines.not_first.values()) == [False] * 50)
        await asyncio.to_thread(idle_checks, connections, 20)
        await until(lambda: len(lines.others.reading) + len(lines.others.waiting) == 1000)
        idle = [*lines.others.reading, *lines.others.waiting]
        await honest_checks(h)
        assert [*lines.others.reading, *lines.others.waiting] == idle


async def test_who_sends_messages_again_stands_in_the_first_line_again() -> None:
    async with serving() as h:
        lines = h.server.reading.lines
        await refused(h.channel.stream_stream(CHECK)(iter(())).read())
        assert list(lines.not_first.values()) == [False]
        await check(h)
        assert not lines.not_first


async def test_few_of_those_who_held_up_others_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "_MAX_REMEMBERED", 20)
    async with serving() as h, fifty(h) as connections:
        for raw in connections:
            stream = raw.open(CHECK, ends=True)
            await asyncio.to_thread(raw.end_of, stream)
        assert len(h.server.reading.lines.not_first) == 20


async def test_open_messages_are_small() -> None:
    async with serving() as h:
        for method in (CHECK, WATCH):
            raw = health_pb2.HealthCheckRequest(service="x" * 5000).SerializeToString()
            error = await refused(h.channel.stream_stream(method)(iter([raw])).read())
            assert (error.code.name, error.reason) == ("INVALID_ARGUMENT", "MESSAGE_TOO_LARGE")


async def test_strangers_are_not_read(callers: Path) -> None:
    """They are refused at once, whatever they have begun to send."""
    async with guarded(callers) as h:

        def half() -> bytes:
            with RawConnection(target_of(h)) as raw:
                stream = raw.open(GENERATE)
                raw.half_message(stream, 1 << 20, 1000)
                return raw.end_of(stream)

        assert b"grpc-status\x0216" in await asyncio.to_thread(half)  # UNAUTHENTICATED


@pytest.mark.parametrize("transport", ["tcp", "unix", "tls"])
async def test_connections_are_bounded(transport: str, tmp_path: Path) -> None:
    """By address; what is closed makes room."""
    options: dict[str, Any] = {"listen": ("127.0.0.1:0", "127.0.0.1:0")}
    tls = None
    if transport == "unix":
        options = {"listen": (f"unix:{tmp_path}/a", f"unix:{tmp_path}/b")}
    elif transport == "tls":
        cert, key = make_certificate(tmp_path, "server-")
        options |= {"tls_cert": str(cert), "tls_key": str(key)}
        tls = ssl.create_default_context(cafile=str(cert))
        tls.set_alpn_protocols(["h2"])

    def is_refused(target: str, kept: list[RawConnection]) -> bool:
        try:
            raw = RawConnection(target, tls=tls)
        except OSError:
            return True
        kept.append(raw)
        return raw.is_closed()

    def attempt(targets: tuple[str, ...]) -> None:
        kept: list[RawConnection] = []
        for target in targets:
            assert [is_refused(target, kept) for _ in range(6)] == [False] * 4 + [True] * 2
        for raw in kept:
            raw.close()
        kept.clear()
        for target in targets:
            while is_refused(target, kept):  # it learns of the end a moment later
                pass
        for raw in kept:
            raw.close()

    async with serving(max_connections=4, **options) as h:
        await asyncio.to_thread(attempt, h.server.addresses)


test_connections_are_bounded = needs_openssl(test_connections_are_bounded)


async def test_who_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    from service.door import transport

    monkeypatch.setattr(transport, "_HANDSHAKE_MS", 100)
    async with serving() as h:

        def silent() -> bytes:
            import socket

            host, _, port = target_of(h).rpartition(":")
            with socket.create_connection((host, int(port)), DEADLINE_S) as connection:
                received = b""
                while part := connection.recv(4096):
                    received += part
                return received

        await asyncio.to_thread(silent)
        await check(h)


async def test_calls_of_a_connection_are_bounded() -> None:
    """Its client waits with more, and is told so by HTTP/2's settings."""
    engine = FakeEngine(script=says("x"), auto=False)
    async with (
        serving(engine, max_streams_per_connection=3) as h,
        grpc.aio.insecure_channel(target_of(h), options=OWN_CONNECTION) as channel,
    ):
        other = Harness(h.server, engine, channel)
        calls = [asyncio.ensure_future(other.generate(spec())) for _ in range(10)]
        async with asyncio.timeout(DEADLINE_S):
            while engine.num_live < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await check(h)  # by another connection
            assert engine.num_live == 3
            while not all(call.done() for call in calls):
                engine.step()
                assert engine.num_live <= 3
                await asyncio.sleep(0.001)
        await asyncio.gather(*calls)

        def beyond() -> Any:
            with RawConnection(target_of(h)) as raw:
                streams = [raw.open(CHECK) for _ in range(4)]
                reset: Any = raw.wait_for(
                    lambda frame: (
                        isinstance(frame, RstStreamFrame) and frame.stream_id == streams[-1]
                    )
                )
                return reset.error_code

        assert await asyncio.to_thread(beyond) == 11  # ENHANCE_YOUR_CALM


async def test_headers_are_bounded() -> None:
    async with serving() as h:
        for size, right in ((15_000, "OK"), (17_000, "RESOURCE_EXHAUSTED")):
            stub: Any = health_pb2_grpc.HealthStub(h.channel)
            call = stub.Check(
                health_pb2.HealthCheckRequest(), metadata=(("x-large", "x" * size),), timeout=30
            )
            assert (await call.code()).name == right


async def test_what_nobody_reads_stays_at_the_client() -> None:
    """A session that is not listened to, or any call that is not read, holds some KiB: the window
    does not grow by what is sent.
    """
    async with serving() as h:

        def window() -> int:
            with RawConnection(target_of(h)) as raw:
                found: Any = raw.wait_for(lambda frame: isinstance(frame, SettingsFrame))
                return int(found.settings[SettingsFrame.INITIAL_WINDOW_SIZE])

        assert await asyncio.to_thread(window) == 16 << 10
