"""Who calls, and what they may call.

    metadata `authorization: Bearer …` ─┐
    certificate of the client (mTLS) ───┴─▶ Authenticator ─▶ Caller(identity, services) ─▶ allowed?

Callers stand in a TOML file:

    [[callers]]
    identity = "search"
    token_sha256 = "…64 hexadecimal digits…"     # or several: token_sha256 = ["…", "…"]
    services = ["GenerationService", "ModelService"]

    [[callers]]
    identity = "operators"
    certificate = "ops.example.internal"          # a common name or alternative name, with mTLS
    services = ["*"]

Only digests of tokens are kept, and all of them are compared in constant time. The file is read
again when it changes; a file that cannot be used leaves the last good one in force. Without a file
everyone is "anonymous" and may call everything; with one, nobody may call anything that the file
does not grant, health checks excepted.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, HeadraceError

logger = logging.getLogger(__name__)

ANONYMOUS = "anonymous"
"""The identity of every caller where no callers are configured."""
KNOWN_SERVICES = ("GenerationService", "ModelService", "ControlService", "ServerReflection")
_EVERYTHING = "*"
_CHECK_INTERVAL_S = 1.0
_IDENTITY = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_KEYS = frozenset({"identity", "token_sha256", "certificate", "services"})


class UnauthenticatedError(HeadraceError):
    """The caller did not say who they are, or it is not true."""


class PermissionDeniedError(HeadraceError):
    """The caller is known and may not call this."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who may call.

    Attributes:
        identity: whose requests theirs are.
        services: the services that they may call; "*": all.
    """

    identity: str
    services: frozenset[str]

    def may_call(self, method: str) -> bool:
        """Whether they may call a method, given as /package.Service/Method."""
        service = method.rsplit("/", 2)[-2].rsplit(".", 1)[-1]
        return _EVERYTHING in self.services or service in self.services


EVERYONE = Caller(ANONYMOUS, frozenset({_EVERYTHING}))


@dataclass(frozen=True, slots=True)
class CallerTable:
    """Who may call, as one version of the file says. `tokens`: by the token's SHA-256."""

    tokens: tuple[tuple[bytes, Caller], ...]
    certificates: Mapping[str, Caller]

    def by_token(self, token: bytes) -> Caller | None:
        """The caller whose token it is. Takes equally long whoever it is."""
        digest = hashlib.sha256(token).digest()
        found: Caller | None = None
        for known, caller in self.tokens:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def parse_callers(text: str) -> CallerTable:
    """Read the file's text.

    Raises:
        ConfigError: it is not TOML, or an entry is wrong; names the entry.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("auth_file", f"is not TOML: {error}") from error
    entries = content.get("callers")
    if set(content) != {"callers"} or not isinstance(entries, list):
        raise ConfigError("auth_file", "must have [[callers]] entries, and nothing else")
    tokens: list[tuple[bytes, Caller]] = []
    certificates: dict[str, Caller] = {}
    for index, entry in enumerate(entries):
        caller, digests, names = _entry(entry, f"callers[{index}]")
        for digest in digests:
            if any(hmac.compare_digest(digest, known) for known, _ in tokens):
                raise ConfigError("auth_file", f"callers[{index}]: a token is there twice")
            tokens.append((digest, caller))
        for name in names:
            if name in certificates:
                raise ConfigError("auth_file", f"callers[{index}]: {name!r} is there twice")
            certificates[name] = caller
    return CallerTable(tuple(tokens), certificates)


def _entry(entry: Any, where: str) -> tuple[Caller, list[bytes], list[str]]:
    if not isinstance(entry, dict) or (unknown := sorted(set(entry) - _KEYS)):
        what = (
            f"has unknown keys: {', '.join(unknown)}" if isinstance(entry, dict) else "is no table"
        )
        raise ConfigError("auth_file", f"{where} {what}; known are {', '.join(sorted(_KEYS))}")
    identity = entry.get("identity")
    if not isinstance(identity, str) or not _IDENTITY.fullmatch(identity):
        raise ConfigError(
            "auth_file", f"{where}.identity must be 1 to 64 characters out of [A-Za-z0-9._-]"
        )
    if identity == ANONYMOUS:
        raise ConfigError("auth_file", f"{where}.identity: {ANONYMOUS!r} is taken, choose another")
    services = _strings(entry.get("services"), f"{where}.services")
    strange = sorted(set(services) - {_EVERYTHING, *KNOWN_SERVICES})
    if strange or not services:
        raise ConfigError(
            "auth_file",
            f'{where}.services must name some of {", ".join(KNOWN_SERVICES)}, or be "*"',
        )
    digests = _strings(entry.get("token_sha256", []), f"{where}.token_sha256")
    if not all(_DIGEST.fullmatch(digest) for digest in digests):
        raise ConfigError(
            "auth_file", f"{where}.token_sha256 must be the 64 hexadecimal digits of a SHA-256"
        )
    names = _strings(entry.get("certificate", []), f"{where}.certificate")
    if not digests and not names:
        raise ConfigError("auth_file", f"{where} needs token_sha256 or certificate")
    return Caller(identity, frozenset(services)), [bytes.fromhex(d) for d in digests], names


def _strings(value: Any, where: str) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(entry, str) for entry in values):
        raise ConfigError("auth_file", f"{where} must be a string or a list of strings")
    return values


class Authenticator:
    """Finds out who calls. All methods run on the event loop."""

    def __init__(self, path: str | None) -> None:
        """Read the callers' file; None: everyone may call everything.

        Raises:
            ConfigError: the file cannot be read, or an entry is wrong.
        """
        self._path = None if path is None else Path(path)
        self._table: CallerTable | None = None
        self._stamp: tuple[int, int] | None = None
        self._next_check = 0.0
        if self._path is not None:
            self._table = self._load(self._path)

    def check(
        self, method: str, metadata: Iterable[tuple[str, str | bytes]], names: Iterable[str]
    ) -> Caller:
        """Who calls a method, if they may.

        Args:
            method: /package.Service/Method.
            metadata: of the call.
            names: of the client's verified certificate; empty without mTLS.

        Raises:
            UnauthenticatedError: there is no token and no certificate, or it is not known.
            PermissionDeniedError: the caller may not call this service.
        """
        self._refresh()
        if self._table is None:
            return EVERYONE
        caller = self._find(self._table, metadata, names)
        if not caller.may_call(method):
            raise PermissionDeniedError(
                f"{caller.identity!r} may not call {method}; ask for the service to be granted"
            )
        return caller

    @staticmethod
    def _find(
        table: CallerTable, metadata: Iterable[tuple[str, str | bytes]], names: Iterable[str]
    ) -> Caller:
        given = [value for key, value in metadata if key == "authorization"]
        if len(given) > 1:
            raise UnauthenticatedError("authorization: was sent more than once")
        if given:
            value = given[0].encode() if isinstance(given[0], str) else given[0]
            scheme, _, token = value.partition(b" ")
            caller = table.by_token(token.strip()) if scheme.lower() == b"bearer" else None
            if caller is None:
                raise UnauthenticatedError(
                    "authorization: is not a bearer token that this server knows"
                )
            return caller
        for name in names:
            if (caller := table.certificates.get(name)) is not None:
                return caller
        raise UnauthenticatedError(
            "authorization: is missing; send 'authorization: Bearer <token>', or a client "
            "certificate that this server knows"
        )

    def _refresh(self) -> None:
        """Read the file again if it has changed; looked at once a second at most."""
        now = time.monotonic()
        if self._path is None or now < self._next_check:
            return
        self._next_check = now + _CHECK_INTERVAL_S
        try:
            if self._stamp_of(self._path) != self._stamp:
                self._table = self._load(self._path)
                logger.info("callers read again from %s", self._path)
        except (ConfigError, OSError) as error:
            logger.error("callers stay as they were: %s", error)

    def _load(self, path: Path) -> CallerTable:
        try:
            self._stamp = self._stamp_of(path)
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("auth_file", f"{path} cannot be read: {error}") from error
        return parse_callers(text)

    @staticmethod
    def _stamp_of(path: Path) -> tuple[int, int]:
        status = path.stat()
        return status.st_mtime_ns, status.st_ino
