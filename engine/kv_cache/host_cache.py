"""What the host keeps of preempted requests, block by block, and the copies there and back.

    keep ─────▶ kept ─────restore────▶ restoring ─────take────▶ (on the device again)
             ▲   │                        │  │
             │   └──drop──▶ (forgotten) ◀─┘  │
             └───────────cancel_restore──────┘

Host blocks stay with the request until `take` has handed its restore out. So they are given to
somebody else only in a later step; within one, offloads are made before restores and would
overwrite them.
Copies that were not handed out yet can be dropped: nothing was read or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv_cache.copies import BlockCopy
from engine.types import BlockId, GroupId, RequestKey


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """One group's part of a kept request.

    Attributes:
        first: how many leading entries of its table are null.
        blocks: the host's blocks of the entries that follow.
    """

    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """What the host keeps of a request: the KV of its first `num_tokens` tokens."""

    num_tokens: int
    groups: tuple[KeptBlocks, ...]


class HostCache:
    """The host's blocks of all groups, and who has them. free + used = total in each group.

    Attributes:
        offloads, restores: how often a request's KV went to the host, and came back; counted when
            the copies are handed out.
    """

    def __init__(self, num_blocks: Sequence[int]) -> None:
        """So many blocks in each group, counted from 0."""
        self._totals = tuple(num_blocks)
        self._free = [list(range(total - 1, -1, -1)) for total in num_blocks]
        self._kept: dict[RequestKey, KeptRequest] = {}
        self._offloads: dict[RequestKey, tuple[BlockCopy, ...]] = {}
        self._restores: dict[RequestKey, tuple[BlockCopy, ...]] = {}
        self.offloads = 0
        self.restores = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(self._totals)

    @property
    def num_used(self) -> int:
        """Blocks that requests have."""
        return sum(self._totals) - sum(map(len, self._free))

    def kept(self, key: RequestKey) -> KeptRequest | None:
        """What is kept of a request."""
        return self._kept.get(key)

    def keys(self) -> frozenset[RequestKey]:
        """The requests of which something is kept."""
        return frozenset(self._kept)

    def is_restoring(self, key: RequestKey) -> bool:
        """Whether a request's restore is planned and was not handed out yet."""
        return key in self._restores

    def keep(
        self,
        key: RequestKey,
        num_tokens: int,
        firsts: Sequence[int],
        blocks: Sequence[Sequence[BlockId]],
    ) -> bool:
        """Find room for a request's blocks in all groups and plan the copies, or change nothing.

        Args:
            num_tokens: how many tokens' KV the blocks hold.
            firsts, blocks: for each group, the null entries in front and the blocks that follow.

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
        """Plan the copies of a kept request into these blocks, one list a group."""
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
        """Hand the planned offloads and restores out, by request; what is restored is not kept any
        more.
        """
        offloads, self._offloads = self._offloads, {}
        restores, self._restores = self._restores, {}
        self.offloads += len(offloads)
        self.restores += len(restores)
        for key in restores:
            self.drop(key)
        return offloads, restores

    def planned_restores(self) -> dict[RequestKey, tuple[BlockCopy, ...]]:
        """The restores that were not handed out yet, by request."""
        return dict(self._restores)

    def check_integrity(self) -> None:
        """Check that free + used = total in each group, and that planned copies touch only blocks
        of their own requests.

        Raises:
            ValueError: a law is broken.
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
