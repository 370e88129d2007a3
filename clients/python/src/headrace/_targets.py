"""Locates servers: parses a client's target, and resolves names to addresses.

A target is an address (`host:port`, `unix:/path`), a name whose addresses are separate servers
(`dns:///host:port`), or several of these, as a list or as text separated by commas. A single
address is one server, and gRPC connects to it. Anything else is a fleet, and the client itself
chooses among its servers (`_fleet`).
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
        target: the target to pass to gRPC.
        server_name: the name in the server's certificate, if the address was resolved from a name.
            Empty if `target` contains the name.
    """

    target: str
    server_name: str = ""


@dataclass(frozen=True, slots=True)
class Name:
    """A name that resolves to one or more servers' addresses."""

    host: str
    port: int


Place: TypeAlias = Address | Name


def parse_targets(given: str | Sequence[str]) -> tuple[Place, ...]:
    """Parses a target into addresses and names, without duplicates.

    Raises:
        ValueError: a target is empty or a URL, or a name has no port.
    """
    texts = given.split(",") if isinstance(given, str) else list(given)
    if not texts:
        raise ValueError("the target is empty; use host:port, dns:///host:port or unix:/path")
    places = [_place(normalise_target(text)) for text in texts]
    return tuple(dict.fromkeys(places))


def resolve(name: Name) -> list[Address]:
    """Returns the current addresses of a name. Blocks as long as the system's resolver does.

    Raises:
        OSError: the name has no addresses, or the resolver cannot be reached.
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
    """Converts a target to gRPC's form: a path becomes `unix:`, and a missing port becomes 50051.

    Raises:
        ValueError: the target is a URL or empty.
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
    """Returns an address or a name as a user would write it."""
    return place.target if isinstance(place, Address) else f"dns:///{place.host}:{place.port}"


def _place(target: str) -> Place:
    if not target.startswith("dns:///"):
        return Address(target)
    host, _, port = target.removeprefix("dns:///").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{target!r}: a name and a port are needed, as in dns:///headrace:50051")
    return Name(host.strip("[]"), int(port))
