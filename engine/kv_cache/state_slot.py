"""The kind of the layers that carry a state from token to token: one slot a request, which every
step overwrites. The state is kept in another slot where a step ends at a block's end, under the
digest of that block, and copied to whoever goes on from there.

    request ─▶ slot, overwritten by each step ──copy at a block's end──▶ kept slot (published)
                ▲                                                          │
                └──────────────── copy, when a request starts ─────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from typing_extensions import override

from engine.contract.types import BlockId
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.group_kinds import GroupKind, GroupMatch, PlannedCopy
from engine.kv_cache.prefix_index import PrefixIndex


class KeptMark(NamedTuple):
    """How much of its request a kept state has seen, in tokens and in blocks of other groups."""

    tokens: int
    blocks: int


class SlotTable(BlockTable):
    """The slot of a request, and then those in which earlier states of it are kept.

    Attributes:
        marks: those of the kept states.
        num_computed: how many of the request's tokens collected steps have computed.
    """

    __slots__ = ("marks", "num_computed")

    def __init__(self, num_null: int = 0, blocks: Sequence[BlockId] = ()) -> None:
        super().__init__(num_null, blocks)
        self.marks: list[KeptMark] = []
        self.num_computed = 0

    @property
    def kept(self) -> list[BlockId]:
        """The slots of kept states."""
        return self.entries(1, self.length)

    def is_made(self, mark: KeptMark) -> bool:
        """Whether the step that copied a kept state has been collected: it computed more tokens,
        and those before had been collected when it was.
        """
        return mark.tokens <= self.num_computed


def _slots(table: BlockTable) -> SlotTable:
    """Return a table of this kind, which `StateSlot.table` made."""
    if not isinstance(table, SlotTable):
        raise TypeError(f"a {type(table).__name__} holds no slot")
    return table


@dataclass(frozen=True)
class StateSlot(GroupKind):
    """See the module. What is kept may be used when the step that copies it has been collected."""

    advances = True
    keeps = True
    grows = False

    @override
    def num_entries(self, num_tokens: int, block_size: int) -> int:
        return min(1, num_tokens)

    @override
    def first_visible(self, position: int, block_size: int) -> int:
        return 0

    @override
    def tokens_at_start(self, num_tokens: int, first_step: int) -> int:
        return first_step

    @override
    def most_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        return 1

    @override
    def pool_blocks(
        self, num_blocks: int, max_requests: int, max_batch_tokens: int, block_size: int
    ) -> int:
        return 2 * max_requests

    @override
    def fits(self, index: PrefixIndex, digests: Sequence[bytes], block_size: int) -> list[bool]:
        return [True, *(index.block(digest) is not None for digest in digests)]

    @override
    def match(self, pool: BlockPool, digests: Sequence[bytes], block_size: int) -> GroupMatch:
        kept = pool.index.block(digests[-1]) if digests else None
        if kept is None:
            return GroupMatch()
        return GroupMatch(0, (kept,), int(pool.is_cached(kept)), is_copied=True)

    @override
    def publish(
        self, pool: BlockPool, table: BlockTable, digests: Sequence[bytes], first: int
    ) -> None:
        table = _slots(table)
        for block, mark in zip(table.kept, table.marks, strict=True):
            if table.is_made(mark) and pool.index.digest(block) is None:
                pool.publish(block, digests[mark.blocks - 1])

    @override
    def table(self, first: int = 0, blocks: Sequence[BlockId] = ()) -> BlockTable:
        return SlotTable(first, blocks)

    @override
    def start(self, pool: BlockPool, match: GroupMatch) -> tuple[BlockTable, list[PlannedCopy]]:
        return self._continued(pool, match.blocks) if match.blocks else (SlotTable(), [])

    @override
    def fork_position(self, table: BlockTable, position: int, block_size: int) -> int:
        table = _slots(table)
        made = [one.tokens for one in table.marks if table.is_made(one) and one.tokens <= position]
        return max(made, default=0)

    @override
    def fork(
        self, pool: BlockPool, table: BlockTable, position: int, block_size: int
    ) -> tuple[BlockTable, list[PlannedCopy]]:
        table = _slots(table)
        kept = [
            block
            for block, mark in zip(table.kept, table.marks, strict=True)
            if position and mark.tokens == position
        ]
        return self._continued(pool, kept)

    @override
    def keep(
        self, pool: BlockPool, table: BlockTable, num_tokens: int, block_size: int
    ) -> list[PlannedCopy]:
        table = _slots(table)
        if num_tokens % block_size:
            return []
        # Those that steps after their copy have been collected are published, if they ever are.
        done = sum(mark.tokens < table.num_computed for mark in table.marks)
        kept = table.kept
        pool.free(kept[:done])
        table.marks, table.length = table.marks[done:], 1
        table.extend(kept[done:])
        if not pool.num_free:
            return []
        (fresh,) = pool.allocate(1)
        table.extend([fresh])
        table.marks.append(KeptMark(num_tokens, num_tokens // block_size))
        return [(table.entries(0, 1)[0], fresh)]

    @override
    def advance(self, pool: BlockPool, table: BlockTable, num_tokens: int, block_size: int) -> None:
        table = _slots(table)
        table.num_computed = num_tokens

    def _continued(
        self, pool: BlockPool, kept: Sequence[BlockId]
    ) -> tuple[BlockTable, list[PlannedCopy]]:
        """A table whose slot is a copy of what is kept, if anything is."""
        pool.share(kept)
        (fresh,) = pool.allocate(1)
        return SlotTable(0, [fresh]), [(source, fresh) for source in kept]
