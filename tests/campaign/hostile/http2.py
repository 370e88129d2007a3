"""An HTTP/2 connection on the event loop that can send what no gRPC library sends.

It never compresses headers. It parses received frames only as far as flow control and the tally
require.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import Counter
from collections.abc import Sequence

from hyperframe.frame import (
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.service.raw_http2 import FRAME_BYTES, HEAD_BYTES, HELLO, Header, data, headers

WINDOW_BYTES = 65535
"""The initial flow-control window of streams and connections, until the server changes it."""
NAMES = {
    HeadersFrame: "headers",
    RstStreamFrame: "reset",
    GoAwayFrame: "goaway",
    PingFrame: "ping",
}


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

    async def open(self, path: bytes, more: Sequence[Header] = (), *, ended: bool = False) -> int:
        """Begin a call and return its stream number.

        ended: whether the client sends nothing after the headers.
        """
        stream, self._next = self._next, self._next + 2
        self._windows[stream] = self._initial
        await self.send(headers(stream, path, more, ended=ended))
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
            await self.send(data(stream, content[at : at + room], ended=last))
            at += room

    def close(self) -> None:
        self._reading.cancel()
        self._writer.transport.abort()

    async def _read(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await self._reader.readexactly(HEAD_BYTES)
                one, size = Frame.parse_frame_header(memoryview(head))
                one.parse_body(memoryview(await self._reader.readexactly(size)))
                await self._take(one)
        self.tally["connection ended by the server"] += 1

    async def _take(self, one: Frame) -> None:
        if type(one) in NAMES:
            self.tally[f"frame {NAMES[type(one)]}"] += 1
        if isinstance(one, SettingsFrame) and "ACK" not in one.flags:
            window = one.settings.get(SettingsFrame.INITIAL_WINDOW_SIZE, self._initial)
            for stream in self._windows:
                self._windows[stream] += window - self._initial
            self._initial = window
            self._opened.set()
            await self.send(SettingsFrame(0, flags=["ACK"]).serialize())
        elif isinstance(one, PingFrame) and "ACK" not in one.flags:
            await self.send(PingFrame(0, one.opaque_data, flags=["ACK"]).serialize())
        elif isinstance(one, WindowUpdateFrame):
            if one.stream_id == 0:
                self._window += one.window_increment
            elif one.stream_id in self._windows:
                self._windows[one.stream_id] += one.window_increment
            self._opened.set()


async def connect(target: str, tally: Counter[str]) -> Connection:
    """Open a connection and send the HTTP/2 preface. Raises OSError."""
    reader, writer = await raw_connection(target)
    connection = Connection(reader, writer, tally)
    await connection.send(HELLO)
    return connection


async def raw_connection(
    target: str, tls: ssl.SSLContext | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection without sending anything. Raises OSError."""
    if target.startswith("unix:"):
        return await asyncio.open_unix_connection(target.removeprefix("unix:"))
    host, _, port = target.rpartition(":")
    return await asyncio.open_connection(host, int(port), ssl=tls)
