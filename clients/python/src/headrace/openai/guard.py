"""Decides which requests are let in, before a body is read.

Every page in the user's browser can reach a port on a loopback address: through a host name of its
own that resolves to it (DNS rebinding), or with requests that browsers send without asking.
Therefore, a Host must be an address, localhost or a configured name, and an Origin must be
configured. A body must be declared as JSON, which no page may send to another site without a
preflight. A token in the URL is refused, because it would be logged all along the way.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import parse_qsl

from starlette.requests import Request

from headrace.openai.callers import Caller
from headrace.openai.errors import ApiError

_SECRET_NAMES = {"api_key", "api-key", "apikey", "key", "token", "access_token", "authorization"}
_MAX_AUTHORIZATION = 8 << 10


class Guard:
    """The rules for which requests are let in.

    Args:
        hosts: names allowed as Host in addition to addresses and localhost; "*" for any.
        origins: origins whose pages may send requests; "*" for any.
    """

    def __init__(self, hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._hosts = {host.lower() for host in hosts}
        self._origins = set(origins)

    def check(self, request: Request) -> None:
        """Raises ApiError if the request is not let in."""
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or not self._is_known(hosts[0]):
            raise ApiError(
                421,
                "the Host of the request is no address, not localhost, and no name that the "
                "operator gave (--openai-host)",
                code="host_not_allowed",
            )
        origin = request.headers.get("origin")
        if origin is not None and not self.allows(origin):
            raise ApiError(
                403,
                "pages of this Origin may not ask here; the operator can allow it "
                "(--openai-origin)",
                type="permission_error",
                code="origin_not_allowed",
            )
        query = request.scope["query_string"].decode("latin-1")
        for name, _ in parse_qsl(query, keep_blank_values=True):
            if name.lower() in _SECRET_NAMES:
                raise ApiError(
                    400,
                    "a token does not belong in the address, which is written to logs; send it as "
                    "'Authorization: Bearer …', and take a new one if this one is in use",
                    code="token_in_url",
                )

    def allows(self, origin: str | None) -> bool:
        """Whether pages of an origin may send requests."""
        return origin is not None and (origin in self._origins or "*" in self._origins)

    def cors(self, request: Request) -> list[tuple[bytes, bytes]]:
        """Returns the CORS headers of an answer."""
        origin = request.headers.get("origin")
        if origin is None or not self.allows(origin):
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
            (b"vary", b"origin"),
        ]

    def preflight(self, request: Request) -> dict[str, str] | None:
        """Returns the headers that answer a CORS preflight request; None if the request is not
        one.
        """
        if request.method != "OPTIONS" or not self.allows(request.headers.get("origin")):
            return None
        return {
            "access-control-allow-methods": "GET, POST",
            "access-control-allow-headers": request.headers.get(
                "access-control-request-headers", "authorization, content-type"
            ),
            "access-control-max-age": "600",
        }

    def caller(self, request: Request) -> Caller:
        """Returns the caller's identity.

        Raises:
            ApiError: the Authorization header cannot be forwarded.
        """
        given = request.headers.getlist("authorization")
        if len(given) > 1 or (given and not _is_plain(given[0])):
            raise ApiError(
                401,
                "Authorization must come once, with printable ASCII of at most 8 KiB",
                type="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        peer = request.client.host if request.client else ""
        return Caller(given[0] if given else None, peer or "unix")

    def _is_known(self, host: str) -> bool:
        name = host.lower().rpartition(":")[0] if _has_port(host) else host.lower()
        if name in self._hosts or "*" in self._hosts or name.rstrip(".") == "localhost":
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


def _has_port(host: str) -> bool:
    before, colon, port = host.rpartition(":")
    return bool(colon) and port.isdigit() and (":" not in before or before.endswith("]"))


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and len(text) <= _MAX_AUTHORIZATION
