"""What the blocks of one layer group hold: digests of prefixes, and who holds which.

A full block's KV depends on its tokens and on all tokens before them. So its digest is chained:

    root   = H(salt)
    digest = H(the digest of the block before it, or the root ‖ the block's token ids)

H is BLAKE2b with 16 bytes (RFC 7693): the salt separates tenants, so nobody may be able to make a
block of his own that answers to another's digest. Python's hash() can be forged at will.
"""

from __future__ import annotations

from hashlib import blake2b

from engine.request import Request
from engine.types import BlockId

_DIGEST_BYTES = 16

# What each digest begins with; `person` keeps a salt from standing for a block. Only ever copied:
# that takes half the time of making one anew.
_SALT_HASH = blake2b(digest_size=_DIGEST_BYTES, person=b"salt")
_BLOCK_HASH = blake2b(digest_size=_DIGEST_BYTES, person=b"block")


def extend_block_hashes(request: Request, num_blocks: int, block_size: int) -> None:
    """Fill `request.block_hashes` up to its first `num_blocks` blocks, whose tokens must be known.

    Each block is hashed once in the request's life: known tokens do not change.
    """
    digests = request.block_hashes
    if len(digests) >= num_blocks:
        return
    parent = digests[-1] if digests else _digest(_SALT_HASH, request.spec.cache_salt)
    start, stop = len(digests) * block_size, num_blocks * block_size
    tokens = request.token_ids[start:stop]
    block_bytes = block_size * tokens.itemsize
    data = tokens.tobytes()
    for offset in range(0, len(data), block_bytes):
        parent = _digest(_BLOCK_HASH, parent + data[offset : offset + block_bytes])
        digests.append(parent)


def _digest(template: blake2b, data: bytes) -> bytes:
    made = template.copy()
    made.update(data)
    return made.digest()


class PrefixWatch:
    """The digests that an answer stands on, and whether anything has happened to one of them."""

    __slots__ = ("digests", "is_stale")

    def __init__(self) -> None:
        self.digests: frozenset[bytes] = frozenset()
        self.is_stale = True


class PrefixIndex:
    """Digest ↔ block, one to one. Filled and emptied by the group's `BlockPool`.

    Attributes:
        watch: is told of every digest that comes, goes, or whose block finds or loses a holder.
    """

    __slots__ = ("_blocks", "_digests", "watch")

    def __init__(self, watch: PrefixWatch | None = None) -> None:
        self.watch = watch if watch is not None else PrefixWatch()
        self._blocks: dict[bytes, BlockId] = {}
        self._digests: dict[BlockId, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def block(self, digest: bytes) -> BlockId | None:
        """The block that holds this prefix's last tokens."""
        return self._blocks.get(digest)

    def digest(self, block: BlockId) -> bytes | None:
        """What a block holds; None: nothing that can be shared."""
        return self._digests.get(block)

    def add(self, block: BlockId, digest: bytes) -> bool:
        """Enter a block. False: an equal one is there already, this one stays private.

        Raises:
            ValueError: the block holds something else.
        """
        if block in self._digests:
            raise ValueError(f"block {block} has a digest already")
        if digest in self._blocks:
            return False
        self._blocks[digest] = block
        self._digests[block] = digest
        self._tell(digest)
        return True

    def remove(self, block: BlockId) -> None:
        """Forget what a block holds."""
        digest = self._digests.pop(block)
        del self._blocks[digest]
        self._tell(digest)

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self._digests.clear()
        self.watch.is_stale = True

    def holders_changed(self, block: BlockId) -> None:
        """Note that a block found its first holder, or lost its last."""
        self._tell(self._digests[block])

    def blocks(self) -> frozenset[BlockId]:
        """All blocks that hold something."""
        return frozenset(self._digests)

    def check_integrity(self) -> None:
        """Check that the two directions agree.

        Raises:
            ValueError: they do not.
        """
        if {block: digest for digest, block in self._blocks.items()} != self._digests:
            raise ValueError("the prefix index and its blocks disagree")

    def _tell(self, digest: bytes) -> None:
        if digest in self.watch.digests:
            self.watch.is_stale = True
