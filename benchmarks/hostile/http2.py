"""A minimal HTTP/2 client that can send what no gRPC library sends.

It never compresses headers. It parses received frames only as far as flow control and the tally
require.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import struct
from collections import Counter
from collections.abc import Sequence

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
WINDOW_BYTES = 65535
"""The initial flow-control window of streams and connections, until the server changes it."""
FRAME_BYTES = 16384
_INITIAL_WINDOW = 4  # of a setting


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """Encode a frame."""
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def literal(name: bytes, value: bytes) -> bytes:
    """Encode a header as a literal without indexing (RFC 7541, 6.2.2)."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(number: int) -> bytes:
    if number < 127:
        return bytes([number])
    found, number = bytearray([127]), number - 127
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


class Connection:
    """One connection. Created by `connect`.

    Attributes:
        tally: the number of received frames by name.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tally: Counter[str]
    ) -> None:
        self.tally = tally
        self._reader = reader
        self._writer = writer
        self._next = 1
        self._initial = WINDOW_BYTES
        self._window = WINDOW_BYTES
        self._windows: dict[int, int] = {}
        self._opened = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def send(self, *frames: bytes) -> None:
        """Send frames unchanged. Raises OSError once the server has closed the connection."""
        self._writer.writelines(frames)
        await self._writer.drain()
        await asyncio.sleep(0)  # a drain of what is taken at once gives nobody else a turn

    async def open(
        self,
        path: bytes,
        more: Sequence[tuple[bytes, bytes]] = (),
        *,
        ended: bool = False,
    ) -> int:
        """Begin a call and return its stream number.

        ended: whether the client sends nothing after the headers.
        """
        stream, self._next = self._next, self._next + 2
        self._windows[stream] = self._initial
        headers = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            *more,
        ]
        block = b"".join(literal(name, value) for name, value in headers)
        await self.send(frame(HEADERS, END_HEADERS | (END_STREAM if ended else 0), stream, block))
        return stream

    async def data(self, stream: int, content: bytes, *, ended: bool = False) -> None:
        """Send data on a stream, as the flow-control windows allow."""
        at = 0
        while at < len(content):
            room = min(self._window, self._windows[stream], FRAME_BYTES, len(content) - at)
            if room <= 0:
                self._opened.clear()
                await self._opened.wait()
                continue
            self._window -= room
            self._windows[stream] -= room
            last = ended and at + room == len(content)
            await self.send(frame(DATA, END_STREAM * last, stream, content[at : at + room]))
            at += room

    def close(self) -> None:
        """Close the connection."""
        self._reading.cancel()
        self._writer.transport.abort()

    async def _read(self) -> None:
        names = {HEADERS: "headers", RESET: "reset", GOAWAY: "goaway", PING: "ping"}
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await self._reader.readexactly(9)
                size = int.from_bytes(head[:3], "big")
                kind, flags = head[3], head[4]
                stream = int.from_bytes(head[5:], "big") & 0x7FFFFFFF
                content = await self._reader.readexactly(size)
                if kind in names:
                    self.tally[f"frame {names[kind]}"] += 1
                if kind == SETTINGS and not flags & ACK:
                    self._settings(content)
                    await self.send(frame(SETTINGS, ACK, 0))
                elif kind == PING and not flags & ACK:
                    await self.send(frame(PING, ACK, 0, content))
                elif kind == WINDOW:
                    self._widen(stream, int.from_bytes(content, "big"))
        self.tally["connection ended by the server"] += 1

    def _settings(self, content: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", content):
            if name == _INITIAL_WINDOW:
                for stream in self._windows:
                    self._windows[stream] += value - self._initial
                self._initial = value
                self._opened.set()

    def _widen(self, stream: int, by: int) -> None:
        if stream == 0:
            self._window += by
        elif stream in self._windows:
            self._windows[stream] += by
        self._opened.set()


async def connect(target: str, tally: Counter[str]) -> Connection:
    """Open a connection and send the HTTP/2 preface. Raises OSError."""
    reader, writer = await raw_connection(target)
    connection = Connection(reader, writer, tally)
    await connection.send(PREFACE, frame(SETTINGS, 0, 0))
    return connection


async def raw_connection(
    target: str, tls: ssl.SSLContext | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection without sending anything. Raises OSError."""
    if target.startswith("unix:"):
        return await asyncio.open_unix_connection(target.removeprefix("unix:"))
    host, _, port = target.rpartition(":")
    return await asyncio.open_connection(host, int(port), ssl=tls)
