"""What a driver's library connects to, before a scripted server: it cuts connections, ends streams
and connections as proxies do, takes none, and hands bytes on in small pieces.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

from hyperframe.exceptions import HyperframeError
from hyperframe.frame import Frame, GoAwayFrame, HeadersFrame, RstStreamFrame

_HEADER_BYTES = 9
_CANCEL = 8
_ANSWER_SECONDS = 10.0
_ALL_STREAMS = 2**31 - 1  # of the first of two: "there will be another"


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
        the client has answered the first: it knows then. What is under TLS is not read.
        """
        self._held += data
        with contextlib.suppress(HyperframeError):
            return sum(map(self._note, self._frames()))
        self._held = b""
        return 0

    def _frames(self) -> Iterator[Frame]:
        while len(self._held) >= _HEADER_BYTES:
            one, size = Frame.parse_frame_header(memoryview(self._held[:_HEADER_BYTES]))
            end = _HEADER_BYTES + size
            if len(self._held) < end:
                return
            one.parse_body(memoryview(self._held[_HEADER_BYTES:end]))
            self._held = self._held[end:]
            yield one

    def _note(self, one: Frame) -> bool:
        if isinstance(one, RstStreamFrame) or "END_STREAM" in one.flags:
            self.streams.discard(one.stream_id)
        elif isinstance(one, HeadersFrame):
            self.streams.add(one.stream_id)
        return isinstance(one, GoAwayFrame) and one.last_stream_id != _ALL_STREAMS


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
                client.write(RstStreamFrame(stream, code).serialize())
                server.write(RstStreamFrame(stream, _CANCEL).serialize())
            frames.streams.clear()

    def go_away(self) -> None:
        """Says GOAWAY that no stream was heard, and closes all connections."""
        for task in list(self._frames):
            client, server = self._pairs[task]
            client.write(GoAwayFrame(0).serialize())
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
