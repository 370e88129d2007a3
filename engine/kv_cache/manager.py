"""Which blocks each request holds, group by group: allocation, release, and the laws that they
obey.

    request ──▶ BlockTable per group        positions 0 … block_size−1 │ block_size … │ …
                                            blocks[0]                  │ blocks[1]    │ …

A table grows ahead of the tokens that are about to be computed. In a sliding group, entries that
the window has left behind are given back and become the null block, so that a long generation holds
a bounded number of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.kv_cache.block_pool import NULL_BLOCK, BlockPool
from engine.kv_cache.groups import LayerGroup, window_blocks
from engine.types import BlockId, RequestId

_INITIAL_CAPACITY = 8


class BlockTable:
    """One request's blocks in one group, in the order of the positions.

    Attributes:
        blocks: int32 [capacity]; the first `length` entries are in use.
        length: how many entries are in use.
        released: how many leading entries were given back (and hold the null block).
    """

    __slots__ = ("blocks", "length", "released")

    def __init__(self) -> None:
        self.blocks: npt.NDArray[np.int32] = np.zeros(_INITIAL_CAPACITY, dtype=np.int32)
        self.length = 0
        self.released = 0

    def extend(self, blocks: Sequence[BlockId]) -> None:
        """Append blocks for the positions that follow."""
        needed = self.length + len(blocks)
        if needed > len(self.blocks):
            grown = np.zeros(max(needed, 2 * len(self.blocks)), dtype=np.int32)
            grown[: self.length] = self.blocks[: self.length]
            self.blocks = grown
        self.blocks[self.length : needed] = blocks
        self.length = needed

    def release_before(self, index: int) -> list[BlockId]:
        """Null the entries before `index` and return the blocks that they held."""
        index = min(index, self.length)
        if index <= self.released:
            return []
        freed = [BlockId(block) for block in self.blocks[self.released : index].tolist()]
        self.blocks[self.released : index] = NULL_BLOCK
        self.released = index
        return freed

    def held(self) -> list[BlockId]:
        """The blocks that the table holds now."""
        return [BlockId(block) for block in self.blocks[self.released : self.length].tolist()]


class KVCacheManager:
    """Block tables of all live requests, over one pool per layer group."""

    def __init__(self, groups: Sequence[LayerGroup], pool_sizes: Sequence[int], block_size: int):
        self.groups = tuple(groups)
        self.block_size = block_size
        self.pools = tuple(BlockPool(size) for size in pool_sizes)
        self._tables: dict[RequestId, tuple[BlockTable, ...]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups, the null blocks not counted."""
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold, in all groups."""
        return sum(pool.num_used for pool in self.pools)

    def max_tokens_per_request(self, max_step_tokens: int) -> int:
        """The longest request (in tokens) that fits when it runs alone, with steps of at most
        `max_step_tokens`.

        0: a sliding group cannot hold even one step's window.
        """
        longest: int | None = None
        for group, pool in zip(self.groups, self.pools, strict=True):
            full = pool.num_blocks * self.block_size
            if group.window is None or pool.num_blocks < window_blocks(
                group.window, self.block_size, max_step_tokens
            ):
                longest = full if longest is None else min(longest, full)
        return 2**31 - 1 if longest is None else longest

    def can_admit(self, num_tokens: int, first_chunk: int, spare_blocks: int) -> bool:
        """Whether a request that holds nothing yet has room for its tokens, leaving `spare_blocks`
        in each group.

        A group with full attention must have room for all `num_tokens`; a sliding one for the first
        chunk, since what the window leaves behind is given back before the next.
        """
        for group, pool in zip(self.groups, self.pools, strict=True):
            tokens = num_tokens if group.window is None else first_chunk
            if self._blocks_for(tokens) + spare_blocks > pool.num_free:
                return False
        return True

    def allocate(self, request_id: RequestId, num_tokens: int) -> bool:
        """Grow the request's tables to cover `num_tokens` positions in every group, or change
        nothing.

        Returns:
            Whether all groups had the blocks.
        """
        needed = self._blocks_for(num_tokens)
        tables = self._tables.get(request_id)
        for index, pool in enumerate(self.pools):
            if needed - (tables[index].length if tables is not None else 0) > pool.num_free:
                return False
        if tables is None:
            tables = tuple(BlockTable() for _ in self.groups)
            self._tables[request_id] = tables
        for table, pool in zip(tables, self.pools, strict=True):
            if needed > table.length:
                table.extend(pool.allocate(needed - table.length))
        return True

    def release_outside_window(self, request_id: RequestId, num_computed_tokens: int) -> None:
        """Give back the blocks of sliding groups that no later token can attend to.

        The next token stands at position num_computed_tokens and sees the window − 1 positions
        before it.
        """
        tables = self._tables[request_id]
        for group, table, pool in zip(self.groups, tables, self.pools, strict=True):
            if group.window is not None:
                first_visible = num_computed_tokens - group.window + 1
                if first_visible >= self.block_size:
                    pool.free(table.release_before(first_visible // self.block_size))

    def free(self, request_id: RequestId) -> None:
        """Give all of a request's blocks back. Harmless if it holds none."""
        tables = self._tables.pop(request_id, None)
        if tables is not None:
            for table, pool in zip(tables, self.pools, strict=True):
                pool.free(table.held())

    def tables(self, request_id: RequestId) -> tuple[BlockTable, ...]:
        """The request's block tables, one per group; they change as the request grows."""
        return self._tables[request_id]

    def check_integrity(self) -> None:
        """Check that free + used = total in each group, and that every used block is in exactly one
        table.

        Raises:
            ValueError: a law is broken.
        """
        for index, pool in enumerate(self.pools):
            pool.check_integrity()
            held = [block for tables in self._tables.values() for block in tables[index].held()]
            if len(held) != len(set(held)) or len(held) != pool.num_used:
                raise ValueError(f"group {index}: tables hold {len(held)}, pool {pool.num_used}")

    def _blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size
