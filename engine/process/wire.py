"""Message frames on a stream: a four-byte little-endian length, then one msgpack message."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Generic, TypeVar

import msgspec

MAX_FRAME_BYTES = 256 * 1024 * 1024
"""The maximum length of a frame. A longer one means that the stream is corrupt."""

T = TypeVar("T")


def frame(message: msgspec.Struct, encoder: msgspec.msgpack.Encoder) -> tuple[bytes, bytes]:
    """Encode a message for sending: its length, then the message itself."""
    payload = encoder.encode(message)
    return len(payload).to_bytes(4, "little"), payload


class FrameReader(Generic[T]):
    """Reads messages of one type."""

    def __init__(self, reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._reader = reader
        self._decoder = decoder

    async def read(self) -> T | None:
        """Return the next message, or None if the other side has gone.

        Raises:
            ValueError: the data is not a message of that type.
        """
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "little")
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            payload = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return self._decoder.decode(payload)


class FrameWriter:
    """Writes messages. When `write` returns, the whole message is in the stream's buffer."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()

    def write(self, message: msgspec.Struct) -> None:
        """Send a message. Harmless if the other side has gone."""
        self._writer.writelines(frame(message, self._encoder))

    @property
    def pending_bytes(self) -> int:
        """The number of bytes that the other side has not received yet."""
        return self._writer.transport.get_write_buffer_size()

    async def flush(self) -> None:
        """Wait until most of the buffered data has been sent."""
        await self._writer.drain()

    async def close(self) -> None:
        """Close the stream. Bytes that the other side has not received are lost."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
