"""Callers without a token, and raw bytes on a socket that no gRPC library sends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
import struct
from collections.abc import Awaitable, Callable

from benchmarks.hostile import http2
from benchmarks.hostile.inputs.kinds import Group, Input
from benchmarks.hostile.sending import HEALTH, Sender

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


async def half_bodies(s: Sender) -> None:
    """Send 30 health checks of the largest body size without their last byte."""
    body = struct.pack(">BI", 0, s.below) + bytes(s.below - 1)

    async def send(connection: http2.Connection) -> None:
        await connection.data(await connection.open(CHECK), body)

    await s.crowd(30, lambda _: _connected(s, send))


async def many_half_bodies(s: Sender) -> None:
    """Send incomplete health checks of 64 KB on 64 streams of each of 30 connections."""
    body = struct.pack(">BI", 0, s.below) + bytes(64 << 10)

    async def send(connection: http2.Connection) -> None:
        for _ in range(64):
            await connection.data(await connection.open(CHECK), body)

    await s.crowd(30, lambda _: _connected(s, send))


async def idle_streams(s: Sender) -> None:
    """Open stream after stream on ten connections without sending a body."""

    async def send(connection: http2.Connection) -> None:
        for _ in range(2000):
            await connection.open(CHECK)

    await s.crowd(10, lambda _: _connected(s, send))


async def idle_connections(s: Sender) -> None:
    """Open 3,000 connections that send the HTTP/2 preface and nothing more."""

    async def nothing(_: http2.Connection) -> None:
        pass

    await s.crowd(3000, lambda _: _connected(s, nothing))


async def silent_connections(s: Sender) -> None:
    """Open 3,000 connections that send nothing."""

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


async def watches(s: Sender) -> None:
    """Open 3,000 health Watch streams on 40 connections."""
    channels = [s.connect() for _ in range(40)]
    await s.crowd(3000, lambda n: s.call(HEALTH + "Watch", token="", channel=channels[n % 40]))


async def check_storm(s: Sender) -> None:
    """Send health checks continuously from 64 concurrent workers."""
    await s.again(64, lambda _: s.call(HEALTH + "Check", token=""))


async def rapid_reset(s: Sender) -> None:
    """Open streams and reset them immediately, on four connections."""

    async def send(connection: http2.Connection) -> None:
        while True:
            stream = await connection.open(CHECK)
            await connection.send(http2.frame(http2.RESET, 0, stream, struct.pack(">I", 8)))

    await s.again(4, lambda _: _connected(s, send, stay=False))


async def ping_flood(s: Sender) -> None:
    """Send a flood of PING frames on four connections."""
    pings = http2.frame(http2.PING, 0, 0, bytes(8)) * 100

    async def send(connection: http2.Connection) -> None:
        while True:
            await connection.send(pings)

    await s.again(4, lambda _: _connected(s, send, stay=False))


async def settings_flood(s: Sender) -> None:
    """Send a flood of SETTINGS frames on four connections."""
    settings = http2.frame(http2.SETTINGS, 0, 0, struct.pack(">HI", 4, 65535)) * 100

    async def send(connection: http2.Connection) -> None:
        while True:
            await connection.send(settings)

    await s.again(4, lambda _: _connected(s, send, stay=False))


async def continuation_flood(s: Sender) -> None:
    """Send endless headers in CONTINUATION frames on four connections."""
    block = b"".join(http2.literal(b"x-%d" % number, b"a" * 900) for number in range(16))

    async def send(connection: http2.Connection) -> None:
        await connection.send(http2.frame(http2.HEADERS, 0, 1, block))
        while True:
            await connection.send(http2.frame(http2.CONTINUATION, 0, 1, block))

    await s.again(4, lambda _: _connected(s, send, stay=False))


async def metadata(s: Sender) -> None:
    """Send calls with 100 KB of metadata."""
    more = [("x-large", "a" * 100_000)]
    await s.again(4, lambda _: s.call(HEALTH + "Check", token="", metadata=more))


async def header_bytes(s: Sender) -> None:
    """Send header values that are not UTF-8, including a valid token with one extra byte."""
    token = b"Bearer " + s.token.encode() + b"\xe9"

    async def send(connection: http2.Connection) -> None:
        for number in range(500):
            name = (b"authorization", b"x-note", b"traceparent", b"grpc-timeout")[number % 4]
            value = token if number % 2 else b"\xff\xfe\xe9" * 9
            await connection.open(CHECK, [(name, value)], ended=True)

    await s.again(4, lambda _: _connected(s, send, stay=False))


async def odd_paths(s: Sender) -> None:
    """Call paths that name no method."""
    paths = itertools.cycle(
        [b"/", b"//", b"/a", b"", b"*", b"/\xff", b"/a/b/c", b"/" + b"a" * 4000]
    )

    async def send(connection: http2.Connection) -> None:
        for _ in range(500):
            await connection.open(next(paths), ended=True)

    await s.again(4, lambda _: _connected(s, send, stay=False))


async def noise(s: Sender) -> None:
    """Open connections that send other protocols: HTTP/1.1, TLS, zeros."""
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


async def half_tls(s: Sender) -> None:
    """Open 1,000 TLS connections that stop in the middle of the handshake."""
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


async def tls_storm(s: Sender) -> None:
    """Make TLS handshakes, 32 at the same time, and close each connection once it is open."""
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


BODIES = Group(
    "strangers' bodies",
    (
        Input(
            name="half-bodies",
            meaning="30 health checks whose bodies lack their last byte",
            send=half_bodies,
            stranger=True,
        ),
        Input(
            name="many-half-bodies",
            meaning="1,920 health checks with 64 KB of a larger body",
            send=many_half_bodies,
            stranger=True,
        ),
    ),
)
CONNECTIONS = Group(
    "strangers' connections",
    (
        Input(
            name="idle-connections",
            meaning="3,000 connections that say their preface alone",
            send=idle_connections,
            stranger=True,
        ),
        Input(
            name="silent-connections",
            meaning="3,000 connections that say nothing",
            send=silent_connections,
            stranger=True,
        ),
        Input(
            name="watches",
            meaning="3,000 Watches on 40 connections",
            send=watches,
            stranger=True,
        ),
    ),
)
STREAMS = Group(
    "strangers' streams",
    (
        Input(
            name="idle-streams",
            meaning="20,000 streams without a body on ten connections",
            send=idle_streams,
            stranger=True,
        ),
        Input(
            name="check-storm",
            meaning="health checks, 64 at once",
            send=check_storm,
            stranger=True,
        ),
        Input(
            name="rapid-reset",
            meaning="streams that are reset as soon as they are open, on four connections",
            send=rapid_reset,
            stranger=True,
        ),
        Input(
            name="ping-flood", meaning="pings on four connections", send=ping_flood, stranger=True
        ),
        Input(
            name="settings-flood",
            meaning="settings on four connections",
            send=settings_flood,
            stranger=True,
        ),
        Input(
            name="continuation-flood",
            meaning="headers without an end on four connections",
            send=continuation_flood,
            stranger=True,
        ),
        Input(name="metadata", meaning="100 KB of metadata", send=metadata, stranger=True),
        Input(
            name="header-bytes",
            meaning="header values that are no UTF-8, a valid token in some",
            send=header_bytes,
            stranger=True,
        ),
        Input(name="odd-paths", meaning="paths that name no method", send=odd_paths, stranger=True),
        Input(
            name="noise",
            meaning="HTTP/1.1, TLS and zeros in place of HTTP/2, 64 at once",
            send=noise,
            stranger=True,
        ),
    ),
)
TLS = Group(
    "TLS",
    (
        Input(
            name="half-tls",
            meaning="1,000 TLS connections that stop within the handshake",
            send=half_tls,
            stranger=True,
        ),
        Input(
            name="tls-storm",
            meaning="TLS handshakes, 32 at once",
            send=tls_storm,
            stranger=True,
        ),
    ),
    tls=True,
)
