"""The callers' file: who may call, how callers are identified, and what they may call.

    [[callers]]
    identity = "search"
    token_sha256 = "…64 hexadecimal digits…"     # or several: token_sha256 = ["…", "…"]
    services = ["GenerationService", "ModelService"]

    weight = 2.0                                  # twice the usual share of service and room
    max_priority = 10                             # the highest priority of its requests

    [[callers]]
    identity = "gateway"
    token_sha256 = "…"
    services = ["GenerationService"]
    may_call_for_others = true                    # may name the user of a call: `accounts`
    adapters = ["search", "team-*"]               # those that it may use; absent: all; []: none

    [[callers]]
    identity = "operators"
    certificate = "ops.example.internal"          # a common name or alternative name, with mTLS
    services = ["*"]

Only digests of tokens are stored. Tokens are random (`headrace-server token` makes them), so a
plain SHA-256 cannot be reversed, and needs no salt. An identity may have several entries, for
example a second token with fewer services; all of them see the same requests. Grants (`services`,
`may_call_for_others`, `adapters`) apply only to their entry. Limits (`weight`, `max_priority`)
apply to the identity: one entry is enough, and entries that set them must agree.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.contract.adapters import why_no_name
from engine.contract.errors import ConfigError
from engine.contract.request import MAX_PRIORITY, MAX_WEIGHT
from service.admission.accounts import ANONYMOUS, USUAL_WEIGHT

EVERYTHING = "*"
"""The entry in `services` that stands for all services."""
SERVICES = {
    "headrace.v1.GenerationService": "GenerationService",
    "headrace.v1.ModelService": "ModelService",
    "headrace.v1.ControlService": "ControlService",
    "vllm.grpc.engine.VllmEngine": "VllmEngine",
    "grpc.reflection.v1.ServerReflection": "ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection": "ServerReflection",
}
"""The services that can be granted, by their names in the file. Health is open to all callers."""
MAX_TOKENS = 1024
"""The most tokens in the file. Each call is compared with all of them."""
MAX_ADAPTERS = 256
"""The most names of adapters in an entry. Requests that name one are compared with all of them."""
MAX_FILE_BYTES = 512 << 10
"""The largest size of the file: twice what entries for all tokens take. Reading it again stops all
calls for about 2 s per MiB.
"""
MIN_WEIGHT = 0.01
"""The lowest weight of a caller. The share of one of its users may be lower."""

_IDENTITY = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_NO_TOKEN = hashlib.sha256(b"").digest()
_KEYS = frozenset(
    {
        "identity",
        "token_sha256",
        "certificate",
        "services",
        "weight",
        "max_priority",
        "may_call_for_others",
        "adapters",
    }
)


@dataclass(frozen=True, slots=True)
class CallerEntry:
    """A caller from the file.

    Attributes:
        identity: the owner of its requests.
        services: the services that it may call, as the file names them. "*" stands for all.
        weight: its share of service and limits relative to others.
        max_priority: the highest priority that its requests may have.
        may_call_for_others: whether it may name users to call for.
        adapters: the adapters that it may use: names, and beginnings with "*" behind them.
    """

    identity: str
    services: frozenset[str]
    weight: float = USUAL_WEIGHT
    max_priority: int = MAX_PRIORITY
    may_call_for_others: bool = False
    adapters: frozenset[str] = frozenset({EVERYTHING})

    def may_use(self, adapter: str) -> bool:
        """Return whether the caller may use the adapter with a name."""
        return adapter in self.adapters or any(
            one.endswith(EVERYTHING) and adapter.startswith(one[:-1]) for one in self.adapters
        )

    def may_call(self, method: str) -> bool:
        """Return whether the caller may call a method, given as /package.Service/Method."""
        service = SERVICES.get(method.removeprefix("/").rpartition("/")[0])
        return EVERYTHING in self.services or service in self.services


EVERYONE = CallerEntry(ANONYMOUS, frozenset({EVERYTHING}))


@dataclass(frozen=True, slots=True)
class CallerTable:
    """The callers in one version of the file. `tokens`: callers by their token's SHA-256."""

    tokens: tuple[tuple[bytes, CallerEntry], ...]
    certificates: Mapping[str, CallerEntry]

    def by_digest(self, digest: bytes) -> CallerEntry | None:
        """Return the caller whose token has this SHA-256. Takes the same time for every caller, and
        if there is none.
        """
        found: CallerEntry | None = None
        for known, caller in self.tokens:
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def by_names(self, names: Iterable[str]) -> frozenset[CallerEntry]:
        """Return the callers to whom a certificate with these names belongs, one for each identity.
        If several entries of one identity match, the caller has the grants of all of them.
        """
        found: dict[str, CallerEntry] = {}
        for name in names:
            caller = self.certificates.get(name)
            if caller is not None:
                before = found.setdefault(caller.identity, caller)
                found[caller.identity] = replace(
                    before,
                    services=before.services | caller.services,
                    adapters=before.adapters | caller.adapters,
                    may_call_for_others=before.may_call_for_others or caller.may_call_for_others,
                )
        return frozenset(found.values())


def parse_callers(text: str) -> CallerTable:
    """Parse the file's text.

    Raises:
        ConfigError: it is not TOML, or an entry is wrong. The message names the entry and contains
            no secret.
    """
    try:
        content = tomllib.loads(text)
    except ValueError as error:  # not only TOMLDecodeError: numbers may be too long for Python
        raise ConfigError("auth_file", f"is not TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError("auth_file", "has lists or tables that are nested too deeply") from error
    entries = content.get("callers")
    if set(content) != {"callers"} or not isinstance(entries, list):
        raise ConfigError("auth_file", "must have [[callers]] entries, and nothing else")
    read = [_entry(entry, f"callers[{index}]") for index, entry in enumerate(entries)]
    bounds = _bounds(read)
    tokens: dict[bytes, CallerEntry] = {}
    certificates: dict[str, CallerEntry] = {}
    for one in read:
        caller = replace(one.caller, **bounds[one.caller.identity])
        for digest in one.digests:
            if digest in tokens:
                raise ConfigError("auth_file", f"{one.where}: a token is there twice")
            tokens[digest] = caller
        for name in one.certificates:
            if name in certificates:
                raise ConfigError("auth_file", f"{one.where}: certificate {name!r} is there twice")
            certificates[name] = caller
    if len(tokens) > MAX_TOKENS:
        raise ConfigError("auth_file", f"has {len(tokens)} tokens; at most {MAX_TOKENS} can be")
    return CallerTable(tuple(tokens.items()), certificates)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry. `bounds`: the limits that it sets, by key. `where`: its name in messages."""

    where: str
    caller: CallerEntry
    bounds: dict[str, Any]
    digests: list[bytes]
    certificates: list[str]


def _bounds(entries: Iterable[_Entry]) -> dict[str, dict[str, Any]]:
    """Return the limits of each identity, from all of its entries."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        known = found.setdefault(entry.caller.identity, {})
        for key, value in entry.bounds.items():
            if known.setdefault(key, value) != value:
                raise ConfigError(
                    "auth_file",
                    f"{entry.where}.{key} is {value:g}, and another entry of "
                    f"{entry.caller.identity!r} says {known[key]:g}; an identity has one: write "
                    "the same in both, or leave it out of one",
                )
    return found


def _entry(entry: Any, where: str) -> _Entry:
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
    names_others = entry.get("may_call_for_others", False)
    if not isinstance(names_others, bool):
        raise ConfigError("auth_file", f"{where}.may_call_for_others must be true or false")
    caller = CallerEntry(
        identity,
        frozenset(services),
        may_call_for_others=names_others,
        adapters=_adapters(entry, where),
    )
    return _Entry(where, caller, _bounds_of(entry, where), digests, names)


def _adapters(entry: dict[str, Any], where: str) -> frozenset[str]:
    adapters = _strings(entry.get("adapters", EVERYTHING), f"{where}.adapters")
    if len(adapters) > MAX_ADAPTERS:
        raise ConfigError(
            "auth_file",
            f"{where}.adapters has {len(adapters)} names; at most {MAX_ADAPTERS} are allowed: give "
            'beginnings, such as "team-*"',
        )
    for name in adapters:
        begins = name.removesuffix(EVERYTHING)
        if (begins or name != EVERYTHING) and (reason := why_no_name(begins)):
            raise ConfigError(
                "auth_file", f"{where}.adapters has a name that {reason}; * may end it"
            )
    return frozenset(adapters)


def _bounds_of(entry: dict[str, Any], where: str) -> dict[str, Any]:
    bounds: dict[str, Any] = {}
    if "weight" in entry:
        weight = entry["weight"]
        # NaN is never within bounds.
        if type(weight) not in (int, float) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise ConfigError(
                "auth_file",
                f"{where}.weight must be a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}",
            )
        bounds["weight"] = float(weight)
    if "max_priority" in entry:
        priority = entry["max_priority"]
        if type(priority) is not int or abs(priority) > MAX_PRIORITY:
            raise ConfigError(
                "auth_file",
                f"{where}.max_priority must be a whole number from {-MAX_PRIORITY} to "
                f"{MAX_PRIORITY}",
            )
        bounds["max_priority"] = priority
    return bounds


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
