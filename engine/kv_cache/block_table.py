"""One request's blocks in one layer group.

request ──▶ BlockTable per group        positions 0 … block_size−1 │ block_size … │ …
                                        blocks[0]                  │ blocks[1]    │ …
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.contract.types import BlockId
from engine.kv_cache.block_pool import NULL_BLOCK

_INITIAL_CAPACITY = 8


class BlockTable:
    """One request's blocks in one group, ordered by position.

    Attributes:
        blocks: int32 [capacity]; the first `length` entries are in use.
        length: the number of entries in use.
        released: the number of leading entries that are the null block, because they were freed or
            never allocated.
        num_cuts: how often entries were removed from the end. A place that was used again since
            holds another block though the length is the same.
    """

    __slots__ = ("blocks", "length", "num_cuts", "released")

    def __init__(self, num_null: int = 0, blocks: Sequence[BlockId] = ()) -> None:
        """Create a table of `num_null` null entries, which are behind the sliding window, followed
        by `blocks`.
        """
        self.length = self.released = num_null
        self.num_cuts = 0
        capacity = max(_INITIAL_CAPACITY, num_null + len(blocks))
        self.blocks: npt.NDArray[np.int32] = np.full(capacity, NULL_BLOCK, dtype=np.int32)
        self.extend(blocks)

    def extend(self, blocks: Sequence[BlockId]) -> None:
        """Append blocks for the next positions."""
        needed = self.length + len(blocks)
        if needed > len(self.blocks):
            grown = np.zeros(max(needed, 2 * len(self.blocks)), dtype=np.int32)
            grown[: self.length] = self.blocks[: self.length]
            self.blocks = grown
        self.blocks[self.length : needed] = blocks
        self.length = needed

    def cut(self, count: int) -> list[BlockId]:
        """Remove the last `count` entries, which must not be released, and return them."""
        removed = self.entries(self.length - count, self.length)
        self.length -= count
        self.num_cuts += 1
        return removed

    def release_before(self, index: int) -> list[BlockId]:
        """Replace the entries before `index` with the null block and return the released blocks."""
        index = min(index, self.length)
        if index <= self.released:
            return []
        freed = [BlockId(block) for block in self.blocks[self.released : index].tolist()]
        self.blocks[self.released : index] = NULL_BLOCK
        self.released = index
        return freed

    def entries(self, start: int, stop: int) -> list[BlockId]:
        """Return the blocks of entries start to stop - 1."""
        return [BlockId(block) for block in self.blocks[start:stop].tolist()]

    def held(self) -> list[BlockId]:
        """Return the blocks that the table holds now."""
        return self.entries(self.released, self.length)
