"""The statistics by adapter of all engines of a process, for a limited number of names.

    an engine ── by_adapter, other_adapters ──▶ take ──┐
    the engines before it ─────────────────────────────┴─▶ totals, present ──▶ exporters

The first MAX_NAMED names that an engine tells of are named to the process's end, also when they
are unloaded, come back, or another engine counts them; all others are one. Every series is kept,
both by the library and by the collector. So a name becomes one only if there is room, and none ever
falls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from engine.contract.adapters import MAX_NAMED
from engine.contract.stats import AdapterStats, EngineStats

_OTHERS: Final = ""
_NONE: Final[Mapping[str, AdapterStats]] = MappingProxyType({})


class AdapterSeries:
    """See the module. `engine_starts` and `take` run on the event loop, the others anywhere."""

    def __init__(self) -> None:
        self._named: set[str] = set()
        # The counters of earlier engines, and this one's statistics: replaced as a whole.
        self._both: tuple[Mapping[str, AdapterStats], Mapping[str, AdapterStats]] = _NONE, _NONE

    def engine_starts(self) -> None:
        """Record that an engine is being started, which counts from 0."""
        before = {name: replace(one, running=0, waiting=0) for name, one in self.totals().items()}
        self._both = before, _NONE

    def take(self, stats: EngineStats) -> None:
        """Take the latest statistics of the engine."""
        now: dict[str, AdapterStats] = {}
        for one in stats.by_adapter:
            if len(self._named) < MAX_NAMED:
                self._named.add(one.name)
            _add(now, one.name if one.name in self._named else _OTHERS, one)
        if stats.other_adapters is not None:
            _add(now, _OTHERS, stats.other_adapters)
        self._both = self._both[0], now

    def present(self) -> Mapping[str, AdapterStats]:
        """Return what the engine told last, by name; the others have an empty one."""
        return self._both[1]

    def totals(self) -> Mapping[str, AdapterStats]:
        """Return the sums over all engines, by name; the others have an empty one."""
        before, now = self._both
        summed = dict(before)
        for name, one in now.items():
            _add(summed, name, one)
        return summed


def _add(summed: dict[str, AdapterStats], name: str, one: AdapterStats) -> None:
    had = summed.get(name, AdapterStats())
    summed[name] = AdapterStats(
        name,
        had.running + one.running,
        had.waiting + one.waiting,
        had.prompt_tokens + one.prompt_tokens,
        had.generated_tokens + one.generated_tokens,
    )
