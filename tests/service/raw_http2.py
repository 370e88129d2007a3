"""HTTP/2 by hand, for what no gRPC client would send: one call on a connection of its own.
`raw_connection` has connections with more than that.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Iterable

from tests.service.helpers import DEADLINE_S

Header = tuple[bytes, bytes]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
_ACK = END_STREAM = 1
_END_HEADERS = 4


def call(target: str, path: bytes, headers: Iterable[Header] = (), body: bytes = b"") -> int | None:
    """Make a call with one message; returns its grpc-status, None if it ended without one.

    Args:
        target: host:port.
        path: of the method, any bytes.
        headers: behind those that gRPC wants; a name that is given here replaces its.
        body: the message.
    """
    host, _, port = target.rpartition(":")
    with socket.create_connection((host, int(port)), DEADLINE_S) as connection:
        send_at_once(connection)
        connection.sendall(PREFACE + frame(_SETTINGS, 0, 0, b""))
        block = b"".join(literal(*header) for header in all_headers(path, headers))
        message = struct.pack(">BI", 0, len(body)) + body
        connection.sendall(
            frame(_HEADERS, _END_HEADERS, 1, block) + frame(_DATA, END_STREAM, 1, message)
        )
        received = b""
        with connection.makefile("rb") as stream:
            while head := stream.read(9):
                size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
                payload = stream.read(size)
                if kind == _SETTINGS and not flags & _ACK:
                    connection.sendall(frame(_SETTINGS, _ACK, 0, b""))
                if kind == _HEADERS:
                    received += payload
                    if flags & END_STREAM:
                        break
                if kind in (_RST_STREAM, _GOAWAY):
                    break
    # Names are written out the first time, and this is the first time.
    found = re.search(rb"grpc-status[\x01\x02](\d{1,2})", received)
    return None if found is None else int(found[1])


def send_at_once(connection: socket.socket) -> None:
    """Have what is sent not wait until the server has confirmed what was sent before: 40 ms."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def all_headers(path: bytes, headers: Iterable[Header]) -> list[Header]:
    """The headers of a call; one that is given replaces the usual one of its name."""
    named: dict[bytes, bytes] = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    more: list[Header] = []
    for name, value in headers:
        if name in named:
            named[name] = value
        else:
            more.append((name, value))
    return [*named.items(), *more]


def literal(name: bytes, value: bytes) -> bytes:
    """HPACK: a literal that is never indexed, without Huffman's code."""
    return b"\x10" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes([len(text)]) + text
    rest, size = len(text) - 127, b"\x7f"
    while rest >= 128:
        size, rest = size + bytes([rest % 128 + 128]), rest // 128
    return size + bytes([rest]) + text


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame's bytes."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload
