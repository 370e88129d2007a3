"""A peer that speaks as much HTTP/2 as a proxy that ends a stream: it begins the answer to each
call, and then loses it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_END_STREAM = _ACK = 1
_END_HEADERS = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_OK = b"\x88\x5f\x10application/grpc"  # :status 200 and the content type

RESETS = {"NO_ERROR": 0, "INTERNAL_ERROR": 2, "REFUSED_STREAM": 7, "CANCEL": 8}
RESETS |= {"ENHANCE_YOUR_CALM": 11, "INADEQUATE_SECURITY": 12}
"""The codes with which RST_STREAM may end a stream."""


def _frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + body


class Loser:
    """The peer. `target`: where clients reach it.

    Args:
        way: one of `RESETS`, `GOAWAY` (of no stream), `closed` (the connection) or `no trailers`.
    """

    def __init__(self, way: str) -> None:
        self._way = way
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """Ends all connections, and listens no longer."""
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in (self._listener, *self._open):
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it listens no longer
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                thread = threading.Thread(target=self._serve, args=(connection,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection.makefile("rb") as incoming:
            incoming.read(len(_PREFACE))
            connection.sendall(_frame(_SETTINGS, 0, 0))
            while head := incoming.read(9):
                kind, flags, stream = struct.unpack(">BBI", head[3:])
                body = incoming.read(int.from_bytes(head[:3], "big"))
                if kind in (_SETTINGS, _PING) and not flags & _ACK:
                    connection.sendall(_frame(kind, _ACK, 0, body if kind == _PING else b""))
                elif kind == _HEADERS:
                    connection.sendall(_frame(_HEADERS, _END_HEADERS, stream, _OK))
                elif kind == _DATA:  # the request has come
                    self._lose(connection, stream)

    def _lose(self, connection: socket.socket, stream: int) -> None:
        if self._way in RESETS:
            code = struct.pack(">I", RESETS[self._way])
            connection.sendall(_frame(_RST_STREAM, 0, stream, code))
        elif self._way == "no trailers":
            connection.sendall(_frame(_DATA, _END_STREAM, stream))
        else:
            if self._way == "GOAWAY":
                connection.sendall(_frame(_GOAWAY, 0, 0, bytes(8)))
            connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def losing(way: str) -> Iterator[str]:
    """Where a peer listens that loses each stream in this way."""
    loser = Loser(way)
    try:
        yield loser.target
    finally:
        loser.close()
