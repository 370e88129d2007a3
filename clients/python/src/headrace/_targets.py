"""Where the servers are: what a client's target names, and the addresses that a name has now.

A target is an address (`host:port`, `unix:/path`), a name whose addresses are servers of their own
(`dns:///host:port`), or several of these: a list, or one text with commas. One address is one
server, and gRPC connects to it; everything else is a fleet, whose servers the client chooses among
itself (`_fleet`).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_PORT = 50051


@dataclass(frozen=True, slots=True)
class Address:
    """One server's address.

    Attributes:
        target: as gRPC takes it.
        server_name: the name that its certificate has, where the address is what a name resolved
            to; empty: the target says it.
    """

    target: str
    server_name: str = ""


@dataclass(frozen=True, slots=True)
class Name:
    """A name each of whose addresses is a server."""

    host: str
    port: int


Place: TypeAlias = Address | Name


def parse_targets(given: str | Sequence[str]) -> tuple[Place, ...]:
    """What a target names, each place once.

    Raises:
        ValueError: it is a URL, or empty.
    """
    texts = given.split(",") if isinstance(given, str) else list(given)
    if not texts:
        raise ValueError("the target is empty; use host:port, dns:///host:port or unix:/path")
    places = [_place(normalise_target(text)) for text in texts]
    return tuple(dict.fromkeys(places))


def resolve(name: Name) -> list[Address]:
    """The addresses that a name has now; blocks as long as the system's resolver does.

    Raises:
        OSError: it has none, or the resolver cannot be asked.
    """
    found = socket.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    addresses = []
    for family, _, _, _, where in found:
        host = str(where[0])
        if family == socket.AF_INET6:
            addresses.append(Address(f"ipv6:[{host}]:{name.port}", name.host))
        elif family == socket.AF_INET:
            addresses.append(Address(f"ipv4:{host}:{name.port}", name.host))
    return list(dict.fromkeys(addresses))


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


def text_of(place: Place) -> str:
    """A place as a user writes it."""
    return place.target if isinstance(place, Address) else f"dns:///{place.host}:{place.port}"


def _place(target: str) -> Place:
    if not target.startswith("dns:///"):
        return Address(target)
    host, _, port = target.removeprefix("dns:///").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{target!r}: a name and a port are needed, as in dns:///headrace:50051")
    return Name(host.strip("[]"), int(port))
