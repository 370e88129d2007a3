"""HTTP/1.1 with uvicorn and httptools, with limits on what a connection may use apart from bodies.

uvicorn does not limit the time and size of a request's head, the bytes around the chunks of a body,
the connections of one peer, pipelined requests, or how long an answer waits for its reader.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import time
from collections import Counter
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 20.0
"""The time limit for receiving a request's head, in seconds."""
LINGER_SECONDS = 5.0
"""How long the rest of a body is read and discarded after an early answer. If the connection closed
immediately, the answer would be lost.
"""
UNREAD_SECONDS = 120.0
"""How long an answer waits for a reader that reads nothing. Servers give up earlier."""
MAX_HEAD_BYTES = 64 << 10
"""The maximum size of a request's head, and of the data between two chunks of its body."""
MAX_PIPELINED = 16
"""The maximum number of pipelined requests waiting on a connection."""
MAX_CONNECTIONS = 4_096
"""The maximum number of connections, or half the process's file limit if that is lower. A single
peer may use half of them; the share is this large because behind a proxy, all clients have the same
address.
"""
WRITER = "headrace.writer"
"""The key of the `Writer` in a request's scope."""
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_TOO_LARGE = f"The request's head has more than {MAX_HEAD_BYTES} bytes."


class Writer:
    """Writes chunks of an answer immediately, after its head was sent.

    ASGI's `send` would cost an iteration of the event loop for each token of a stream.

    Attributes:
        wrote_at: the time of the last write, in monotonic seconds.
    """

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self.wrote_at = time.monotonic()

    def __call__(self, text: str) -> bool:
        """Writes a text. Returns whether there is room for more."""
        cycle, piece = self._cycle, text.encode()
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        self.wrote_at = time.monotonic()
        return not cycle.flow.write_paused

    async def room(self) -> None:
        """Waits until the reader has read enough for more to be written."""
        await self._cycle.flow.drain()


class _Bounded(HttpToolsProtocol):
    """A connection to a server that limits the number of its connections.

    Attributes:
        peers: the number of connections of each peer.
        most: the maximum number of connections.
    """

    peers: ClassVar[Counter[str]]
    most: ClassVar[int]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes = self._loose_bytes = 0
        self._running: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._peer = self.client[0] if self.client else ""
        self.peers[self._peer] += 1
        if self.peers.total() > self.most or self.peers[self._peer] > self.most // 2:
            self._refuse(503, "There are too many connections; close some.")
            return
        self._start_timer(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_waiting()
        self.peers[self._peer] -= 1
        if not self.peers[self._peer]:
            del self.peers[self._peer]
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        for cycle in (self._running, *waiting):
            if cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle  # of those that were sent on one connection, the first
        cycle.scope[WRITER] = Writer(cycle)
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._timer is None and self.timeout_keep_alive_task is not None:
            self._start_timer(HEAD_SECONDS)  # a request begins: by blank lines, too
        self._loose_bytes += len(data)
        super().data_received(data if self._timer is None else _without_upgrade(data))
        if self._loose_bytes > MAX_HEAD_BYTES:
            self._refuse(431, _TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self._timer is None:
            self._start_timer(HEAD_SECONDS)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._loose_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
        elif not self.url.startswith(b"/"):
            self._refuse(400, "The request's target must be a path; this is no proxy.")
        elif self.parser.should_upgrade():
            self._refuse(400, "There is no other protocol here; send HTTP/1.1.")
        elif not self.transport.is_closing():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._loose_bytes = 0
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._loose_bytes = 0
        if self.transport.is_closing():
            return
        super().on_message_complete()
        self.cycle.more_body = False
        if self.cycle.response_complete:
            self._start_timer(HEAD_SECONDS)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._start_timer(LINGER_SECONDS)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        """Answers anything that is not HTTP with an error in OpenAI's format."""
        self._refuse(400, "This is no HTTP/1.1 request.")

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, _TOO_LARGE)

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_late(self) -> None:
        cycle: Any = self.cycle  # None before the first request
        is_over = cycle is not None and cycle.more_body  # it was answered before
        if self._loose_bytes and not is_over:
            message = f"The request's head did not come within {HEAD_SECONDS:.0f} s."
            self._refuse(408, message)
        else:
            self.transport.close()

    def _wait_for_reader(self, left: int | None = None) -> None:
        size = self.transport.get_write_buffer_size()
        if left is not None and size >= left:
            self.transport.abort()
        else:
            self._unread = self.loop.call_later(UNREAD_SECONDS, self._wait_for_reader, size)

    def _stop_waiting(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _refuse(self, status: int, message: str) -> None:
        self._stop_timer()
        cycle: Any = self.cycle
        is_amid = cycle is not None and cycle.response_started and not cycle.response_complete
        if is_amid or self.pipeline:  # another answer has begun, or is due before
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.write(refusal(status, message))
            self.transport.close()


def make_protocol() -> type[HttpToolsProtocol]:
    """Creates the protocol class of one server."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    class Bounded(_Bounded):
        peers: ClassVar[Counter[str]] = Counter()
        most: ClassVar[int] = min(MAX_CONNECTIONS, limit // 2)

    return Bounded


def _without_upgrade(data: bytes) -> bytes:
    """Hides the Upgrade header in a head or a fragment of one.

    The parser would otherwise accept the upgrade; Java's client offers HTTP/2 in every first
    request. Data after the head is unchanged.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nignored:", head) + end + rest


def refusal(status: int, message: str) -> bytes:
    """Returns a complete answer that closes its connection."""
    error: dict[str, Any] = {"message": message, "type": "invalid_request_error"}
    body = json.dumps({"error": error | {"param": None, "code": None}}).encode()
    return (
        b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%s" % (status, len(body), body)
    )
