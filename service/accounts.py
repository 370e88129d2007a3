"""For whom a call counts: who shares service and room with whom.

    callers' file ── identity ──────────────────────────────┐
                     └─ headrace-on-behalf-of: name ────────┼─▶ Account(key, group, weight)
    nobody is configured ── the peer's address, no port ────┘

A request belongs to its caller's identity: who holds that may read it and end it. What it costs is
counted for an account, and these are finer than identities in two cases:

- Without a callers' file everybody is "anonymous". Then the address counts that the connection
  comes from, without its port, so that more connections gain nothing; of IPv6 the /64 that it is
  in, since every host has such a network, with as many addresses as it likes. All who use a Unix
  socket are one.
- A gateway calls for many. If its entry says `may_call_for_others`, it may name in each call for
  whom that is. The key is then identity/name, and no identity has a slash: nobody can be named into
  another identity's account. All whom a gateway names are one group: they share the weight of its
  entry, so that to name more of them gains it nothing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

from engine.errors import HeadraceError
from engine.types import CallerKey

ON_BEHALF_OF = "headrace-on-behalf-of"
"""The metadata in which a gateway names for whom it calls."""
MAX_NAME = 64
USUAL_WEIGHT = 1.0
MAX_REMEMBERED = 4096
"""How many accounts are remembered, so that they are not made for each call."""

_NAME = re.compile(rf"[A-Za-z0-9._@-]{{1,{MAX_NAME}}}")
_MAX_ADDRESS = 128
_IPV6_HOST_BITS = 64

Metadata = Iterable[tuple[str, str | bytes]]


class CallerNameError(HeadraceError):
    """The name of whom a gateway calls for is none."""


@dataclass(frozen=True, slots=True)
class Account:
    """For whom something is counted.

    Attributes:
        identity: whose requests are.
        key: for whom service and room are counted.
        group: the accounts of one group share its weight.
        weight: of the group: how much it is due beside others, where most have 1.
    """

    identity: str
    key: CallerKey
    group: str
    weight: float = USUAL_WEIGHT


@lru_cache(MAX_REMEMBERED)
def account_of(identity: str, name: str | None = None, weight: float = USUAL_WEIGHT) -> Account:
    """The account of an identity that the callers' file has, or of whom it calls for."""
    key = identity if name is None else f"{identity}/{name}"
    return Account(identity, CallerKey(key), identity, weight)


@lru_cache(MAX_REMEMBERED)
def account_at(identity: str, peer: str) -> Account:
    """The account of somebody who is known by their address alone; `peer` as gRPC gives it."""
    origin = origin_of(peer)
    return Account(identity, CallerKey(origin), origin)


def origin_of(peer: str) -> str:
    """Where a connection comes from, without what its other connections differ in. A peer without
    an IP address (a Unix socket) is one with all others of its kind.
    """
    scheme, _, rest = peer.partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return scheme[:_MAX_ADDRESS] or "unknown"
    host, _, _ = unquote(rest).rpartition(":")
    host, _, zone = host.removeprefix("[").removesuffix("]").partition("%")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return scheme
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    if address.is_link_local:  # all of a link are in one /64
        return f"{address}%{zone}"[:_MAX_ADDRESS]
    if address.is_loopback:
        return str(address)
    network = int(address) >> _IPV6_HOST_BITS << _IPV6_HOST_BITS
    return f"{ipaddress.IPv6Address(network)}/{128 - _IPV6_HOST_BITS}"


def name_in(metadata: Metadata) -> str | None:
    """For whom the call's metadata say that it is; None: they say nothing.

    Raises:
        CallerNameError: what they say is no name.
    """
    given = [value for key, value in metadata if key == ON_BEHALF_OF]
    if not given:
        return None
    [name, *others] = given
    if others or not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise CallerNameError(
            f"{ON_BEHALF_OF} must be given once, as 1 to {MAX_NAME} characters out of "
            "[A-Za-z0-9._@-]; send a hash of a longer name"
        )
    return name
