"""Keeps the KV of preempted requests in host memory, and plans the copies in both directions.

    keep ─────▶ kept ─────restore────▶ restoring ─────take────▶ (on the device again)
             ▲   │                        │  │
             │   └──drop──▶ (forgotten) ◀─┘  │
             └───────────cancel_restore──────┘

Host blocks belong to a request until `take` has returned its restore, so they can only be reused in
a later step. In the same step, offloads come before restores and would overwrite the blocks.
Planned copies that `take` has not returned yet can be dropped, because nothing was read or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.contract.types import BlockId, GroupId, RequestKey
from engine.kv_cache.copies import BlockCopy


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """The blocks of a kept request in one group.

    Attributes:
        first: the number of leading null entries in its table.
        blocks: the host blocks for the entries that follow.
    """

    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """The KV of a request's first `num_tokens` tokens, kept on the host."""

    num_tokens: int
    groups: tuple[KeptBlocks, ...]


class HostCache:
    """The host blocks of all groups, and the requests that hold them.

    In each group, free + used = total.

    Attributes:
        offloads, restores: how often a request's KV was copied to and from the host. Counted when
            `take` returns the copies.
    """

    def __init__(self, num_blocks: Sequence[int]) -> None:
        """Create a cache with `num_blocks` host blocks in each group."""
        self._totals = tuple(num_blocks)
        self._free = [list(range(total - 1, -1, -1)) for total in num_blocks]
        self._kept: dict[RequestKey, KeptRequest] = {}
        self._offloads: dict[RequestKey, tuple[BlockCopy, ...]] = {}
        self._restores: dict[RequestKey, tuple[BlockCopy, ...]] = {}
        self.offloads = 0
        self.restores = 0

    @property
    def num_blocks(self) -> int:
        """The number of host blocks in all groups."""
        return sum(self._totals)

    @property
    def num_used(self) -> int:
        """The number of host blocks that requests hold."""
        return sum(self._totals) - sum(map(len, self._free))

    def kept(self, key: RequestKey) -> KeptRequest | None:
        """Return the KV kept for a request, or None if there is none."""
        return self._kept.get(key)

    def keys(self) -> frozenset[RequestKey]:
        """Return the requests whose KV is kept."""
        return frozenset(self._kept)

    def is_restoring(self, key: RequestKey) -> bool:
        """Return whether a request's restore is planned but not yet returned by `take`."""
        return key in self._restores

    def keep(
        self,
        key: RequestKey,
        num_tokens: int,
        firsts: Sequence[int],
        blocks: Sequence[Sequence[BlockId]],
    ) -> bool:
        """Reserve host blocks for a request in all groups and plan the copies.

        If there is not enough room, nothing changes.

        Args:
            key: the request.
            num_tokens: the number of tokens whose KV the blocks hold.
            firsts: for each group, the number of leading null entries.
            blocks: for each group, the blocks that follow the null entries.

        Returns:
            Whether there was enough room in all groups.
        """
        if any(len(part) > len(free) for part, free in zip(blocks, self._free, strict=True)):
            return False
        groups: list[KeptBlocks] = []
        copies: list[BlockCopy] = []
        for group, (first, part, free) in enumerate(zip(firsts, blocks, self._free, strict=True)):
            kept = tuple(free.pop() for _ in part)
            groups.append(KeptBlocks(first, kept))
            copies += map(BlockCopy, [GroupId(group)] * len(part), part, kept)
        self._kept[key] = KeptRequest(num_tokens, tuple(groups))
        self._offloads[key] = tuple(copies)
        return True

    def restore(self, key: RequestKey, blocks: Sequence[Sequence[BlockId]]) -> None:
        """Plan the copies of a kept request into `blocks`, one list per group."""
        self._restores[key] = tuple(
            BlockCopy(GroupId(group), source, block)
            for group, (kept, part) in enumerate(zip(self._kept[key].groups, blocks, strict=True))
            for source, block in zip(kept.blocks, part, strict=True)
        )

    def cancel_restore(self, key: RequestKey) -> None:
        """Drop a planned restore. The request's KV stays on the host."""
        del self._restores[key]

    def drop(self, key: RequestKey) -> None:
        """Forget a request and all copies planned for it. Does nothing if nothing is kept."""
        self._offloads.pop(key, None)
        self._restores.pop(key, None)
        kept = self._kept.pop(key, None)
        if kept is not None:
            for free, part in zip(self._free, kept.groups, strict=True):
                free.extend(reversed(part.blocks))

    def take(
        self,
    ) -> tuple[dict[RequestKey, tuple[BlockCopy, ...]], dict[RequestKey, tuple[BlockCopy, ...]]]:
        """Return the planned offloads and restores, by request.

        Restored requests are no longer kept.
        """
        offloads, self._offloads = self._offloads, {}
        restores, self._restores = self._restores, {}
        self.offloads += len(offloads)
        self.restores += len(restores)
        for key in restores:
            self.drop(key)
        return offloads, restores

    def planned_restores(self) -> dict[RequestKey, tuple[BlockCopy, ...]]:
        """Return the restores that `take` has not returned yet, by request."""
        return dict(self._restores)

    def check_integrity(self) -> None:
        """Check that free + used = total in each group, and that planned copies touch only blocks
        of their own requests.

        Raises:
            ValueError: one of these is violated.
        """
        for group, (total, free) in enumerate(zip(self._totals, self._free, strict=True)):
            used = [block for kept in self._kept.values() for block in kept.groups[group].blocks]
            if sorted(free + used) != list(range(total)):
                raise ValueError(f"group {group}: host blocks were lost or doubled")
        for key, copies in self._offloads.items():
            if [(c.group, c.target) for c in copies] != self._blocks(key):
                raise ValueError(f"request {key}: an offload's target is not its host block")
        for key, copies in self._restores.items():
            if [(c.group, c.source) for c in copies] != self._blocks(key):
                raise ValueError(f"request {key}: a restore's source is not its host block")

    def _blocks(self, key: RequestKey) -> list[tuple[int, int]]:
        kept = self._kept.get(key)
        groups = kept.groups if kept is not None else ()
        return [(group, block) for group, part in enumerate(groups) for block in part.blocks]
