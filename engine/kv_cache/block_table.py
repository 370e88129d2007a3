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
    """One request's blocks in one group, in the order of the positions.

    Attributes:
        blocks: int32 [capacity]; the first `length` entries are in use.
        length: how many entries are in use.
        released: how many leading entries were freed, or never allocated (and are the null block).
    """

    __slots__ = ("blocks", "length", "released")

    def __init__(self, num_null: int = 0, blocks: Sequence[BlockId] = ()) -> None:
        """Make a table of `num_null` null entries, which a sliding window has left behind, followed
        by these blocks.
        """
        self.length = self.released = num_null
        capacity = max(_INITIAL_CAPACITY, num_null + len(blocks))
        self.blocks: npt.NDArray[np.int32] = np.full(capacity, NULL_BLOCK, dtype=np.int32)
        self.extend(blocks)

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
        """Set the entries before `index` to the null block and return the blocks that they held."""
        index = min(index, self.length)
        if index <= self.released:
            return []
        freed = [BlockId(block) for block in self.blocks[self.released : index].tolist()]
        self.blocks[self.released : index] = NULL_BLOCK
        self.released = index
        return freed

    def entries(self, start: int, stop: int) -> list[BlockId]:
        """The blocks of entries start to stop - 1."""
        return [BlockId(block) for block in self.blocks[start:stop].tolist()]

    def held(self) -> list[BlockId]:
        """The blocks that the table holds now."""
        return self.entries(self.released, self.length)
