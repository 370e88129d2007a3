"""The blocks of one layer group: which are free. Ids only; the tensors live in
`engine.runner.kv_tensors`.

block id   0          1 … num_blocks
           null       allocatable
           (takes the writes of padding, is never allocated, and stands in block tables where a
           sliding window has moved on)
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.types import BlockId

NULL_BLOCK = BlockId(0)
"""The block that belongs to nobody."""


class BlockPool:
    """Hands out blocks and takes them back. free + used = total at all times.

    Last in, first out: a block that was just freed is likely still in the processor's cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: list[BlockId] = [BlockId(i) for i in range(num_blocks, 0, -1)]
        self._used: set[BlockId] = set()

    @property
    def num_free(self) -> int:
        """How many blocks can be allocated now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """How many blocks are held by requests."""
        return len(self._used)

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` blocks.

        Raises:
            ValueError: fewer are free. Callers check `num_free` first; nothing was taken.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        self._used.update(taken)
        return taken

    def free(self, blocks: Iterable[BlockId]) -> None:
        """Give blocks back.

        Raises:
            ValueError: a block is not in use (freed twice, or never allocated).
        """
        for block in blocks:
            if block not in self._used:
                raise ValueError(f"block {block} is not in use")
            self._used.remove(block)
            self._free.append(block)

    def check_integrity(self) -> None:
        """Check that every block is either free or used, once.

        Raises:
            ValueError: blocks were lost or doubled.
        """
        free = set(self._free)
        if len(free) != len(self._free) or free & self._used:
            raise ValueError("a block is listed twice")
        if free | self._used != set(range(1, self.num_blocks + 1)):
            raise ValueError("blocks were lost")
