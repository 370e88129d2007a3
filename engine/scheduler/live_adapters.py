"""The adapters that requests have named: how many requests each has in the batch and in the queue,
and how many tokens were computed with it.

Figures go by name, because that is what operators know: a content that replaces another under its
name goes on with its figures. The first MAX_NAMED names have figures of their own, from the first
request that names them to the engine's end: a name that is unloaded keeps its figures, and goes on
with them when it comes back. So no figure ever falls, and what is kept does not grow with the names
that come and go. All later names share one record, which is found before anything is made for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.adapters import MAX_NAMED, Adapter
from engine.contract.stats import AdapterStats


@dataclass(slots=True, eq=False)
class AdapterFigures:
    """The figures of one adapter, or of all others together; see AdapterStats.

    Attributes:
        live: how many requests run or wait.
        waiting: how many of these wait.
    """

    live: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0

    def told(self, name: str) -> AdapterStats:
        """Return them under this name."""
        live, waiting = self.live, self.waiting  # the engine's thread may change them meanwhile
        return AdapterStats(
            name, max(live - waiting, 0), waiting, self.prompt_tokens, self.generated_tokens
        )


class LiveAdapters:
    """See the module. Used on the engine's thread, O(1) for each change. `named` and `others` may
    be called on any thread.
    """

    def __init__(self) -> None:
        self._named: dict[str, AdapterFigures] = {}
        self._others = AdapterFigures()

    def of(self, adapter: Adapter) -> AdapterFigures:
        """Return the record in which an adapter is counted; always the same one."""
        found = self._named.get(adapter.name)
        if found is not None:
            return found
        if len(self._named) >= MAX_NAMED:
            return self._others
        found = self._named[adapter.name] = AdapterFigures()
        return found

    def named(self) -> tuple[AdapterStats, ...]:
        """Return the adapters with separate figures, in the order of their first requests."""
        return tuple(one.told(name) for name, one in list(self._named.items()))

    def others(self) -> AdapterStats | None:
        """Return the sum over all other adapters, or None if there were none."""
        told = self._others.told("")
        return None if told == AdapterStats() else told
