"""What the client takes from the environment: its targets, proxies, and gRPC's support of forks."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # in gRPC's order


def target() -> str | None:
    """The servers' addresses, where the caller gives none."""
    return os.environ.get("HEADRACE_TARGET") or None


def proxy() -> str:
    """The proxy that gRPC would use, in words; empty: none."""
    name = next((name for name in _PROXIES if os.environ.get(name)), "")
    if not name:
        return ""
    host = urlsplit(os.environ[name]).netloc.rpartition("@")[2]  # without a password
    return f"the environment's {name} names the proxy {host or os.environ[name]}"


def fork_support() -> bool | None:
    """Whether gRPC was told to support forks; None: neither way, or in a way that it does not
    know, so that its core does and its Python layer does not.
    """
    said = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower()
    return {"0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}.get(said)
