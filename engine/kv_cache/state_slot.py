"""The kind of the layers that carry a state from token to token: one slot a request, which every
step overwrites. The state is kept in another slot where a step ends at a block's end, under the
digest of that block, and copied to whoever goes on from there.

    request ─▶ slot, overwritten by each step ──copy at a block's end──▶ kept slot (published)
                ▲                                                          │
                └──────────────── copy, when a request starts ─────────────┘

A state is as large as many blocks, so few are kept. A lasting one is where others are likely to go
on: at a prompt's last whole block, and where prompts parted. Of the others of a request only the
latest is kept. A request gives a kept state up when it has been published; from then on it goes as
cached blocks do, least recently used first. So that of a conversation's end goes last of its
request's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from engine.contract.types import BlockId
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.group_kinds import GroupKind, GroupMatch, KeptMark, PlannedCopy
from engine.kv_cache.prefix_index import PrefixIndex


class SlotTable(BlockTable):
    """The slot of a request, and then those in which earlier states of it are kept.

    Attributes:
        marks: those of the kept states.
        num_computed: how many of the request's tokens collected steps have computed.
        latest: the published state that does not last, which the request no longer holds, and its
            digest.
    """

    __slots__ = ("latest", "marks", "num_computed")

    def __init__(self, num_null: int = 0, blocks: Sequence[BlockId] = ()) -> None:
        super().__init__(num_null, blocks)
        self.marks: list[KeptMark] = []
        self.num_computed = 0
        self.latest: tuple[BlockId, bytes] | None = None

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
            if not table.is_made(mark) or pool.index.digest(block) is not None:
                continue
            digest = digests[mark.blocks - 1]
            is_new = pool.publish(block, digest)
            if table.latest is not None:
                pool.forget(*table.latest)
            table.latest = (block, digest) if is_new and not mark.lasts else None

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
        self, pool: BlockPool, table: BlockTable, mark: KeptMark, block_size: int
    ) -> list[PlannedCopy]:
        table = _slots(table)
        # The last free slot is for a request that waits, unless the state lasts.
        if mark.tokens % block_size or pool.num_free <= (not mark.lasts):
            return []
        (fresh,) = pool.allocate(1)
        table.extend([fresh])
        table.marks.append(mark)
        return [(table.entries(0, 1)[0], fresh)]

    @override
    def advance(self, pool: BlockPool, table: BlockTable, num_tokens: int, block_size: int) -> None:
        table = _slots(table)
        table.num_computed = num_tokens
        # Those whose copy has been collected were published, if they ever are. The last of them
        # may be held longer.
        done = sum(mark.tokens < num_tokens for mark in table.marks)
        if done and table.marks[done - 1].held_for >= num_tokens:
            done -= 1
        if done:
            kept = table.kept
            pool.free(kept[:done])
            table.cut(len(kept))
            table.extend(kept[done:])
            table.marks = table.marks[done:]

    def _continued(
        self, pool: BlockPool, kept: Sequence[BlockId]
    ) -> tuple[BlockTable, list[PlannedCopy]]:
        """A table whose slot is a copy of what is kept, if anything is."""
        pool.share(kept)
        (fresh,) = pool.allocate(1)
        return SlotTable(0, [fresh]), [(source, fresh) for source in kept]
