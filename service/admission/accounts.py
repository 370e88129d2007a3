"""The account that a call is charged to. It decides who shares service and limits with whom.

    callers' file ── identity ──────────────────────────────┐
                     └─ headrace-on-behalf-of: name ────────┼─▶ Account(key, group, weight)
    nobody is configured ── the peer's address, no port ────┘

A request belongs to its caller's identity, which may read it and end it. Its cost is charged to an
account. Accounts are finer than identities in two cases:

- Without a callers' file every caller is "anonymous". The account is then the client's IP address
  without the port, so opening more connections gains nothing. Behind the HTTP door it is the
  address of the door's client (`Authenticator.peer_of`). For IPv6 it is the /64 network, because a
  host can use any address in its network. All clients of a Unix socket have one account.
- A gateway calls on behalf of others. If its entry has `may_call_for_others`, it may name the user
  of each call. The key is then identity/name. Identities contain no slash, so a gateway cannot name
  another identity's account. All users of a gateway form one group, which shares the weight of its
  entry, so naming more of them gains nothing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

from engine.contract.types import CallerKey
from service.errors.call_errors import CallerNameError

ANONYMOUS = "anonymous"
"""The identity of every caller if no callers are configured."""
ON_BEHALF_OF = "headrace-on-behalf-of"
"""The metadata key in which a gateway names the user it calls for."""
MAX_NAME = 64
USUAL_WEIGHT = 1.0
MAX_REMEMBERED = 4096
"""The number of accounts that are cached, so that not every call creates a new one."""

_NAME = re.compile(rf"[A-Za-z0-9._@-]{{1,{MAX_NAME}}}")
_MAX_ADDRESS = 128
_IPV6_HOST_BITS = 64

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Account:
    """The account that a request or other use is charged to.

    Attributes:
        identity: the owner of the requests.
        key: identifies the account for scheduling and limits.
        group: the accounts of one group share its weight.
        weight: the group's weight relative to others, usually 1.
    """

    identity: str
    key: CallerKey
    group: str
    weight: float = USUAL_WEIGHT


@lru_cache(MAX_REMEMBERED)
def account_of(identity: str, name: str | None = None, weight: float = USUAL_WEIGHT) -> Account:
    """Return the account of an identity from the callers' file, or of a user it calls for."""
    key = identity if name is None else f"{identity}/{name}"
    return Account(identity, CallerKey(key), identity, weight)


@lru_cache(MAX_REMEMBERED)
def account_at(identity: str, peer: str) -> Account:
    """Return the account of a caller known only by its address. `peer`: in gRPC's format."""
    origin = origin_of(peer)
    return Account(identity, CallerKey(origin), origin)


def origin_of(peer: str) -> str:
    """Return the host that a connection comes from. All peers without an IP address (on a Unix
    socket) count as one host.
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
    if address.is_link_local:  # all addresses of a link are in one /64
        return f"{address}%{zone}"[:_MAX_ADDRESS]
    if address.is_loopback:
        return str(address)
    network = int(address) >> _IPV6_HOST_BITS << _IPV6_HOST_BITS
    return f"{ipaddress.IPv6Address(network)}/{128 - _IPV6_HOST_BITS}"


def name_in(metadata: Metadata) -> str | None:
    """Return the user named in the call's metadata, or None if it names nobody.

    Raises:
        CallerNameError: the name is malformed.
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
