"""Keeps the KV of preempted requests in host memory, and plans the copies there and back.

    keep ─────▶ kept ─────restore────▶ restoring ─────take────▶ (on the device again)
             ▲   │                        │  │
             │   └──drop──▶ (forgotten) ◀─┘  │
             └───────────cancel_restore──────┘

Host blocks belong to the request until `take` has returned its restore, so others get them only in
a later step; in the same step, an offload comes before the restores and would overwrite them.
Planned copies that `take` has not returned yet can be dropped: nothing was read or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.contract.types import BlockId, GroupId, RequestKey
from engine.kv_cache.copies import BlockCopy


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """One group's part of a kept request.

    Attributes:
        first: how many leading entries of its table are null.
        blocks: the host blocks for the entries that follow.
    """

    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """What the host keeps for a request: the KV of its first `num_tokens` tokens."""

    num_tokens: int
    groups: tuple[KeptBlocks, ...]


class HostCache:
    """The host blocks of all groups, and the requests that have them. free + used = total in each
    group.

    Attributes:
        offloads, restores: how often a request's KV went to the host, and came back; counted when
            `take` returns the copies.
    """

    def __init__(self, num_blocks: Sequence[int]) -> None:
        """`num_blocks`: the host blocks of each group."""
        self._totals = tuple(num_blocks)
        self._free = [list(range(total - 1, -1, -1)) for total in num_blocks]
        self._kept: dict[RequestKey, KeptRequest] = {}
        self._offloads: dict[RequestKey, tuple[BlockCopy, ...]] = {}
        self._restores: dict[RequestKey, tuple[BlockCopy, ...]] = {}
        self.offloads = 0
        self.restores = 0

    @property
    def num_blocks(self) -> int:
        """The host blocks of all groups."""
        return sum(self._totals)

    @property
    def num_used(self) -> int:
        """How many host blocks requests have."""
        return sum(self._totals) - sum(map(len, self._free))

    def kept(self, key: RequestKey) -> KeptRequest | None:
        """What is kept for a request."""
        return self._kept.get(key)

    def keys(self) -> frozenset[RequestKey]:
        """The requests for which something is kept."""
        return frozenset(self._kept)

    def is_restoring(self, key: RequestKey) -> bool:
        """Whether a request's restore is planned but `take` has not returned it yet."""
        return key in self._restores

    def keep(
        self,
        key: RequestKey,
        num_tokens: int,
        firsts: Sequence[int],
        blocks: Sequence[Sequence[BlockId]],
    ) -> bool:
        """Find room for a request's blocks in all groups and plan the copies; if there is none,
        change nothing.

        Args:
            num_tokens: how many tokens' KV the blocks hold.
            firsts, blocks: for each group, how many null entries come first, and the blocks that
                follow.

        Returns:
            Whether there was room for all.
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
        """Plan the copies of a kept request into these blocks, one list for each group."""
        self._restores[key] = tuple(
            BlockCopy(GroupId(group), source, block)
            for group, (kept, part) in enumerate(zip(self._kept[key].groups, blocks, strict=True))
            for source, block in zip(kept.blocks, part, strict=True)
        )

    def cancel_restore(self, key: RequestKey) -> None:
        """Drop the planned restore: the request is kept as before."""
        del self._restores[key]

    def drop(self, key: RequestKey) -> None:
        """Forget a request and every copy that is planned for it. Harmless if nothing is kept."""
        self._offloads.pop(key, None)
        self._restores.pop(key, None)
        kept = self._kept.pop(key, None)
        if kept is not None:
            for free, part in zip(self._free, kept.groups, strict=True):
                free.extend(reversed(part.blocks))

    def take(
        self,
    ) -> tuple[dict[RequestKey, tuple[BlockCopy, ...]], dict[RequestKey, tuple[BlockCopy, ...]]]:
        """Return the planned offloads and restores, by request. Restored requests are no longer
        kept.
        """
        offloads, self._offloads = self._offloads, {}
        restores, self._restores = self._restores, {}
        self.offloads += len(offloads)
        self.restores += len(restores)
        for key in restores:
            self.drop(key)
        return offloads, restores

    def planned_restores(self) -> dict[RequestKey, tuple[BlockCopy, ...]]:
        """The restores that `take` has not returned yet, by request."""
        return dict(self._restores)

    def check_integrity(self) -> None:
        """Check that free + used = total in each group, and that planned copies touch only blocks
        of their own requests.

        Raises:
            ValueError: a rule is broken.
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
