"""The blocks of one layer group: which are free, used, or cached for their prefix.

The pool manages only ids; the tensors are in `engine.runner.kv_tensors`.

    block id   0      1 … num_blocks
               null   allocatable

The null block receives the writes of padding and is never allocated. It also fills the entries of
block tables that have fallen behind a sliding window.

    free ──allocate──▶ used                 `publish` gives a used block its digest
    used ──free──▶ free                     by its last holder, if it has no digest
    used ──free──▶ cached                   by its last holder, if it has one; the prefix is kept
    cached ──share──▶ used                  a request uses the prefix again
    cached ──allocate──▶ used               evicted if no block is free, least recently used first
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from engine.contract.types import BlockId
from engine.kv_cache.prefix_index import PrefixIndex

NULL_BLOCK = BlockId(0)
"""The block that is never allocated."""


class BlockPool:
    """Allocates blocks, counts their holders, and takes them back.

    The invariant free + used + cached = total always holds. The most recently freed block is
    allocated first, because it is likely still in the processor's cache.

    Attributes:
        num_blocks: all blocks, without the null block.
        index: finds blocks by the prefix that they keep.
        num_published: how often a block became shareable.
        num_evicted: how often a cached block was given to another use.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.index = PrefixIndex()
        self._free: list[BlockId] = [BlockId(i) for i in range(num_blocks, 0, -1)]
        self._holders: dict[BlockId, int] = {}
        self._cached: OrderedDict[BlockId, None] = OrderedDict()  # least recently used first
        self.num_published = 0
        self.num_evicted = 0

    @property
    def num_free(self) -> int:
        """The number of blocks that can be allocated now, both free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """The number of blocks that requests hold."""
        return len(self._holders)

    @property
    def num_cached(self) -> int:
        """The number of blocks that keep a prefix and have no holder."""
        return len(self._cached)

    def is_cached(self, block: BlockId) -> bool:
        """Return whether a block keeps a prefix and has no holder."""
        return block in self._cached

    def holders(self, block: BlockId) -> int:
        """Return the number of holders of a block."""
        return self._holders.get(block, 0)

    def used_blocks(self) -> frozenset[BlockId]:
        """Return the blocks that have a holder."""
        return frozenset(self._holders)

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` blocks, each with one holder and no prefix.

        Raises:
            ValueError: fewer are available; nothing was taken. Callers check `num_free` first.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} free")
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        while len(taken) < count:
            block, _ = self._cached.popitem(last=False)
            self.index.remove(block)
            self.num_evicted += 1
            taken.append(block)
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add a holder to blocks that are used or cached.

        Raises:
            ValueError: a block is free.
        """
        for block in blocks:
            if block in self._holders:
                self._holders[block] += 1
            elif block in self._cached:
                del self._cached[block]
                self._holders[block] = 1
                self.index.holders_changed(block)
            else:
                raise ValueError(f"block {block} holds nothing that could be shared")

    def free(self, blocks: Iterable[BlockId]) -> None:
        """Remove one holder from each block.

        Blocks without holders become free, or cached if they keep a prefix. Cached blocks are
        evicted in the order of the list.

        Raises:
            ValueError: a block is not used (freed twice, or never allocated).
        """
        for block in blocks:
            holders = self._holders.get(block)
            if holders is None:
                raise ValueError(f"block {block} is not in use")
            if holders > 1:
                self._holders[block] = holders - 1
                continue
            del self._holders[block]
            if self.index.digest(block) is None:
                self._free.append(block)
            else:
                self._cached[block] = None
                self.index.holders_changed(block)

    def publish(self, block: BlockId, digest: bytes) -> bool:
        """Make a used block shareable.

        The block must be full and computed, and hold the prefix with this digest.

        Returns:
            Whether the block was published. It stays private if an equal block already exists.

        Raises:
            ValueError: the block is not used, or has a digest.
        """
        if block not in self._holders:
            raise ValueError(f"block {block} is not in use")
        is_new = self.index.add(block, digest)
        self.num_published += is_new
        return is_new

    def forget(self, block: BlockId, digest: bytes) -> None:
        """Free a block if it keeps the prefix with this digest and has no holder."""
        if block in self._cached and self.index.digest(block) == digest:
            del self._cached[block]
            self.index.remove(block)
            self._free.append(block)

    def forget_prefixes(self) -> None:
        """Remove all digests; cached blocks become free."""
        self.index.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def check_integrity(self) -> None:
        """Check that every block is exactly one of free, used and cached, and that the index
        agrees.

        Raises:
            ValueError: blocks were lost or duplicated, or a sharing invariant is broken.
        """
        self.index.check_integrity()
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free) or free & cached or (free | cached) & set(self._holders):
            raise ValueError("a block is listed twice")
        if free | cached | set(self._holders) != set(range(1, self.num_blocks + 1)):
            raise ValueError("blocks were lost")
        if any(count < 1 for count in self._holders.values()):
            raise ValueError("a used block has no holder")
        indexed = self.index.blocks()
        if not cached <= indexed:
            raise ValueError("a cached block has no digest")
        if indexed & free:
            raise ValueError("a free block has a digest")
