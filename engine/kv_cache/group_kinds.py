"""What a layer group keeps of a request's tokens, and for how long. The manager asks a group's kind
and knows none of them.

    full        a block for every `block_size` tokens, as long as the request runs
    sliding     the same, but blocks behind the window are freed
    a slot      one block, which every step overwrites, for layers that carry a state from token to
                token (`state_slot`). What others hold is copied, not shared.

A prefix is found if every kind can go on behind it, a choice is forked where every kind can, and
tables of different kinds need not be equally long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from typing_extensions import override

from engine.contract.types import BlockId
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class GroupMatch:
    """The blocks of a prefix in one group.

    Attributes:
        first: the number of leading null entries, which no later token attends to.
        blocks: the entries that follow.
        num_cached: how many of these blocks have no holder now.
        is_copied: whether a request copies the blocks instead of sharing them.
    """

    first: int = 0
    blocks: tuple[BlockId, ...] = ()
    num_cached: int = 0
    is_copied: bool = False


PlannedCopy = tuple[BlockId, BlockId]
"""The source and target of a copy on the device, which the next step makes. The source has a holder
for it until then, unless it is the request's own.
"""


class KeptMark(NamedTuple):
    """A kept state of a request.

    Attributes:
        tokens, blocks: how much of its request it has seen, in tokens and in blocks of other
            groups.
        lasts: whether it stays when a later one is kept.
        held_for: for how many computed tokens the request holds it, because its other choices go on
            from there.
    """

    tokens: int
    blocks: int
    lasts: bool
    held_for: int


class GroupKind(ABC):
    """The questions. `block_size` is the number of tokens in a block.

    Attributes:
        window: the number of tokens that a token attends to, including itself; None if that is not
            bounded, or not a question of attention.
        advances: whether `advance` does anything.
        keeps: whether `keep` does anything.
        grows: whether a request needs more blocks as it gets longer.
    """

    window: int | None = None
    advances: bool = False
    keeps: bool = False
    grows: bool = True

    # ---- sizes ---------------------------------------------------------------------------------

    @abstractmethod
    def num_entries(self, num_tokens: int, block_size: int) -> int:
        """Return the number of table entries for a request's first `num_tokens` tokens."""

    @abstractmethod
    def first_visible(self, position: int, block_size: int) -> int:
        """Return the first entry that the token at a position, or a later one, needs."""

    @abstractmethod
    def tokens_at_start(self, num_tokens: int, first_step: int) -> int:
        """Return for how many tokens there must be room when a request starts.

        Args:
            num_tokens: all its tokens.
            first_step: those that are known after the first step.
        """

    @abstractmethod
    def most_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """Return the most blocks that a request of `num_tokens` tokens holds, if steps compute at
        most `step_tokens` of them.
        """

    @abstractmethod
    def pool_blocks(
        self, num_blocks: int, max_requests: int, max_batch_tokens: int, block_size: int
    ) -> int:
        """Return how many blocks the group needs to never be the bottleneck, where a group with
        full attention has `num_blocks`.
        """

    # ---- prefixes ------------------------------------------------------------------------------

    @abstractmethod
    def fits(self, index: PrefixIndex, digests: Sequence[bytes], block_size: int) -> list[bool]:
        """Return for each number of leading blocks, from 0 on, whether a request can go on behind
        them. The list may end early.
        """

    @abstractmethod
    def match(self, pool: BlockPool, digests: Sequence[bytes], block_size: int) -> GroupMatch:
        """Return the blocks of a prefix that fits, given by all its digests."""

    @abstractmethod
    def publish(
        self, pool: BlockPool, table: BlockTable, digests: Sequence[bytes], first: int
    ) -> None:
        """Make a request's full and computed blocks shareable. Called before `advance`; if the kind
        keeps anything, also where no block became full.

        Args:
            digests: those of all these blocks.
            first: how many of them were published before.
        """

    # ---- a request -----------------------------------------------------------------------------

    def table(self, first: int = 0, blocks: Sequence[BlockId] = ()) -> BlockTable:
        """Return a table of `first` null entries, followed by `blocks`."""
        return BlockTable(first, blocks)

    @abstractmethod
    def start(self, pool: BlockPool, match: GroupMatch) -> tuple[BlockTable, list[PlannedCopy]]:
        """Return the table of a request that starts behind a prefix, for which there is room."""

    def fork_position(self, table: BlockTable, position: int, block_size: int) -> int:
        """Return from which position on, at most the given one, another choice can compute its own
        tokens.
        """
        return position

    @abstractmethod
    def fork(
        self, pool: BlockPool, table: BlockTable, position: int, block_size: int
    ) -> tuple[BlockTable, list[PlannedCopy]]:
        """Return the table of another choice that computes its own tokens from a position on. There
        is a free block.
        """

    def keep(
        self, pool: BlockPool, table: BlockTable, mark: KeptMark, block_size: int
    ) -> list[PlannedCopy]:
        """Return copies of what later steps overwrite, to be made when those that compute the
        mark's tokens have run. Called when they were launched.
        """
        return []

    def advance(  # noqa: B027  # optional
        self, pool: BlockPool, table: BlockTable, num_tokens: int, block_size: int
    ) -> None:
        """Record that a request's first `num_tokens` tokens were computed."""


@dataclass(frozen=True)
class FullAttention(GroupKind):
    """A token attends to all before it."""

    @override
    def num_entries(self, num_tokens: int, block_size: int) -> int:
        return (num_tokens + block_size - 1) // block_size

    @override
    def first_visible(self, position: int, block_size: int) -> int:
        return 0

    @override
    def tokens_at_start(self, num_tokens: int, first_step: int) -> int:
        return num_tokens

    @override
    def most_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        return self.num_entries(num_tokens, block_size)

    @override
    def pool_blocks(
        self, num_blocks: int, max_requests: int, max_batch_tokens: int, block_size: int
    ) -> int:
        return num_blocks

    @override
    def fits(self, index: PrefixIndex, digests: Sequence[bytes], block_size: int) -> list[bool]:
        for count, digest in enumerate(digests):
            if index.block(digest) is None:
                return [True] * (count + 1)
        return [True] * (len(digests) + 1)

    @override
    def match(self, pool: BlockPool, digests: Sequence[bytes], block_size: int) -> GroupMatch:
        first = self.first_visible(len(digests) * block_size, block_size)
        found = (pool.index.block(digest) for digest in digests[first:])
        blocks = tuple(block for block in found if block is not None)
        return GroupMatch(first, blocks, sum(map(pool.is_cached, blocks)))

    @override
    def publish(
        self, pool: BlockPool, table: BlockTable, digests: Sequence[bytes], first: int
    ) -> None:
        first = max(first, table.released)
        for entry, block in enumerate(table.entries(first, len(digests)), start=first):
            pool.publish(block, digests[entry])

    @override
    def start(self, pool: BlockPool, match: GroupMatch) -> tuple[BlockTable, list[PlannedCopy]]:
        pool.share(match.blocks)
        return BlockTable(match.first, match.blocks), []

    @override
    def fork(
        self, pool: BlockPool, table: BlockTable, position: int, block_size: int
    ) -> tuple[BlockTable, list[PlannedCopy]]:
        entry, offset = divmod(position, block_size)
        first = self.first_visible(position, block_size)
        shared = table.entries(first, entry)
        pool.share(shared)
        (fresh,) = pool.allocate(1)
        copies: list[PlannedCopy] = []
        if offset:
            (source,) = table.entries(entry, entry + 1)
            pool.share([source])
            copies.append((source, fresh))
        return BlockTable(first, [*shared, fresh]), copies


@dataclass(frozen=True)
class SlidingAttention(FullAttention):
    """A token attends to the last `window` tokens, including itself."""

    window: int = field()  # without the base's default
    advances = True

    @override
    def first_visible(self, position: int, block_size: int) -> int:
        return max(0, position - self.window + 1) // block_size

    @override
    def tokens_at_start(self, num_tokens: int, first_step: int) -> int:
        # Blocks that fall behind the window are freed before the next step.
        return first_step

    @override
    def most_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        # A step reads window − 1 earlier tokens and writes its own; either end may lie within a
        # block.
        within = (self.window - 1 + step_tokens + block_size - 1) // block_size + 1
        return min(within, self.num_entries(num_tokens, block_size))

    @override
    def pool_blocks(
        self, num_blocks: int, max_requests: int, max_batch_tokens: int, block_size: int
    ) -> int:
        # Every running request holds the blocks of its window, and the step's token budget is
        # divided among the requests.
        per_request = (self.window + block_size - 1) // block_size + 2
        budget = self.num_entries(max_batch_tokens, block_size)
        return min(num_blocks, max_requests * per_request + budget)

    @override
    def fits(self, index: PrefixIndex, digests: Sequence[bytes], block_size: int) -> list[bool]:
        reach = -(-(self.window - 1) // block_size)  # blocks before a boundary
        fits, run = [True], 0  # consecutive hits that end here
        for length, digest in enumerate(digests, start=1):
            run = run + 1 if index.block(digest) is not None else 0
            fits.append(run >= min(length, reach))
        return fits

    @override
    def advance(self, pool: BlockPool, table: BlockTable, num_tokens: int, block_size: int) -> None:
        first = self.first_visible(num_tokens, block_size)
        if first > table.released:
            pool.free(table.release_before(first))
