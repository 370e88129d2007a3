"""HTTP/2 as no gRPC client speaks it: calls that are begun and not gone on with, messages of which
half is sent, answers that nobody reads. For tests, and for attacks on a server's process.

It knows frames and nothing of flow control but what the server says: `wait_for` reads its frames.
"""

from __future__ import annotations

import enum
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from service.door.address import parse_address
from tests.service.raw_http2 import PREFACE, Header, all_headers, frame, literal, send_at_once

WAIT_S = 30.0
"""No wait for a frame takes longer: what does is stuck."""
_MAX_FRAME = 16384
_END_STREAM, _END_HEADERS = 1, 4


class Kind(enum.IntEnum):
    """Kinds of frames; CLOSED stands for the end of the connection."""

    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CLOSED = 255


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that the server sent."""

    kind: int
    flags: int
    stream: int
    payload: bytes


class RawConnection:
    """A connection to a server. Blocking: use it in a thread where the server shares the loop."""

    def __init__(
        self, target: str, *, tls: ssl.SSLContext | None = None, receive_buffer: int | None = None
    ) -> None:
        """Connect, and say the first words.

        Args:
            target: as of `HeadraceServer.addresses`.
            tls: to speak TLS.
            receive_buffer: bytes that the kernel takes in for us, where nobody reads.

        Raises:
            OSError: the server refused.
        """
        address = parse_address(target)
        family = socket.AF_UNIX if address.path is not None else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(WAIT_S)
        try:
            self.socket.connect(address.path or (address.host, address.port))
            if family == socket.AF_INET:
                send_at_once(self.socket)
            if tls is not None:
                self.socket = tls.wrap_socket(self.socket, server_hostname=address.host)
            self.socket.sendall(PREFACE + frame(Kind.SETTINGS, 0, 0, b""))
        except OSError:
            self.socket.close()
            raise
        self._next = 1
        self._unread = b""

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close it."""
        self.socket.close()

    def open(self, method: str, *, more: Sequence[Header] = (), ends: bool = False) -> int:
        """Begin a call; returns its stream's number. `ends`: nothing follows."""
        stream, self._next = self._next, self._next + 2
        block = b"".join(literal(*one) for one in all_headers(method.encode(), more))
        flags = _END_HEADERS | (_END_STREAM if ends else 0)
        self.socket.sendall(frame(Kind.HEADERS, flags, stream, block))
        return stream

    def send(self, stream: int, data: bytes, *, ends: bool = False) -> None:
        """Send bytes of a call, whatever the server's window says."""
        for start in range(0, len(data), _MAX_FRAME):
            last = ends and start + _MAX_FRAME >= len(data)
            part = data[start : start + _MAX_FRAME]
            self.socket.sendall(frame(Kind.DATA, _END_STREAM if last else 0, stream, part))

    def half_message(self, stream: int, announced: int, sent: int = 0) -> None:
        """Announce a message of some bytes, and send the first of them."""
        self.send(stream, b"\0" + announced.to_bytes(4, "big") + bytes(sent))

    def frames(self) -> Iterator[Frame]:
        """What the server sends, up to the connection's end, which comes as CLOSED."""
        while True:
            while len(self._unread) >= 9:
                end = 9 + int.from_bytes(self._unread[:3], "big")
                if len(self._unread) < end:
                    break
                head, payload = self._unread[:9], self._unread[9:end]
                self._unread = self._unread[end:]
                yield Frame(head[3], head[4], int.from_bytes(head[5:], "big"), payload)
            try:
                received = self.socket.recv(65536)
            except ConnectionResetError:
                received = b""
            if not received:
                yield Frame(Kind.CLOSED, 0, 0, b"")
                return
            self._unread += received

    def wait_for(self, fits: Callable[[Frame], bool]) -> Frame:
        """Read up to a frame that fits; fails where the connection ends before."""
        for one in self.frames():
            if fits(one):
                return one
            assert one.kind != Kind.CLOSED, "the server closed the connection"
        raise AssertionError("unreachable")

    def end_of(self, stream: int) -> bytes:
        """The block of headers that ends a call: its trailers, in which words stand as they are
        unless the server encodes them.
        """
        return self.wait_for(
            lambda one: (
                one.stream == stream and one.kind == Kind.HEADERS and bool(one.flags & _END_STREAM)
            )
        ).payload

    def is_closed(self) -> bool:
        """Read until the server closes the connection, or has taken it (its settings came)."""
        for one in self.frames():
            if one.kind == Kind.CLOSED:
                return True
            if one.kind == Kind.SETTINGS:
                return False
        raise AssertionError("unreachable")
