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
from tests.campaign.hostile.inputs.kinds import Group, named
from tests.campaign.hostile.sending import HEALTH, Sender
from tests.service.raw_http2 import literal, message

CHECK = (HEALTH + "Check").encode()
Attack = Callable[[Sender, http2.Connection], Awaitable[None]]
Said = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def _connected(s: Sender, attack: Attack, *, stay: bool) -> None:
    """Open a connection, attack on it, and hold it until the server closes it or time is up."""
    s.connections += 1
    try:
        connection = await http2.connect(s.target, s.tally)
    except OSError as error:
        s.count(f"not connected: {type(error).__name__}")
        return
    try:
        await attack(s, connection)
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


async def _on_socket(s: Sender, target: str, say: Said, tls: ssl.SSLContext | None = None) -> None:
    """Open a socket, and say what is no HTTP/2 at all."""
    s.connections += 1
    try:
        reader, writer = await http2.raw_connection(target, tls)
        try:
            await say(reader, writer)
        finally:
            writer.transport.abort()
    except OSError as error:
        s.count(f"not connected: {type(error).__name__}")


def on_connections(group: Group, number: int, *, stay: bool = True) -> Callable[[Attack], Attack]:
    """Add the input of a stranger that does something on each of a number of connections.

    stay: whether the connections are held open then; otherwise new ones follow.
    """

    def add(attack: Attack) -> Attack:
        @group.sends(stranger=True, **named(attack))
        async def send(s: Sender) -> None:
            await (s.crowd if stay else s.again)(number, lambda _: _connected(s, attack, stay=stay))

        return attack

    return add


def _tls() -> ssl.SSLContext:
    """Return the settings of a client that trusts any server."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def _client_hello() -> bytes:
    """Return the first bytes that a TLS client sends."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        _tls().wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


BODIES = Group("strangers' bodies")


@on_connections(BODIES, 30)
async def half_bodies(s: Sender, connection: http2.Connection) -> None:
    """30 health checks whose bodies lack their last byte."""
    body = message(s.below, bytes(s.below - 1))
    await connection.data(await connection.open(CHECK), body)


@on_connections(BODIES, 30)
async def many_half_bodies(s: Sender, connection: http2.Connection) -> None:
    """1,920 health checks with 64 KB of a larger body."""
    body = message(s.below, bytes(64 << 10))
    for _ in range(64):
        await connection.data(await connection.open(CHECK), body)


CONNECTIONS = Group("strangers' connections")


@on_connections(CONNECTIONS, 3000)
async def idle_connections(s: Sender, connection: http2.Connection) -> None:
    """3,000 connections that say their preface alone."""


@CONNECTIONS.sends(stranger=True)
async def silent_connections(s: Sender) -> None:
    """3,000 connections that say nothing."""

    async def say(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read(1 << 20)
        s.count("the server said something")
        await asyncio.Event().wait()

    await s.crowd(3000, lambda _: _on_socket(s, s.target, say))


@CONNECTIONS.sends(stranger=True)
async def watches(s: Sender) -> None:
    """3,000 Watches on 40 connections."""
    channels = [s.connect() for _ in range(40)]
    await s.crowd(3000, lambda n: s.call(HEALTH + "Watch", token="", channel=channels[n % 40]))


STREAMS = Group("strangers' streams")


@on_connections(STREAMS, 10)
async def idle_streams(s: Sender, connection: http2.Connection) -> None:
    """20,000 streams without a body on ten connections."""
    for _ in range(2000):
        await connection.open(CHECK)


@STREAMS.sends(stranger=True)
async def check_storm(s: Sender) -> None:
    """Health checks, 64 at once."""
    await s.again(64, lambda _: s.call(HEALTH + "Check", token=""))


@on_connections(STREAMS, 4, stay=False)
async def rapid_reset(s: Sender, connection: http2.Connection) -> None:
    """Streams that are reset as soon as they are open, on four connections."""
    while True:
        stream = await connection.open(CHECK)
        await connection.send(RstStreamFrame(stream, error_code=8).serialize())


@on_connections(STREAMS, 4, stay=False)
async def ping_flood(s: Sender, connection: http2.Connection) -> None:
    """Pings on four connections."""
    pings = PingFrame(0, bytes(8)).serialize() * 100
    while True:
        await connection.send(pings)


@on_connections(STREAMS, 4, stay=False)
async def settings_flood(s: Sender, connection: http2.Connection) -> None:
    """Settings on four connections."""
    settings = SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 65535}).serialize() * 100
    while True:
        await connection.send(settings)


@on_connections(STREAMS, 4, stay=False)
async def continuation_flood(s: Sender, connection: http2.Connection) -> None:
    """Headers without an end on four connections."""
    block = b"".join(literal(b"x-%d" % number, b"a" * 900) for number in range(16))
    await connection.send(HeadersFrame(1, block).serialize())
    while True:
        await connection.send(ContinuationFrame(1, block).serialize())


@STREAMS.sends(stranger=True)
async def metadata(s: Sender) -> None:
    """100 KB of metadata."""
    more = [("x-large", "a" * 100_000)]
    await s.again(4, lambda _: s.call(HEALTH + "Check", token="", metadata=more))


@on_connections(STREAMS, 4, stay=False)
async def header_bytes(s: Sender, connection: http2.Connection) -> None:
    """Header values that are no UTF-8, a valid token in some."""
    token = b"Bearer " + s.token.encode() + b"\xe9"
    for number in range(500):
        name = (b"authorization", b"x-note", b"traceparent", b"grpc-timeout")[number % 4]
        value = token if number % 2 else b"\xff\xfe\xe9" * 9
        await connection.open(CHECK, [(name, value)], ended=True)


@on_connections(STREAMS, 4, stay=False)
async def odd_paths(s: Sender, connection: http2.Connection) -> None:
    """Paths that name no method."""
    paths = itertools.cycle(
        [b"/", b"//", b"/a", b"", b"*", b"/\xff", b"/a/b/c", b"/" + b"a" * 4000]
    )
    for _ in range(500):
        await connection.open(next(paths), ended=True)


@STREAMS.sends(stranger=True)
async def noise(s: Sender) -> None:
    """HTTP/1.1, TLS and zeros in place of HTTP/2, 64 at once."""
    said = itertools.cycle(
        [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01" + bytes(512), bytes(4096)]
    )

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(next(said))
        s.count("connections")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await reader.read()

    await s.again(64, lambda _: _on_socket(s, s.target, say))


TLS = Group("TLS", tls=True)


@TLS.sends(stranger=True)
async def half_tls(s: Sender) -> None:
    """1,000 TLS connections that stop within the handshake."""
    hello = _client_hello()
    sizes = itertools.cycle((len(hello), len(hello) // 2))

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(hello[: next(sizes)])
        while await reader.read(1 << 16):
            s.count("parts of a handshake")
        s.count("connection ended by the server")

    await s.crowd(1000, lambda _: _on_socket(s, s.tls_target, say))


@TLS.sends(stranger=True)
async def tls_storm(s: Sender) -> None:
    """TLS handshakes, 32 at once."""
    context = _tls()

    async def say(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        s.count("handshakes")

    await s.again(32, lambda _: _on_socket(s, s.tls_target, say, context))
