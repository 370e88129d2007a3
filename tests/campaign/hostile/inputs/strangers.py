"""Callers without a token, and raw bytes on a socket that no gRPC library sends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
from collections.abc import Awaitable, Callable

from hyperframe.frame import (
    ContinuationFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
)

from tests.campaign.hostile import http2
from tests.campaign.hostile.inputs.kinds import Group
from tests.campaign.hostile.sending import HEALTH, Sender
from tests.service.raw_http2 import literal, message

CHECK = (HEALTH + "Check").encode()
Raw = Callable[[http2.Connection], Awaitable[None]]


async def _connected(s: Sender, send: Raw, *, stay: bool = True) -> None:
    """Open a connection, send something on it, and hold it until the server closes it or time is
    up.
    """
    s.connections += 1
    try:
        connection = await http2.connect(s.target, s.tally)
    except OSError as error:
        s.count(f"not connected: {type(error).__name__}")
        return
    try:
        await send(connection)
        s.count("all was sent")
        if stay:
            await asyncio.Event().wait()
    except OSError:
        s.count("cut while it sent")
    except asyncio.CancelledError:
        s.count("connected to the end")
        raise
    finally:
        connection.close()


def _client_hello() -> bytes:
    """Return the first bytes that a TLS client sends."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


BODIES = Group("strangers' bodies")


@BODIES.sends(stranger=True)
async def half_bodies(s: Sender) -> None:
    """30 health checks whose bodies lack their last byte."""
    body = message(s.below, bytes(s.below - 1))

    async def send(connection: http2.Connection) -> None:
        await connection.data(await connection.open(CHECK), body)

    await s.crowd(30, lambda _: _connected(s, send))


@BODIES.sends(stranger=True)
async def many_half_bodies(s: Sender) -> None:
    """1,920 health checks with 64 KB of a larger body."""
    body = message(s.below, bytes(64 << 10))

    async def send(connection: http2.Connection) -> None:
        for _ in range(64):
            await connection.data(await connection.open(CHECK), body)

    await s.crowd(30, lambda _: _connected(s, send))


CONNECTIONS = Group("strangers' connections")


@CONNECTIONS.sends(stranger=True)
async def idle_connections(s: Sender) -> None:
    """3,000 connections that say their preface alone."""

    async def nothing(_: http2.Connection) -> None:
        pass

    await s.crowd(3000, lambda _: _connected(s, nothing))


@CONNECTIONS.sends(stranger=True)
async def silent_connections(s: Sender) -> None:
    """3,000 connections that say nothing."""

    async def one(_: int) -> None:
        s.connections += 1
        try:
            reader, writer = await http2.raw_connection(s.target)
            try:
                await reader.read(1 << 20)
                s.count("the server said something")
                await asyncio.Event().wait()
            finally:
                writer.transport.abort()
        except OSError as error:
            s.count(f"not connected: {type(error).__name__}")

    await s.crowd(3000, one)


@CONNECTIONS.sends(stranger=True)
async def watches(s: Sender) -> None:
    """3,000 Watches on 40 connections."""
    channels = [s.connect() for _ in range(40)]
    await s.crowd(3000, lambda n: s.call(HEALTH + "Watch", token="", channel=channels[n % 40]))


STREAMS = Group("strangers' streams")


@STREAMS.sends(stranger=True)
async def idle_streams(s: Sender) -> None:
    """20,000 streams without a body on ten connections."""

    async def send(connection: http2.Connection) -> None:
        for _ in range(2000):
            await connection.open(CHECK)

    await s.crowd(10, lambda _: _connected(s, send))


@STREAMS.sends(stranger=True)
async def check_storm(s: Sender) -> None:
    """Health checks, 64 at once."""
    await s.again(64, lambda _: s.call(HEALTH + "Check", token=""))


@STREAMS.sends(stranger=True)
async def rapid_reset(s: Sender) -> None:
    """Streams that are reset as soon as they are open, on four connections."""

    async def send(connection: http2.Connection) -> None:
        while True:
            stream = await connection.open(CHECK)
            await connection.send(RstStreamFrame(stream, error_code=8).serialize())

    await s.again(4, lambda _: _connected(s, send, stay=False))


@STREAMS.sends(stranger=True)
async def ping_flood(s: Sender) -> None:
    """Pings on four connections."""
    pings = PingFrame(0, bytes(8)).serialize() * 100

    async def send(connection: http2.Connection) -> None:
        while True:
            await connection.send(pings)

    await s.again(4, lambda _: _connected(s, send, stay=False))


@STREAMS.sends(stranger=True)
async def settings_flood(s: Sender) -> None:
    """Settings on four connections."""
    settings = SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 65535}).serialize() * 100

    async def send(connection: http2.Connection) -> None:
        while True:
            await connection.send(settings)

    await s.again(4, lambda _: _connected(s, send, stay=False))


@STREAMS.sends(stranger=True)
async def continuation_flood(s: Sender) -> None:
    """Headers without an end on four connections."""
    block = b"".join(literal(b"x-%d" % number, b"a" * 900) for number in range(16))

    async def send(connection: http2.Connection) -> None:
        await connection.send(HeadersFrame(1, block).serialize())
        while True:
            await connection.send(ContinuationFrame(1, block).serialize())

    await s.again(4, lambda _: _connected(s, send, stay=False))


@STREAMS.sends(stranger=True)
async def metadata(s: Sender) -> None:
    """100 KB of metadata."""
    more = [("x-large", "a" * 100_000)]
    await s.again(4, lambda _: s.call(HEALTH + "Check", token="", metadata=more))


@STREAMS.sends(stranger=True)
async def header_bytes(s: Sender) -> None:
    """Header values that are no UTF-8, a valid token in some."""
    token = b"Bearer " + s.token.encode() + b"\xe9"

    async def send(connection: http2.Connection) -> None:
        for number in range(500):
            name = (b"authorization", b"x-note", b"traceparent", b"grpc-timeout")[number % 4]
            value = token if number % 2 else b"\xff\xfe\xe9" * 9
            await connection.open(CHECK, [(name, value)], ended=True)

    await s.again(4, lambda _: _connected(s, send, stay=False))


@STREAMS.sends(stranger=True)
async def odd_paths(s: Sender) -> None:
    """Paths that name no method."""
    paths = itertools.cycle(
        [b"/", b"//", b"/a", b"", b"*", b"/\xff", b"/a/b/c", b"/" + b"a" * 4000]
    )

    async def send(connection: http2.Connection) -> None:
        for _ in range(500):
            await connection.open(next(paths), ended=True)

    await s.again(4, lambda _: _connected(s, send, stay=False))


@STREAMS.sends(stranger=True)
async def noise(s: Sender) -> None:
    """HTTP/1.1, TLS and zeros in place of HTTP/2, 64 at once."""
    said = [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01" + bytes(512), bytes(4096)]

    async def one(number: int) -> None:
        s.connections += 1
        with contextlib.suppress(OSError):
            reader, writer = await http2.raw_connection(s.target)
            try:
                writer.write(said[number % 3])
                async with asyncio.timeout(1):
                    await reader.read()
            except TimeoutError:
                pass
            finally:
                writer.transport.abort()
        s.count("connections")

    await s.again(64, one)


TLS = Group("TLS", tls=True)


@TLS.sends(stranger=True)
async def half_tls(s: Sender) -> None:
    """1,000 TLS connections that stop within the handshake."""
    hello = _client_hello()

    async def one(number: int) -> None:
        s.connections += 1
        try:
            reader, writer = await http2.raw_connection(s.tls_target)
            try:
                writer.write(hello[: len(hello) // (1 + number % 2)])
                while await reader.read(1 << 16):
                    s.count("parts of a handshake")
                s.count("connection ended by the server")
            finally:
                writer.transport.abort()
        except OSError as error:
            s.count(f"not connected: {type(error).__name__}")

    await s.crowd(1000, one)


@TLS.sends(stranger=True)
async def tls_storm(s: Sender) -> None:
    """TLS handshakes, 32 at once."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])

    async def one(_: int) -> None:
        s.connections += 1
        try:
            opened = await http2.raw_connection(s.tls_target, context)
            opened[1].transport.abort()
            s.count("handshakes")
        except OSError as error:
            s.count(f"not connected: {type(error).__name__}")

    await s.again(32, one)
