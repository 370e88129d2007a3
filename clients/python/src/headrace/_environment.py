"""Client settings from environment variables: targets, proxies, and gRPC's fork support."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # in gRPC's order


def target() -> str | None:
    """The servers' addresses to use when the caller gives none."""
    return os.environ.get("HEADRACE_TARGET") or None


def proxy() -> str:
    """A description of the proxy that gRPC would use; empty if there is none."""
    name = next((name for name in _PROXIES if os.environ.get(name)), "")
    if not name:
        return ""
    host = urlsplit(os.environ[name]).netloc.rpartition("@")[2]  # without a password
    return f"the environment's {name} names the proxy {host or os.environ[name]}"


def fork_support() -> bool | None:
    """Whether gRPC's fork support is enabled by the environment.

    None if the variable is unset or has an unknown value. In that case gRPC's core supports forks
    and its Python layer does not.
    """
    said = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower()
    return {"0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}.get(said)
