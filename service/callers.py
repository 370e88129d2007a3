"""The callers' file: who may call, how they are known, and what they may call.

    [[callers]]
    identity = "search"
    token_sha256 = "…64 hexadecimal digits…"     # or several: token_sha256 = ["…", "…"]
    services = ["GenerationService", "ModelService"]

    [[callers]]
    identity = "operators"
    certificate = "ops.example.internal"          # a common name or alternative name, with mTLS
    services = ["*"]

Only digests of tokens are kept. Tokens are random (`headrace-server token` makes them), so a plain
SHA-256 cannot be turned back, and needs no salt. An identity may have several entries: a second
token with fewer services, for example. They share their requests.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError

ANONYMOUS = "anonymous"
"""The identity of every caller where no callers are configured."""
EVERYTHING = "*"
"""Stands for all services."""
SERVICES = {
    "headrace.v1.GenerationService": "GenerationService",
    "headrace.v1.ModelService": "ModelService",
    "headrace.v1.ControlService": "ControlService",
    "grpc.reflection.v1.ServerReflection": "ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection": "ServerReflection",
}
"""How the file calls the services that can be granted. Health is everybody's."""
MAX_TOKENS = 1024
"""Every call is compared with all tokens, so there is a bound."""

_IDENTITY = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_NO_TOKEN = hashlib.sha256(b"").digest()
_KEYS = frozenset({"identity", "token_sha256", "certificate", "services"})


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who may call.

    Attributes:
        identity: whose requests theirs are.
        services: the services that they may call, as the file names them; "*": all.
    """

    identity: str
    services: frozenset[str]

    def may_call(self, method: str) -> bool:
        """Whether they may call a method, given as /package.Service/Method."""
        service = SERVICES.get(method.removeprefix("/").rpartition("/")[0])
        return EVERYTHING in self.services or service in self.services


EVERYONE = Caller(ANONYMOUS, frozenset({EVERYTHING}))


@dataclass(frozen=True, slots=True)
class CallerTable:
    """Who may call, as one version of the file says. `tokens`: by the token's SHA-256."""

    tokens: tuple[tuple[bytes, Caller], ...]
    certificates: Mapping[str, Caller]

    def by_digest(self, digest: bytes) -> Caller | None:
        """The caller whose token has this SHA-256. Takes equally long whoever it is, and if it is
        nobody.
        """
        found: Caller | None = None
        for known, caller in self.tokens:
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def by_names(self, names: Iterable[str]) -> frozenset[Caller]:
        """The callers to whom a certificate with these names belongs, one for each identity: names
        in several entries of one identity may call what any of these entries grants.
        """
        granted: dict[str, frozenset[str]] = {}
        for name in names:
            caller = self.certificates.get(name)
            if caller is not None:
                before = granted.get(caller.identity, frozenset())
                granted[caller.identity] = before | caller.services
        return frozenset(Caller(identity, services) for identity, services in granted.items())


def parse_callers(text: str) -> CallerTable:
    """Read the file's text.

    Raises:
        ConfigError: it is not TOML, or an entry is wrong; names the entry, and repeats no secret.
    """
    try:
        content = tomllib.loads(text)
    except ValueError as error:  # not TOMLDecodeError alone: numbers may be too long for Python
        raise ConfigError("auth_file", f"is not TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError("auth_file", "has lists or tables that are nested too deeply") from error
    entries = content.get("callers")
    if set(content) != {"callers"} or not isinstance(entries, list):
        raise ConfigError("auth_file", "must have [[callers]] entries, and nothing else")
    tokens: dict[bytes, Caller] = {}
    certificates: dict[str, Caller] = {}
    for index, entry in enumerate(entries):
        where = f"callers[{index}]"
        caller, digests, names = _entry(entry, where)
        for digest in digests:
            if digest in tokens:
                raise ConfigError("auth_file", f"{where}: a token is there twice")
            tokens[digest] = caller
        for name in names:
            if name in certificates:
                raise ConfigError("auth_file", f"{where}: certificate {name!r} is there twice")
            certificates[name] = caller
    if len(tokens) > MAX_TOKENS:
        raise ConfigError("auth_file", f"has {len(tokens)} tokens; at most {MAX_TOKENS} can be")
    return CallerTable(tuple(tokens.items()), certificates)


def _entry(entry: Any, where: str) -> tuple[Caller, list[bytes], list[str]]:
    if not isinstance(entry, dict):
        raise ConfigError("auth_file", f"{where} is no table; write [[callers]]")
    if unknown := sorted(set(entry) - _KEYS):
        raise ConfigError(
            "auth_file",
            f"{where} has unknown keys: {', '.join(unknown)}; known are {', '.join(sorted(_KEYS))}",
        )
    identity = entry.get("identity")
    if not isinstance(identity, str) or not _IDENTITY.fullmatch(identity):
        raise ConfigError(
            "auth_file", f"{where}.identity must be 1 to 64 characters out of [A-Za-z0-9._-]"
        )
    if identity == ANONYMOUS:
        raise ConfigError("auth_file", f"{where}.identity: {ANONYMOUS!r} is taken, choose another")
    services = _strings(entry.get("services", []), f"{where}.services")
    if not services or set(services) - {EVERYTHING, *SERVICES.values()}:
        known = ", ".join(dict.fromkeys(SERVICES.values()))
        raise ConfigError("auth_file", f'{where}.services must name some of {known}, or be "*"')
    digests = _digests(entry, where)
    names = _strings(entry.get("certificate", []), f"{where}.certificate")
    if not all(names):
        raise ConfigError("auth_file", f"{where}.certificate must not be empty")
    if not digests and not names:
        raise ConfigError("auth_file", f"{where} needs token_sha256 or certificate")
    return Caller(identity, frozenset(services)), digests, names


def _digests(entry: dict[str, Any], where: str) -> list[bytes]:
    texts = _strings(entry.get("token_sha256", []), f"{where}.token_sha256")
    if not all(_DIGEST.fullmatch(text) for text in texts):
        raise ConfigError(
            "auth_file", f"{where}.token_sha256 must be the 64 hexadecimal digits of a SHA-256"
        )
    digests = [bytes.fromhex(text) for text in texts]
    if _NO_TOKEN in digests:
        raise ConfigError("auth_file", f"{where}.token_sha256 is the digest of an empty token")
    return digests


def _strings(value: Any, where: str) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(entry, str) for entry in values):
        raise ConfigError("auth_file", f"{where} must be a string or a list of strings")
    return values
