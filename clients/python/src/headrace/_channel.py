"""Channel settings: targets, encryption, credentials, keepalive, message sizes and retries."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import grpc

from headrace import _environment, _forks
from headrace._targets import DEFAULT_TARGET, Address, Place, is_local, parse_targets, text_of
from headrace._token import TokenFile
from headrace.errors import Peer

DEFAULT_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
DEFAULT_KEEPALIVE = 45.0

LoadBalancing = Literal["least_loaded", "pick_first", "round_robin"]
_PROXY_OPTION = "grpc.enable_http_proxy"
_NAME_OPTION = "grpc.ssl_target_name_override"
MetadataLike = Mapping[str, str | bytes] | Iterable[tuple[str, str | bytes]]

try:
    CLIENT_VERSION = version("headrace")
except PackageNotFoundError:  # a source tree that was never installed
    CLIENT_VERSION = "0"


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """All settings of a client's channels, for both the sync and the asyncio client."""

    target: str
    """The target, for use in messages. With one server, it is also the target passed to gRPC."""
    places: tuple[Place, ...]
    """The servers' locations, if the client resolves them itself. If empty, gRPC resolves `target`,
    on one channel.
    """
    credentials: grpc.ChannelCredentials | None
    """None for plaintext."""
    options: tuple[tuple[str, Any], ...]
    fixed_metadata: tuple[tuple[str, str | bytes], ...] = field(repr=False)
    """Metadata sent with every call. Contains the token, unless the token is read from a file."""
    retries: int = 0
    """How often a unary call may be retried, where the client itself retries."""
    token_file: TokenFile | None = None
    has_certificate: bool = False
    proxy: str = ""
    """A description of the proxy named by the environment, for messages; empty if there is none."""

    @property
    def metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """The metadata for a call made now.

        Raises:
            InvalidArgumentError: the token file cannot be read.
        """
        if self.token_file is None:
            return self.fixed_metadata
        return (*self.fixed_metadata, ("authorization", f"Bearer {self.token_file.read()}"))

    def peer(self, target: str) -> Peer:
        """Returns a description of a server for messages."""
        return Peer(
            target,
            "" if is_local(target) else self.proxy,
            self.credentials is not None,
            self.has_certificate,
        )

    def options_for(self, address: Address) -> list[tuple[str, Any]]:
        """Returns the options of the channel to one server."""
        options = list(self.options)
        named = {name for name, _ in options}
        if is_local(address.target) and _PROXY_OPTION not in named:
            options.append((_PROXY_OPTION, 0))  # no proxy leads to this machine
        if _forks.generation():  # channels of equal options share connections: not with a parent
            options.append(("headrace.generation", _forks.generation()))
        if address.server_name:
            options.append(("grpc.default_authority", address.server_name))
            if self.credentials is not None and _NAME_OPTION not in named:
                options.append((_NAME_OPTION, address.server_name))
        return options


def make_settings(
    target: str | Sequence[str] | None,
    *,
    tls: bool | None,
    ca: str | os.PathLike[str] | bytes | None,
    client_cert: str | os.PathLike[str] | bytes | None,
    client_key: str | os.PathLike[str] | bytes | None,
    server_name: str | None,
    token: str | None,
    token_file: str | os.PathLike[str] | None,
    metadata: MetadataLike | None,
    keepalive: float | None,
    max_message_bytes: int,
    retries: int,
    load_balancing: LoadBalancing,
    channel_options: Sequence[tuple[str, Any]],
) -> ChannelSettings:
    """Checks the client's arguments and converts them to channel settings.

    Raises:
        ValueError: arguments contradict each other, or the target cannot be parsed.
        OSError: a certificate file cannot be read.
    """
    places = parse_targets(target or _environment.target() or DEFAULT_TARGET)
    is_one = len(places) == 1 and isinstance(places[0], Address)
    if load_balancing != "least_loaded" and len(places) > 1:
        raise ValueError(f"load_balancing={load_balancing!r} is gRPC's own, and takes one target")
    chooses = load_balancing == "least_loaded" and not is_one
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
    shown = ",".join(text_of(place) for place in places)
    is_here = all(is_local(text_of(place)) for place in places)
    if token and token_file:
        raise ValueError("token and token_file exclude each other")
    if (token or token_file) and credentials is None and tls is None and not is_here:
        raise ValueError(
            f"the token would travel to {shown} in clear text: pass tls=True, "
            "or tls=False to accept that"
        )
    items = metadata.items() if isinstance(metadata, Mapping) else (metadata or ())
    sent = [(key.lower(), value) for key, value in items]
    if token:
        sent.append(("authorization", f"Bearer {token}"))
    options = _options(keepalive, max_message_bytes)
    options.append(
        (
            "grpc.service_config",
            json.dumps(service_config(0 if chooses else retries, load_balancing)),
        )
    )
    if server_name:
        options.append((_NAME_OPTION, server_name))
    return ChannelSettings(
        shown,
        places if chooses else (),
        credentials,
        (*options, *channel_options),
        tuple(sent),
        retries,
        TokenFile(token_file) if token_file else None,
        bool(client_cert),
        _environment.proxy(),
    )


def _pem(source: str | os.PathLike[str] | bytes | None) -> bytes | None:
    return source if source is None or isinstance(source, bytes) else Path(source).read_bytes()


def _options(keepalive: float | None, max_message_bytes: int) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.primary_user_agent", f"headrace-python/{CLIENT_VERSION}"),
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
    return options


def service_config(retries: int, load_balancing: LoadBalancing) -> dict[str, Any]:
    """Returns the retry policy: only unary calls are retried, and only before an answer has begun.

    AddRequest and Generate carry an id, so the server recognizes a repeated call and gives it the
    answer to the first one. Streams are not retried: only the caller knows what their requests did
    before the connection was lost.
    """
    policy = "pick_first" if load_balancing == "least_loaded" else load_balancing
    config: dict[str, Any] = {"loadBalancingConfig": [{policy: {}}]}
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
