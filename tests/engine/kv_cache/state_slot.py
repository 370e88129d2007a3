"""A scripted kind of layer group: one slot a request, which every step overwrites, as recurrent
layers would. It is kept at block ends, and copied to whoever goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from engine.contract.types import BlockId
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.group_kinds import GroupKind, GroupMatch, PlannedCopy
from engine.kv_cache.prefix_index import PrefixIndex


class SlotTable(BlockTable):
    """The slot of a request, and then the one in which its state at `kept_at` tokens is kept."""

    __slots__ = ("kept_at", "num_computed", "num_kept_blocks")

    def __init__(self, num_null: int = 0, blocks: Sequence[BlockId] = ()) -> None:
        super().__init__(num_null, blocks)
        self.kept_at = self.num_kept_blocks = 0  # in tokens, and in blocks of the other groups
        self.num_computed = 0

    @property
    def kept(self) -> list[BlockId]:
        return self.entries(1, self.length)


@dataclass(frozen=True)
class StateSlot(GroupKind):
    """See the module. What is kept may be used when the step that copies it has been collected."""

    advances = True
    keeps = True

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
        assert isinstance(table, SlotTable)
        if self._is_made(table) and pool.index.digest(table.kept[0]) is None:
            pool.publish(table.kept[0], digests[table.num_kept_blocks - 1])

    @override
    def table(self, first: int = 0, blocks: Sequence[BlockId] = ()) -> BlockTable:
        return SlotTable(first, blocks)

    @override
    def start(self, pool: BlockPool, match: GroupMatch) -> tuple[BlockTable, list[PlannedCopy]]:
        return self._continued(pool, match.blocks) if match.blocks else (SlotTable(), [])

    @override
    def fork_position(self, table: BlockTable, position: int, block_size: int) -> int:
        assert isinstance(table, SlotTable)
        can = self._is_made(table) and table.kept_at <= position
        return table.kept_at if can else 0

    @override
    def fork(
        self, pool: BlockPool, table: BlockTable, position: int, block_size: int
    ) -> tuple[BlockTable, list[PlannedCopy]]:
        assert isinstance(table, SlotTable)
        return self._continued(pool, table.kept if position else [])

    @override
    def keep(
        self, pool: BlockPool, table: BlockTable, num_tokens: int, block_size: int
    ) -> list[PlannedCopy]:
        assert isinstance(table, SlotTable)
        if num_tokens % block_size:
            return []
        pool.free(table.kept)
        table.length = 1
        table.kept_at = table.num_kept_blocks = 0
        if not pool.num_free:
            return []
        table.extend(pool.allocate(1))
        table.kept_at, table.num_kept_blocks = num_tokens, num_tokens // block_size
        return [(table.entries(0, 1)[0], table.kept[0])]

    @override
    def advance(self, pool: BlockPool, table: BlockTable, num_tokens: int, block_size: int) -> None:
        assert isinstance(table, SlotTable)
        table.num_computed = num_tokens

    def _is_made(self, table: SlotTable) -> bool:
        """Whether the step that copied what is kept has been collected: it computed more tokens,
        and those before had been collected when it was.
        """
        return 0 < table.kept_at <= table.num_computed

    def _continued(
        self, pool: BlockPool, kept: Sequence[BlockId]
    ) -> tuple[BlockTable, list[PlannedCopy]]:
        """A table whose slot is a copy of what is kept, if anything is."""
        pool.share(kept)
        (fresh,) = pool.allocate(1)
        return SlotTable(0, [fresh]), [(source, fresh) for source in kept]
