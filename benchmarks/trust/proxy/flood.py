"""Headers without an end, on many connections at once, none of which is ended by the sender."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.hostile import http2

CONNECTIONS, FRAMES = 300, 300
"""Of each connection: fewer than the 512 at which Envoy ends one, so that all stay open."""
CAP_BYTES = 600_000_000
"""Nothing more is sent once a process has grown by so much: the machine is others' too."""
_LOOK_EVERY = 20
_SEND_S = 2.0
"""From who takes nothing for so long the next connection is taken."""
BLOCKS: Mapping[str, bytes] = {
    "long headers": b"".join(http2.literal(b"x-%d" % n, b"a" * 900) for n in range(17)),
    "short headers": http2.literal(b"x", b"a") * 3000,
}
"""The content of a frame, within the 16 KiB that one may have."""


@dataclass(slots=True)
class Sent:
    """What was sent.

    Attributes:
        bytes: of frames.
        connections: that were opened.
        is_capped: whether it stopped because too much memory was taken.
    """

    bytes: int = 0
    connections: int = 0
    is_capped: bool = False


def flood(port: int, block: bytes, seconds: float, growth: Callable[[], int]) -> Sent:
    """Send for so long, or until everything was sent; then close all connections.

    Args:
        port: of 127.0.0.1.
        block: each frame's content: whole header fields.
        growth: the most by which a process has grown, in bytes.
    """
    head = http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0)
    head += http2.frame(http2.HEADERS, 0, 1, block)
    more = http2.frame(http2.CONTINUATION, 0, 1, block)
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
