"""Adapters: low-rank additions to a model's linear layers (LoRA), which requests name.

    a directory ─▶ engine.loading.adapters ─▶ Adapter ─▶ LoadedAdapters ─▶ requests that name it
                                                                        ─▶ AdapterRows of a step

An adapter is its content: it has a digest of all that changes results, and a request keeps the
adapter that it began with. So nothing has to be searched, or thrown away, when the adapters that a
name means are others: what was cached is found by the digest, and memory is freed with the last
request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from engine.contract.errors import AdapterNotLoadedError, ConfigError

MAX_NAME = 128
"""The maximum length of an adapter's name, in characters."""
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:/@+-]{{0,{MAX_NAME - 1}}}")
OPTION = "adapters"
"""The option of LoadConfig that names adapters."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A loaded adapter. Two of them are the same only if they are one object.

    Attributes:
        name: what requests call it.
        digest: of what it adds: 32 bytes. Equal content has equal digests, whatever its name.
        rank: its highest rank.
        nbytes: the size of its tensors in memory.
        modules: how many linear layers it changes.
        weights: its tensors, for what computes them (`engine.models.low_rank`).
    """

    name: str
    digest: bytes
    rank: int
    nbytes: int
    modules: int
    weights: object


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What the front end knows of an adapter; see Adapter. digest: in hexadecimal."""

    name: str
    digest: str
    rank: int
    nbytes: int
    modules: int


class LoadedAdapters:
    """The adapters that requests may name. Any thread may read them."""

    __slots__ = ("_by_name",)

    def __init__(self) -> None:
        self._by_name: Mapping[str, Adapter] = MappingProxyType({})

    def replace(self, adapters: Sequence[Adapter]) -> None:
        """Let names mean these adapters from now on: one assignment, which no step waits for.

        Live requests keep theirs.
        """
        self._by_name = MappingProxyType({one.name: one for one in adapters})

    def of_request(self, name: str) -> Adapter | None:
        """Return the adapter that a request names, or None if it names none ("").

        Raises:
            AdapterNotLoadedError: no adapter has this name.
        """
        if not name:
            return None
        found = self._by_name.get(name)
        if found is None:
            raise AdapterNotLoadedError(name)
        return found

    def all(self) -> tuple[Adapter, ...]:
        """Return the adapters in the order of their names."""
        return tuple(one for _, one in sorted(self._by_name.items()))

    def told(self) -> tuple[AdapterInfo, ...]:
        """Return what the front end knows of them."""
        return tuple(
            AdapterInfo(one.name, one.digest.hex(), one.rank, one.nbytes, one.modules)
            for one in self.all()
        )


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a step whose requests have adapters, grouped by adapter.

    Attributes:
        adapters: the adapter of each group, [G].
        rows: int64 [A], the indices of their tokens among the step's, group after group, in order.
        ends: int64 [G], where each group ends in `rows`.
    """

    adapters: tuple[Adapter, ...]
    rows: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls, adapters: Sequence[Adapter | None], counts: npt.NDArray[np.int64]
    ) -> AdapterRows | None:
        """Group a step's tokens. Return None if none has an adapter.

        Args:
            adapters: of each part of the step, [R].
            counts: int64 [R], the tokens of each part.
        """
        places: dict[Adapter, int] = {}
        groups = [-1 if one is None else places.setdefault(one, len(places)) for one in adapters]
        if not places:
            return None
        of_tokens = np.repeat(np.array(groups, dtype=np.int64), counts)
        order = np.argsort(of_tokens, kind="stable").astype(np.int64)
        ends = np.cumsum(np.bincount(of_tokens + 1, minlength=len(places) + 1))
        rows = np.ascontiguousarray(order[ends[0] :])  # behind those without an adapter
        return cls(tuple(places), rows, (ends[1:] - ends[0]).astype(np.int64))


def named_directories(given: Sequence[str]) -> dict[str, str]:
    """Return directories by adapter name, from texts "NAME=DIR".

    Raises:
        ConfigError: one has another form, or a name is out of bounds or given twice.
    """
    found: dict[str, str] = {}
    for text in given:
        name, equals, directory = text.partition("=")
        if not equals or not directory:
            raise ConfigError(
                OPTION, f"has {_shown(text)}; each is a name and a directory, NAME=DIR"
            )
        if not _NAME.fullmatch(name):
            raise ConfigError(
                OPTION,
                f"has the name {_shown(name)}; a name has 1 to {MAX_NAME} letters, digits and "
                "._:/@+-, and begins with a letter or a digit",
            )
        if name in found:
            raise ConfigError(OPTION, f"has two adapters with the name {name!r}; give each its own")
        found[name] = directory
    return found


def _shown(text: str) -> str:
    return repr(text if len(text) <= MAX_NAME else f"{text[:MAX_NAME]}…")
