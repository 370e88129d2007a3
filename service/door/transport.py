"""The limits that gRPC itself enforces: on connections, the calls of each, and data that is
received before a call is read.

These limits are for untrusted clients. Known callers are refused by admission, with a reason and a
retry delay. gRPC closes, resets or delays calls without a reason.

A connection can hold the headers of its calls: 16 KiB each. Larger headers are refused once they
end; gRPC keeps headers that do not end, see docs/promises.md. A connection can also hold the first
bytes of the message of each call that is not read yet (`_UNREAD_BYTES`; HTTP/2's flow control keeps
the rest at the client). Calls of unknown callers are refused, which ends them.
"""

from __future__ import annotations

import logging

from service.door import open_files
from service.door.network_config import NetworkOptions

logger = logging.getLogger(__name__)

_READ_BEYOND = 512 << 10
_MIN_PENDING = 4096
_HEADER_BYTES = 16 << 10
_UNREAD_BYTES = 16 << 10
_HANDSHAKE_MS = 10_000


def most_received(config: NetworkOptions) -> int:
    """Return the largest message that gRPC accepts, in bytes. Messages slightly above the allowed
    size are read, so that they can be refused with details (`service.door.reading`). gRPC refuses
    much larger ones by their length.
    """
    return config.max_receive_bytes + _READ_BEYOND


def grpc_options(config: NetworkOptions, max_queue_size: int) -> list[tuple[str, int]]:
    """Return the options of a gRPC server."""
    pending = min(max(_MIN_PENDING, 2 * max_queue_size), 2**31 - 1)
    options = [
        ("grpc.max_receive_message_length", most_received(config)),
        ("grpc.max_send_message_length", config.max_send_bytes),
        # For each address; further connections are closed as soon as they are accepted.
        ("grpc.max_allowed_incoming_connections", _most_connections(config)),
        # For the TLS handshake and the HTTP/2 preface.
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        # Clients hold back further calls by themselves. The "protection" would also count calls
        # that have ended for the client but that Python has not released yet: at the limit it
        # resets up to a third of the calls of well-behaved clients.
        ("grpc.max_concurrent_streams", config.max_streams_per_connection),
        ("grpc.http.overload_protection", 0),
        # One limit: between a soft and a hard one gRPC refuses at random. It is no bound of what is
        # kept: of headers that go on in CONTINUATION frames gRPC keeps all, until they end.
        ("grpc.max_metadata_size", _HEADER_BYTES),
        ("grpc.absolute_max_metadata_size", _HEADER_BYTES),
        # How much a call may send before it is read. Once it is read, the window opens to the size
        # of a message. Without the probe, it does not grow to megabytes by itself.
        ("grpc.http2.lookahead_bytes", _UNREAD_BYTES),
        ("grpc.http2.bdp_probe", 0),
        # Off, so that a taken port is an error; otherwise two servers would silently share its
        # connections.
        ("grpc.so_reuseport", 0),
        # Clients may ping every 10 s (by default a server drops those that ping more than once in
        # 5 minutes, which ends long generations with "Too many pings"), also while they have no
        # RPC open.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Our own pings detect clients on dead machines; otherwise their requests would run to the
        # end for nobody.
        ("grpc.keepalive_time_ms", int(config.keepalive_interval_s * 1000)),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
        # Calls of a method that Python has not accepted yet; gRPC ends more with CANCELLED and no
        # details. So the limit is above what admission lets wait, so that admission refuses first.
        # Without a limit, untrusted clients that open calls faster than Python refuses them could
        # fill the memory (16 KiB each).
        ("grpc.server.max_pending_requests", pending),
        ("grpc.server.max_pending_requests_hard_limit", pending),
    ]
    # Off by default. Without a grace period, calls go on after the maximum age without limit; a
    # grace period would end long generations in the middle.
    if config.max_connection_age_s:
        options.append(("grpc.max_connection_age_ms", int(config.max_connection_age_s * 1000)))
    if config.max_connection_age_grace_s:
        grace_ms = int(config.max_connection_age_grace_s * 1000)
        options.append(("grpc.max_connection_age_grace_ms", grace_ms))
    return options


def _most_connections(config: NetworkOptions) -> int:
    """Return how many connections an address may have. The number of open files limits it, so that
    idle connections cannot use up the files needed for starting an engine's process.
    """
    wanted, addresses = config.max_connections, len(config.listen)
    most = max(1, min(wanted, (open_files.allowed() - open_files.RESERVED) // addresses))
    if most < wanted:
        logger.warning(
            "connections: at most %d on each address, not %d: at most %d files may be open",
            most,
            wanted,
            open_files.allowed(),
        )
    return most
