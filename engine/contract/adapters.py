"""Adapters: low-rank additions to a model's linear layers (LoRA), which requests name.

    AdapterLoad ─▶ engine.loading.adapters ─▶ Adapter ─▶ LoadedAdapters ─▶ requests that name it
                                                                        ─▶ AdapterRows of a step

An adapter is its content: it has a digest of all that changes results, and a request keeps the
adapter that it began with. So nothing has to be searched, or thrown away, when the adapters that a
name means are others: what was cached is found by the digest, and memory is freed with the last
request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.contract.errors import ConfigError

MAX_NAME = 128
"""The maximum length of an adapter's name, in characters."""
MAX_NAMED = 64
"""How many adapters the statistics name; the others are summed."""
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
        base_model: the base model's name, as the adapter's config has it; may be empty.
        weights: its tensors, for what computes them (`engine.models.low_rank`).
    """

    name: str
    digest: bytes
    rank: int
    nbytes: int
    modules: int
    base_model: str
    weights: object


AdapterState = Literal["loading", "loaded", "unloading"]
"""unloading: requests have it, and no others get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """What the front end knows of an adapter; see Adapter.

    Attributes:
        digest: in hexadecimal; empty while it is loaded.
        is_pinned: whether it stays when others need the memory.
        requests: how many live requests have it.
    """

    name: str
    digest: str = ""
    rank: int = 0
    nbytes: int = 0
    modules: int = 0
    base_model: str = ""
    state: AdapterState = "loaded"
    is_pinned: bool = False
    requests: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoad:
    """An adapter that is to be loaded.

    Attributes:
        name: what requests will call it.
        source: the name of its directory below adapter_root.
        is_pinned: whether it stays when others need the memory.
        replaces: whether it may take the place of a loaded one with the same name.
        is_of_start: whether the source is a directory anywhere, which the operator gave at start.
        digest: in hexadecimal, the only content that is loaded; empty: any. It is set where an
            adapter was loaded before the engine was started again.
    """

    name: str
    source: str
    is_pinned: bool = False
    replaces: bool = False
    is_of_start: bool = False
    digest: str = ""


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """An adapter that was loaded.

    Attributes:
        evicted: the names of those that had to go.
        took_s: how long its files were read, checked and packed, in seconds, without the loads
            before it.
    """

    adapter: AdapterInfo
    evicted: tuple[str, ...] = ()
    took_s: float = 0.0


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


def at_start(given: Sequence[str]) -> tuple[AdapterLoad, ...]:
    """Return what an operator gives at start, as texts "NAME=DIR". All of it is pinned.

    Raises:
        ConfigError: one has another form, or a name is out of bounds or given twice.
    """
    found: dict[str, AdapterLoad] = {}
    for text in given:
        name, equals, directory = text.partition("=")
        if not equals or not directory:
            raise ConfigError(
                OPTION, f"has {_shown(text)}; each is a name and a directory, NAME=DIR"
            )
        if reason := why_no_name(name):
            raise ConfigError(OPTION, f"has a name that {reason}")
        if name in found:
            raise ConfigError(OPTION, f"has two adapters with the name {name!r}; give each its own")
        found[name] = AdapterLoad(name=name, source=directory, is_pinned=True, is_of_start=True)
    return tuple(found.values())


def why_no_name(name: str) -> str:
    """Return why an adapter cannot have a name, or "" if it can."""
    if _NAME.fullmatch(name):
        return ""
    return (
        f"is {_shown(name)}; a name has 1 to {MAX_NAME} letters, digits and ._:/@+-, and begins "
        "with a letter or a digit"
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= MAX_NAME else f"{text[:MAX_NAME]}…")
