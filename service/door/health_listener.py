"""Serves only health checks at a separate address, with separate threads.

    probe ──▶ the health address ──▶ a separate gRPC server ──▶ what `HealthServicer` knows
    clients, strangers ──▶ the other addresses ──▶ event loop ──▶ the same

The other addresses also answer health checks, but on the event loop, in turn with all other calls.
Any client that can connect may open calls faster than they are refused, and a probe then waits
behind them in gRPC's queue. So if untrusted clients can reach the server, operators give probes a
separate address that these clients cannot reach. Calls elsewhere do not delay it. A busy event loop
delays it only by a few of the interpreter's switch intervals of 5 ms.

It uses no TLS, as orchestrators' probes expect, and reveals only statuses and the reasons for bad
ones.
"""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from service.door.health import HealthServicer
from service.door.thread_pool import started_pool

_THREADS = 2
_OPTIONS = [
    # A check has only a few bytes, and there are few probes.
    ("grpc.max_receive_message_length", 4 << 10),
    ("grpc.max_metadata_size", 4 << 10),
    ("grpc.absolute_max_metadata_size", 4 << 10),
    ("grpc.max_allowed_incoming_connections", 64),
    ("grpc.max_concurrent_streams", 16),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 60_000),
]


class _Threaded(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # untyped base
    """Answers checks from threads."""

    def __init__(self, health: HealthServicer) -> None:
        self._health = health

    def Check(self, request: Any, context: Any) -> Any:
        """Return the status of one service."""
        answer = self._health.check(request.service)
        if answer is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        context.set_trailing_metadata(self._health.metadata(answer))
        return answer

    def List(self, request: Any, context: Any) -> Any:
        """Return the status of all services."""
        return self._health.list()

    def Watch(self, request: Any, context: Any) -> Any:
        """Refuse a Watch, because each would occupy a thread."""
        context.abort(
            grpc.StatusCode.UNIMPLEMENTED,
            "this address answers Check and List; Watch is served at the server's other addresses",
        )


def make_health_server(health: HealthServicer) -> grpc.Server:
    """Make a server for health checks, not bound and not started yet."""
    server = grpc.server(started_pool(_THREADS, "headrace-health"), options=_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(_Threaded(health), server)
    return server
