"""Endless headers on many concurrent connections, which the sender keeps open."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hyperframe.frame import ContinuationFrame, HeadersFrame

from tests.service.raw_http2 import HELLO, literal

CONNECTIONS, FRAMES = 300, 300
"""The numbers of connections and of frames on each. Envoy closes a connection at 512 frames, so all
connections stay open.
"""
CAP_BYTES = 600_000_000
"""The memory growth of a process at which sending stops, to protect other users of the machine."""
_LOOK_EVERY = 20
_SEND_S = 2.0
"""The time limit for a blocked send; after that the next connection is used."""
BLOCKS: Mapping[str, bytes] = {
    "long headers": b"".join(literal(b"x-%d" % n, b"a" * 900) for n in range(17)),
    "short headers": literal(b"x", b"a") * 3000,
}
"""The content of a frame, within the limit of 16 KiB."""


@dataclass(slots=True)
class Sent:
    """What was sent.

    Attributes:
        is_capped: whether sending stopped because a process used too much memory.
    """

    bytes: int = 0
    connections: int = 0
    is_capped: bool = False


def flood(port: int, block: bytes, seconds: float, growth: Callable[[], int]) -> Sent:
    """Send until time is up or everything has been sent; then close all connections. block: each
    frame's content, whole header fields. growth: returns the largest memory growth of a process, in
    bytes.
    """
    head = HELLO + HeadersFrame(1, block).serialize()
    more = ContinuationFrame(1, block).serialize()
    sent, ends = Sent(), time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        while sent.connections < CONNECTIONS:
            connection = socket.create_connection(("127.0.0.1", port), _SEND_S)
            stack.callback(connection.close)
            sent.connections += 1
            with contextlib.suppress(OSError):
                connection.sendall(head)
                for number in range(FRAMES):
                    if number % _LOOK_EVERY == 0:
                        sent.is_capped = growth() > CAP_BYTES
                        if sent.is_capped or time.monotonic() > ends:
                            return sent
                    connection.sendall(more)
                    sent.bytes += len(more)
    return sent
