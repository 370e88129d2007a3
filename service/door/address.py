"""Where the server listens: TCP or Unix sockets."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from dataclasses import dataclass
from urllib.parse import quote

from engine.contract.errors import ConfigError

_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class Address:
    """An address to listen on: the `path` of a Unix socket, or host and port."""

    host: str = ""
    port: int = 0
    path: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def reached(self) -> Address:
        """The address at which a client on this machine reaches it."""
        return dataclasses.replace(self, host=_ANY_HOST.get(self.host, self.host))

    @property
    def target(self) -> str:
        """The address as a gRPC target, for servers and clients. A path becomes part of a `unix:`
        URI, so characters that are special in URIs are escaped.
        """
        if self.path is not None:
            return f"unix:{quote(os.fsencode(self.path))}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, option: str = "listen") -> Address:
    """Parse an address.

    Raises:
        ConfigError: the text is not an address. The error names `option`.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if path.startswith("//"):
            path = path[2:]
        # The kernel's sockaddr_un has room for 107 bytes of path.
        if not path or "\0" in path or len(os.fsencode(path)) > 107:
            raise ConfigError(
                option, f"{text!r} is not a path of 1 to 107 bytes, as in unix:/run/headrace.sock"
            )
        return Address(path=path)
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if (
        not colon
        or not host
        or (":" in host) != bracketed
        or not (port.isascii() and port.isdigit())
    ):
        raise ConfigError(
            option, f"{text!r} is not an address; write host:port, [IPv6]:port or unix:/path"
        )
    if int(port) > 65535:
        raise ConfigError(option, f"{text!r} has the port {port}; ports go up to 65535")
    return Address(host=host, port=int(port))
