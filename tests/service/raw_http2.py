"""HTTP/2 as no gRPC client speaks it: calls that are begun and not gone on with, messages of which
half is sent, answers that nobody reads. For tests, and for attacks on a server's process.

Frames are those of `hyperframe`; headers are written here, as no library writes what is wrong.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType

from hyperframe.frame import (
    DataFrame,
    ExtensionFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    RstStreamFrame,
    SettingsFrame,
)

from service.door.address import parse_address

Header = tuple[bytes, bytes]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HELLO = PREFACE + SettingsFrame(0).serialize()
"""The first words of a client."""
FRAME_BYTES = 16384
HEAD_BYTES = 9
WAIT_S = 30.0
"""No wait for a frame takes longer: what does is stuck."""


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """A frame's bytes, whatever is wrong with it."""
    found = ExtensionFrame(kind, stream, flags, content)
    found.body_len = len(content)
    return found.serialize()


def headers(stream: int, path: bytes, more: Iterable[Header] = (), *, ended: bool = False) -> bytes:
    """The frame that begins a call. A header that is given replaces the usual one of its name.
    `ended`: nothing follows.
    """
    usual: dict[bytes, bytes] = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    given = list(more)
    usual |= {name: value for name, value in given if name in usual}
    found = [*usual.items(), *(one for one in given if one[0] not in usual)]
    block = b"".join(literal(name, value) for name, value in found)
    flags = ["END_HEADERS", *(["END_STREAM"] if ended else [])]
    return HeadersFrame(stream, block, flags=flags).serialize()


def data(stream: int, content: bytes, *, ended: bool = False) -> bytes:
    """A frame of a call's bytes."""
    return DataFrame(stream, content, flags=["END_STREAM"] if ended else []).serialize()


def message(size: int, content: bytes) -> bytes:
    """A gRPC message of which so many bytes are announced."""
    return b"\0" + size.to_bytes(4, "big") + content


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
            if family == socket.AF_INET:  # else a frame waits 40 ms for the one before it
                self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self.socket = tls.wrap_socket(self.socket, server_hostname=address.host)
            self.socket.sendall(HELLO)
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

    def open(self, method: str | bytes, *, more: Sequence[Header] = (), ends: bool = False) -> int:
        """Begin a call; returns its stream's number. `ends`: nothing follows."""
        stream, self._next = self._next, self._next + 2
        path = method.encode() if isinstance(method, str) else method
        self.socket.sendall(headers(stream, path, more, ended=ends))
        return stream

    def send(self, stream: int, content: bytes, *, ends: bool = False) -> None:
        """Send bytes of a call, whatever the server's window says."""
        for start in range(0, len(content), FRAME_BYTES):
            last = ends and start + FRAME_BYTES >= len(content)
            part = content[start : start + FRAME_BYTES]
            self.socket.sendall(data(stream, part, ended=last))

    def half_message(self, stream: int, announced: int, sent: int = 0) -> None:
        """Announce a message of some bytes, and send the first of them."""
        self.send(stream, message(announced, bytes(sent)))

    def frames(self) -> Iterator[Frame]:
        """What the server sends, up to the connection's end."""
        while True:
            while len(self._unread) >= HEAD_BYTES:
                one, size = Frame.parse_frame_header(memoryview(self._unread[:HEAD_BYTES]))
                end = HEAD_BYTES + size
                if len(self._unread) < end:
                    break
                one.parse_body(memoryview(self._unread[HEAD_BYTES:end]))
                self._unread = self._unread[end:]
                yield one
            try:
                received = self.socket.recv(65536)
            except ConnectionResetError:
                received = b""
            if not received:
                return
            self._unread += received

    def wait_for(self, fits: Callable[[Frame], bool]) -> Frame:
        """Read up to a frame that fits; fails where the connection ends before."""
        for one in self.frames():
            if fits(one):
                return one
        raise AssertionError("the server closed the connection")

    def end_of(self, stream: int) -> bytes:
        """The block of headers that ends a call: its trailers, in which words stand as they are
        unless the server encodes them.
        """
        found = self.wait_for(
            lambda one: (
                isinstance(one, HeadersFrame)
                and one.stream_id == stream
                and "END_STREAM" in one.flags
            )
        )
        assert isinstance(found, HeadersFrame)
        return found.data

    def is_closed(self) -> bool:
        """Read until the server closes the connection, or has taken it (its settings came)."""
        return not any(isinstance(one, SettingsFrame) for one in self.frames())


def call(target: str, path: bytes, more: Sequence[Header] = (), body: bytes = b"") -> int | None:
    """Make a call with one message on a connection of its own; returns its grpc-status, None if it
    ended without one.
    """
    received = b""
    with RawConnection(target) as connection:
        stream = connection.open(path, more=more)
        connection.send(stream, message(len(body), body), ends=True)
        for one in connection.frames():
            if isinstance(one, SettingsFrame) and "ACK" not in one.flags:
                connection.socket.sendall(SettingsFrame(0, flags=["ACK"]).serialize())
            if isinstance(one, HeadersFrame):
                received += one.data
            if isinstance(one, RstStreamFrame | GoAwayFrame) or "END_STREAM" in one.flags:
                break
    # Names are written out the first time, and this is the first time.
    found = re.search(rb"grpc-status[\x01\x02](\d{1,2})", received)
    return None if found is None else int(found[1])
