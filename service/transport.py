"""What gRPC itself bounds: connections, the calls of each, what is read before anybody asks for it.

All of it is there for strangers. A caller who is known is answered by admission, with a reason and
a time; gRPC closes, resets or keeps waiting, without a word.

What a connection may hold, at most: the headers of its calls (16 KiB each, refused beyond), and
for each call that nobody reads from the first bytes of its message (`_UNREAD_BYTES`; HTTP/2's flow
control keeps the rest at the client). Calls are refused, and so ended, where their caller is not
known.
"""

from __future__ import annotations

import logging

from service import open_files
from service.config import ServiceConfig

logger = logging.getLogger(__name__)

_READ_BEYOND = 512 << 10
_MIN_PENDING = 4096
_HEADER_BYTES = 16 << 10
_UNREAD_BYTES = 16 << 10
_HANDSHAKE_MS = 10_000


def most_received(config: ServiceConfig) -> int:
    """The largest message that gRPC takes in, in bytes. What is a little larger than allowed is
    read, so that it can be refused with details (`service.reading`); what is far too large
    gRPC refuses by its length.
    """
    return config.max_receive_bytes + _READ_BEYOND


def grpc_options(config: ServiceConfig) -> list[tuple[str, int]]:
    """The options of a gRPC server."""
    pending = min(max(_MIN_PENDING, 2 * config.max_queue_size), 2**31 - 1)
    options = [
        ("grpc.max_receive_message_length", most_received(config)),
        ("grpc.max_send_message_length", config.max_send_bytes),
        # Of each address: one more is closed as soon as it is accepted.
        ("grpc.max_allowed_incoming_connections", _most_connections(config)),
        # TLS's handshake, and HTTP/2's first words.
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        # Clients wait by themselves with further calls. The "protection" would also count calls
        # that have ended for clients and that Python has not let go yet: at the limit it resets up
        # to a third of the calls of clients who keep to it.
        ("grpc.max_concurrent_streams", config.max_streams_per_connection),
        ("grpc.http.overload_protection", 0),
        # One bound: between two of them gRPC would refuse at random.
        ("grpc.max_metadata_size", _HEADER_BYTES),
        ("grpc.absolute_max_metadata_size", _HEADER_BYTES),
        # What a call may send before it is read. The window opens to the size of a message once it
        # is read; without the probe it does not grow by itself, to megabytes.
        ("grpc.http2.lookahead_bytes", _UNREAD_BYTES),
        ("grpc.http2.bdp_probe", 0),
        # Off: two servers on one port would share its connections silently; a taken port is an
        # error instead.
        ("grpc.so_reuseport", 0),
        # Clients may ping every 10 s (by default a server drops those that ping more than once in
        # 5 minutes, which ends long generations with "Too many pings"), also while they have no
        # RPC open.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Our own pings find clients whose machine is gone: their requests would run to the end for
        # nobody.
        ("grpc.keepalive_time_ms", int(config.keepalive_interval_s * 1000)),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
        # Calls of a method that Python has not taken yet; more are ended with a bare CANCELLED. So
        # it lies above what admission lets wait, for admission to refuse; without any, strangers
        # who open calls faster than Python refuses them fill the memory (16 KiB each).
        ("grpc.server.max_pending_requests", pending),
        ("grpc.server.max_pending_requests_hard_limit", pending),
    ]
    # Off by default. Calls go on after the age without limit, unless a grace is given: it would
    # end long generations in the middle.
    if config.max_connection_age_s:
        options.append(("grpc.max_connection_age_ms", int(config.max_connection_age_s * 1000)))
    if config.max_connection_age_grace_s:
        grace_ms = int(config.max_connection_age_grace_s * 1000)
        options.append(("grpc.max_connection_age_grace_ms", grace_ms))
    return options


def _most_connections(config: ServiceConfig) -> int:
    """How many connections an address may have: no more than there may be open files for, so that
    those who only connect leave some to start an engine's process with.
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
