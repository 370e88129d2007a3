"""HTTP/1.1 as uvicorn and httptools speak it, with bounds on what a connection may take before a
request of it is there: uvicorn has none on the time and the size of a head, on connections of one
peer, or on requests that are sent before their turn.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 20.0
"""How long a connection may take for a request's head."""
MAX_HEAD_BYTES = 64 << 10
MAX_PIPELINED = 16
"""Requests that a connection has sent before their turn."""
MAX_CONNECTIONS = 4_096
MAX_CONNECTIONS_OF_ONE = MAX_CONNECTIONS // 2
"""Of one peer. It is a half, since behind a proxy all have the same address."""


def make_protocol() -> type[HttpToolsProtocol]:
    """The protocol of one server: its connections are counted together."""
    peers: Counter[str] = Counter()

    class Bounded(HttpToolsProtocol):
        """A connection."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._head_bytes = 0
            self._timer: asyncio.TimerHandle | None = None
            self._peer = self.client[0] if self.client else ""
            peers[self._peer] += 1
            if peers.total() > MAX_CONNECTIONS or peers[self._peer] > MAX_CONNECTIONS_OF_ONE:
                self._refuse(503, "There are too many connections; close some.")
                return
            self._timer = self.loop.call_later(HEAD_SECONDS, self._is_late)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            peers[self._peer] -= 1
            if not peers[self._peer]:
                del peers[self._peer]
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if not self.transport.is_closing():
                super().data_received(data)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._head_bytes = 0
            if self._timer is None:
                self._timer = self.loop.call_later(HEAD_SECONDS, self._is_late)

        def on_url(self, url: bytes) -> None:
            super().on_url(url)
            self._count(len(url))

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value))
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._stop_timer()
            if len(self.pipeline) >= MAX_PIPELINED:
                self.transport.abort()
            elif not self.transport.is_closing():
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self.transport.is_closing():
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self.transport.is_closing():
                super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            """What is no HTTP gets an error of OpenAI's form, too."""
            self._refuse(400, "This is no HTTP/1.1 request.")

        def _count(self, size: int) -> None:
            self._head_bytes += size
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(431, f"The request's head has more than {MAX_HEAD_BYTES} bytes.")

        def _is_late(self) -> None:
            self._timer = None
            self._refuse(408, f"The request's head did not come within {HEAD_SECONDS:.0f} s.")

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _refuse(self, status: int, message: str) -> None:
            self._stop_timer()
            if not self.transport.is_closing():
                self.transport.write(refusal(status, message))
                self.transport.close()

    return Bounded


def refusal(status: int, message: str) -> bytes:
    """A whole answer that ends its connection."""
    error: dict[str, Any] = {"message": message, "type": "invalid_request_error"}
    body = json.dumps({"error": error | {"param": None, "code": None}}).encode()
    return (
        b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%s" % (status, len(body), body)
    )
