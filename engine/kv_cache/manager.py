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
from engine.kv_cache.copies import NO_COPIES, StepCopies
from engine.kv_cache.groups import LayerGroup, window_blocks
from engine.request import Request
from engine.types import BlockId, RequestKey

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
    """Block tables of all live requests, over one pool per layer group.

    A request's way: `find_prefix` and `can_start` while it waits, `start` when it enters the batch,
    `allocate` before each step, `commit` after it; then `free`, or `preempt` and `start` again. The
    copies that these plan are collected by `take_copies`, once a step.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        pool_sizes: Sequence[int],
        block_size: int,
        *,
        share_blocks: bool = False,
        host_slots: Sequence[int] | None = None,
    ) -> None:
        """Plan for pools of these sizes.

        Args:
            groups, pool_sizes: the layer groups, and the blocks of each (null blocks not counted).
            block_size: tokens in a block.
            share_blocks: whether blocks that hold the same prefix are shared, and kept for later
                requests while nobody else needs them.
            host_slots: for each group, how many blocks the host can keep for preempted requests;
                None: none.
        """
        self.groups = tuple(groups)
        self.block_size = block_size
        self.pools = tuple(BlockPool(size) for size in pool_sizes)
        self._tables: dict[RequestKey, tuple[BlockTable, ...]] = {}

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

    def find_prefix(self, request: Request) -> int:
        """How many tokens at the request's front need not be computed if it starts now: those whose
        KV is kept on the host, or found in the prefix cache. Less than all: the last token is
        always computed. Takes nothing.
        """
        return 0

    def can_start(
        self, request: Request, num_found: int, first_chunk: int, spare_blocks: int
    ) -> bool:
        """Whether a request that holds nothing has room for all its tokens, leaving `spare_blocks`
        in each group.

        A group with full attention must have room for all tokens; a sliding one for what is found
        and the first chunk, since what the window leaves behind is given back before the next.

        Args:
            num_found: what `find_prefix` has said.
            first_chunk: how many tokens the first step computes.
        """
        for group, pool in zip(self.groups, self.pools, strict=True):
            tokens = request.num_tokens if group.window is None else num_found + first_chunk
            if self._blocks_for(tokens) + spare_blocks > pool.num_free:
                return False
        return True

    def start(self, request: Request) -> int:
        """Give a request that holds nothing the blocks of what `find_prefix` finds.

        Returns:
            How many tokens those are: the request's num_computed_tokens from here on.
        """
        return 0

    def allocate(self, key: RequestKey, num_tokens: int) -> bool:
        """Grow the request's tables to cover `num_tokens` positions in every group, or change
        nothing.

        Returns:
            Whether all groups had the blocks.
        """
        needed = self._blocks_for(num_tokens)
        tables = self._tables.get(key)
        for index, pool in enumerate(self.pools):
            if needed - (tables[index].length if tables is not None else 0) > pool.num_free:
                return False
        if tables is None:
            tables = tuple(BlockTable() for _ in self.groups)
            self._tables[key] = tables
        for table, pool in zip(tables, self.pools, strict=True):
            if needed > table.length:
                table.extend(pool.allocate(needed - table.length))
        return True

    def commit(self, request: Request, num_computed_tokens: int) -> None:
        """Record that the KV of the request's first tokens is in its blocks, and that these tokens
        are known: full blocks become sharable, and blocks of sliding groups that no later token
        can attend to are given back.

        The next token stands at position num_computed_tokens and sees the window − 1 positions
        before it.
        """
        tables = self._tables[request.key]
        for group, table, pool in zip(self.groups, tables, self.pools, strict=True):
            if group.window is not None:
                first_visible = num_computed_tokens - group.window + 1
                if first_visible >= self.block_size:
                    pool.free(table.release_before(first_visible // self.block_size))

    def fork(self, parent: Request, child: Request) -> int | None:
        """Let a child, which holds nothing, share its parent's blocks up to the last prompt token.

        Blocks that lie wholly before that token are shared; of the one that it stands in, the child
        gets a copy (see `take_copies`).

        Returns:
            The child's num_computed_tokens: the prompt's length − 1. None: there is no block for
            it, nothing was taken.
        """
        return None

    def preempt(self, request: Request) -> int:
        """Take a request's blocks. Its KV goes to the host if there is room.

        Returns:
            How many of its tokens' KV the host keeps; 0: all are computed again.
        """
        self.free(request.key)
        return 0

    def free(self, key: RequestKey) -> None:
        """Give back all that a request holds, here and on the host. Harmless if it has nothing."""
        tables = self._tables.pop(key, None)
        if tables is not None:
            for table, pool in zip(tables, self.pools, strict=True):
                pool.free(table.held())

    def take_copies(self) -> StepCopies:
        """The copies that were planned since the last call: the next step makes them."""
        return NO_COPIES

    def copies_failed(self, copies: StepCopies) -> frozenset[RequestKey]:
        """A step failed, so its copies may not have been made.

        Returns:
            The requests whose KV is thereby lost: each is to be freed and computed again.
        """
        return frozenset()

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes that no request holds."""

    def tables(self, key: RequestKey) -> tuple[BlockTable, ...]:
        """The request's block tables, one per group; they change as the request grows."""
        return self._tables[key]

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
