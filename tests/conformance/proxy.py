"""What a driver's library connects to, before a scripted server: it cuts connections, ends streams
and connections as proxies do, takes none, and hands bytes on in small pieces.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

_HEADER_BYTES = 9
_HEADERS, _RST_STREAM, _GOAWAY = 1, 3, 7
_END_STREAM = 1
_CANCEL = 8
_ANSWER_SECONDS = 10.0
_ALL_STREAMS = b"\x7f\xff\xff\xff"  # of the first of two: "there will be another"


class Frames:
    """Reads a server's HTTP/2 frames as they pass.

    Attributes:
        streams: those whose answer has begun and not ended.
    """

    def __init__(self) -> None:
        self.streams: set[int] = set()
        self._held = b""

    @property
    def is_between(self) -> bool:
        """Whether another frame may be put here."""
        return not self._held

    def take(self, data: bytes) -> int:
        """Takes bytes; returns how many final GOAWAYs end in them. A server sends that one when
        the client has answered the first: it knows then.
        """
        held, found = self._held + data, 0
        while len(held) >= _HEADER_BYTES:
            size = _HEADER_BYTES + int.from_bytes(held[:3], "big")
            if len(held) < size:
                break
            is_last = held[_HEADER_BYTES : _HEADER_BYTES + 4] != _ALL_STREAMS
            found += held[3] == _GOAWAY and is_last
            self._note(held[3], held[4], int.from_bytes(held[5:_HEADER_BYTES], "big"))
            held = held[size:]
        self._held = held
        return found

    def _note(self, kind: int, flags: int, stream: int) -> None:
        if kind == _RST_STREAM or (kind == _HEADERS and flags & _END_STREAM):
            self.streams.discard(stream)
        elif kind == _HEADERS:
            self.streams.add(stream)


def _frame(kind: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, 0]) + stream.to_bytes(4, "big") + body


class Proxy:
    """What the library connects to. `address`: as users write it."""

    def __init__(self, folder: Path, name: str, *, unix: bool) -> None:
        self._path = folder / f"{name}.proxy"
        self._unix = unix
        self.backend = ""
        self.accepting = True
        self.dribble: random.Random | None = None
        self.goaways = 0
        """How many connections were asked to end, as their clients know."""
        self.address = ""
        self._server: asyncio.Server | None = None
        self._pairs: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, ...]] = {}
        self._frames: dict[asyncio.Task[None], Frames] = {}

    async def start(self) -> None:
        """Begins to listen."""
        if self._unix:
            self._server = await asyncio.start_unix_server(self._serve, self._path)
            self.address = f"unix:{self._path}"
        else:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._pairs)

    def cut(self) -> None:
        """Cuts all connections, as a lost network does."""
        for writers in list(self._pairs.values()):
            for writer in writers:
                writer.transport.abort()

    async def answering(self, count: int) -> None:
        """Waits until so many streams have begun to be answered, and no frame is half through."""
        async with asyncio.timeout(_ANSWER_SECONDS):
            while not self._answers(count):  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.001)

    def _answers(self, count: int) -> bool:
        frames = self._frames.values()
        begun = sum(len(one.streams) for one in frames)
        return begun == count and all(one.is_between for one in frames)

    def reset(self, code: int) -> None:
        """Ends all streams that are answered, by RST_STREAM with this code, and tells both sides.
        The connections go on.
        """
        for task, frames in self._frames.items():
            client, server = self._pairs[task]
            for stream in frames.streams:
                client.write(_frame(_RST_STREAM, stream, code.to_bytes(4, "big")))
                server.write(_frame(_RST_STREAM, stream, _CANCEL.to_bytes(4, "big")))
            frames.streams.clear()

    def go_away(self) -> None:
        """Says GOAWAY that no stream was heard, and closes all connections."""
        for task in list(self._frames):
            client, server = self._pairs[task]
            client.write(_frame(_GOAWAY, 0, bytes(8)))
            client.close()
            server.transport.abort()

    async def stop(self) -> None:
        """Listens no longer."""
        if self._server is not None:
            self._server.close()
        self.cut()
        tasks = list(self._pairs)
        if tasks:
            await asyncio.wait(tasks, timeout=5)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.accepting:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._pairs[task] = (writer,)
        try:
            back_reader, back_writer = await asyncio.open_unix_connection(self.backend)
            self._pairs[task] = (writer, back_writer)
            up = asyncio.create_task(self._pump(reader, back_writer, None, None))
            frames = self._frames[task] = Frames()
            down = asyncio.create_task(self._pump(back_reader, writer, self.dribble, frames))
            await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
            for one in (writer, back_writer):
                with contextlib.suppress(OSError):
                    one.close()
            await asyncio.wait([up, down])
        except OSError:
            writer.transport.abort()
        finally:
            del self._pairs[task]
            self._frames.pop(task, None)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        dribble: random.Random | None,
        frames: Frames | None,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                goaways = frames.take(data) if frames is not None else 0
                if dribble is None:
                    writer.write(data)
                    await writer.drain()
                    self.goaways += goaways
                    continue
                while data:
                    size = dribble.randint(1, 7)
                    writer.write(data[:size])
                    await writer.drain()
                    await asyncio.sleep(0)
                    data = data[size:]
