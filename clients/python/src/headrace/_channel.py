"""How a channel to a server is set up: target, encryption, credentials, keepalive, sizes and
retries.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import grpc

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_PORT = 50051
DEFAULT_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
DEFAULT_KEEPALIVE = 45.0

LoadBalancing = Literal["pick_first", "round_robin"]
MetadataLike = Mapping[str, str | bytes] | Iterable[tuple[str, str | bytes]]

try:
    CLIENT_VERSION = version("headrace")
except PackageNotFoundError:  # a source tree that was never installed
    CLIENT_VERSION = "0"


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """All settings of a channel; the same for the sync and the asyncio client."""

    target: str
    credentials: grpc.ChannelCredentials | None
    """None: plaintext."""
    options: tuple[tuple[str, Any], ...]
    metadata: tuple[tuple[str, str | bytes], ...] = field(repr=False)
    """Sent with every call; contains the token."""


def make_settings(
    target: str | None,
    *,
    tls: bool | None,
    ca: str | os.PathLike[str] | bytes | None,
    client_cert: str | os.PathLike[str] | bytes | None,
    client_key: str | os.PathLike[str] | bytes | None,
    server_name: str | None,
    token: str | None,
    metadata: MetadataLike | None,
    keepalive: float | None,
    max_message_bytes: int,
    retries: int,
    load_balancing: LoadBalancing,
    channel_options: Sequence[tuple[str, Any]],
) -> ChannelSettings:
    """Checks the client's arguments and converts them to the channel's settings.

    Raises:
        ValueError: arguments contradict each other, or the target is not understood.
        OSError: a certificate file cannot be read.
    """
    target = normalise_target(target or os.environ.get("HEADRACE_TARGET") or DEFAULT_TARGET)
    wants_tls = bool(ca or client_cert or client_key)
    if tls is False and wants_tls:
        raise ValueError("certificates were given, and tls=False")
    credentials = None
    if tls or wants_tls:
        if bool(client_cert) != bool(client_key):
            raise ValueError("client_cert and client_key go together")
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_pem(ca),
            private_key=_pem(client_key),
            certificate_chain=_pem(client_cert),
        )
    if token and credentials is None and tls is None and not is_local(target):
        raise ValueError(
            f"the token would travel to {target} in clear text: pass tls=True, "
            "or tls=False to accept that"
        )
    items = metadata.items() if isinstance(metadata, Mapping) else (metadata or ())
    sent = [(key.lower(), value) for key, value in items]
    if token:
        sent.append(("authorization", f"Bearer {token}"))
    options = _options(keepalive, max_message_bytes, retries, load_balancing, server_name)
    return ChannelSettings(target, credentials, (*options, *channel_options), tuple(sent))


def normalise_target(target: str) -> str:
    """The target in gRPC's form: a path becomes `unix:`, and a missing port 50051.

    Raises:
        ValueError: it is a URL, or empty.
    """
    target = target.strip()
    if not target:
        raise ValueError("the target is empty; use host:port, dns:///host:port or unix:/path")
    if target.startswith(("http://", "https://", "grpc://", "grpcs://")):
        raise ValueError(
            f"{target!r} is a URL; use host:port, dns:///host:port or unix:/path, "
            "and ask for TLS if the server is encrypted"
        )
    if target.startswith(("/", "./")):
        return f"unix:{target}"
    if re.match(r"^(unix|unix-abstract|ipv4|ipv6|vsock|xds):", target):
        return target
    scheme, name = ("dns:///", target[7:]) if target.startswith("dns:///") else ("", target)
    if target.startswith("dns:") and not scheme:
        return target
    host_only = re.fullmatch(r"[^:\[\]]+|\[[0-9A-Fa-f:.%]+\]", name)
    return f"{scheme}{name}:{DEFAULT_PORT}" if host_only else target


def is_local(target: str) -> bool:
    """Whether a target is on this machine: a Unix socket or a loopback address."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    host = re.sub(r"^(dns:///|ipv[46]:)", "", target).rsplit(":", 1)[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _pem(source: str | os.PathLike[str] | bytes | None) -> bytes | None:
    return source if source is None or isinstance(source, bytes) else Path(source).read_bytes()


def _options(
    keepalive: float | None,
    max_message_bytes: int,
    retries: int,
    load_balancing: LoadBalancing,
    server_name: str | None,
) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.primary_user_agent", f"headrace-python/{CLIENT_VERSION}"),
        ("grpc.service_config", json.dumps(service_config(retries, load_balancing))),
        # A server that restarts is found again within seconds, not within gRPC's two minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5_000),
    ]
    if keepalive:
        options += [
            ("grpc.keepalive_time_ms", int(keepalive * 1000)),
            ("grpc.keepalive_timeout_ms", 20_000),
            # 0: a long quiet prefill is no reason to stop asking whether the server is there.
            ("grpc.http2.max_pings_without_data", 0),
        ]
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return options


def service_config(retries: int, load_balancing: LoadBalancing) -> dict[str, Any]:
    """The retry policy: unary calls only, and none of them after an answer has begun.

    AddRequest and Generate have an id, by which the server knows a call that comes again: it gets
    the first one's answer. Streams are not retried: only the caller knows what their requests did
    before the loss.
    """
    config: dict[str, Any] = {"loadBalancingConfig": [{load_balancing: {}}]}
    if retries > 0:
        unary = ("AddRequest", "Cancel", "Generate", "GetResult")
        config["methodConfig"] = [
            {
                "name": [
                    *({"service": "headrace.v1.GenerationService", "method": m} for m in unary),
                    {"service": "headrace.v1.ModelService"},
                ],
                "retryPolicy": {
                    "maxAttempts": min(retries + 1, 5),  # gRPC caps it at 5
                    "initialBackoff": "0.1s",
                    "maxBackoff": "2s",
                    "backoffMultiplier": 3,
                    "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
                },
            }
        ]
    return config
