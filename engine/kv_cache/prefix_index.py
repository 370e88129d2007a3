"""Maps digests of prefixes to the blocks of one layer group that hold them.

The KV of a full block depends on its tokens and on all tokens before them. So digests are chained:

    root   = H(salt)
             H(root ‖ the rope group) if that is not 0 (see `engine.contract.rope`)
             H(root ‖ the digest of the adapter's content) if the request has one
    digest = H(the digest of the previous block, or the root ‖ the block's token ids)

H is BLAKE2b with 16 bytes (RFC 7693). The salt separates tenants. No tenant may be able to produce
a block with the digest of another tenant's block, and collisions of Python's hash() are easy to
produce.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from engine.contract.request import Request
from engine.contract.types import BlockId

_DIGEST_BYTES = 16

# The initial states of the digests; `person` keeps a salt from being taken for a block. Copying a
# state takes half the time of making one.
_SALT_HASH = blake2b(digest_size=_DIGEST_BYTES, person=b"salt")
_BLOCK_HASH = blake2b(digest_size=_DIGEST_BYTES, person=b"block")
_ROPE_HASH = blake2b(digest_size=_DIGEST_BYTES, person=b"rope")
_ADAPTER_HASH = blake2b(digest_size=_DIGEST_BYTES, person=b"adapter")


def extend_block_hashes(request: Request, num_blocks: int, block_size: int) -> None:
    """Fill `request.block_hashes` for its first `num_blocks` blocks, whose tokens must be known.

    Each block of a request is hashed only once, because known tokens do not change.
    """
    digests = request.block_hashes
    if len(digests) >= num_blocks:
        return
    parent = digests[-1] if digests else _root(request)
    start, stop = len(digests) * block_size, num_blocks * block_size
    tokens = request.token_ids[start:stop]
    block_bytes = block_size * tokens.itemsize
    data = tokens.tobytes()
    for offset in range(0, len(data), block_bytes):
        parent = _digest(_BLOCK_HASH, parent + data[offset : offset + block_bytes])
        digests.append(parent)


def _root(request: Request) -> bytes:
    root = _digest(_SALT_HASH, request.spec.cache_salt)
    if request.rope_group:
        root = _digest(_ROPE_HASH, root + request.rope_group.to_bytes(8, "little"))
    if request.adapter is not None:
        root = _digest(_ADAPTER_HASH, root + request.adapter.digest)
    return root


def _digest(template: blake2b, data: bytes) -> bytes:
    made = template.copy()
    made.update(data)
    return made.digest()


class PrefixWatch:
    """The digests that an answer depends on, and whether any of them has changed."""

    __slots__ = ("digests", "is_stale")

    def __init__(self) -> None:
        self.digests: frozenset[bytes] = frozenset()
        self.is_stale = True

    def tell(self, digest: bytes) -> None:
        """Record that something has changed about a digest."""
        if digest in self.digests:
            self.is_stale = True


class PrefixIndex:
    """A one-to-one mapping between digests and blocks, maintained by the group's `BlockPool`.

    Attributes:
        watch: notified when a digest is added or removed, or when its block gets its first holder
            or loses its last.
    """

    __slots__ = ("_blocks", "_digests", "watch")

    def __init__(self) -> None:
        self.watch = PrefixWatch()
        self._blocks: dict[bytes, BlockId] = {}
        self._digests: dict[BlockId, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def block(self, digest: bytes) -> BlockId | None:
        """Return the block that holds the last tokens of this prefix, or None if there is none."""
        return self._blocks.get(digest)

    def digest(self, block: BlockId) -> bytes | None:
        """Return the digest of a block's prefix, or None if the block cannot be shared."""
        return self._digests.get(block)

    def add(self, block: BlockId, digest: bytes) -> bool:
        """Add a block, and return whether it was added.

        The block stays private if an equal one already exists.

        Raises:
            ValueError: the block has another digest.
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
        """Remove a block."""
        digest = self._digests.pop(block)
        del self._blocks[digest]
        self._tell(digest)

    def clear(self) -> None:
        """Remove all blocks."""
        self._blocks.clear()
        self._digests.clear()
        self.watch.is_stale = True

    def holders_changed(self, block: BlockId) -> None:
        """Record that a block got its first holder or lost its last."""
        self._tell(self._digests[block])

    def blocks(self) -> frozenset[BlockId]:
        """Return all blocks that have a digest."""
        return frozenset(self._digests)

    def check_integrity(self) -> None:
        """Check that both directions of the mapping agree.

        Raises:
            ValueError: they do not agree.
        """
        if {block: digest for digest, block in self._blocks.items()} != self._digests:
            raise ValueError("the prefix index and its blocks disagree")

    def _tell(self, digest: bytes) -> None:
        self.watch.tell(digest)


class SeenPrefixes:
    """The digests of blocks that were computed lately, for models whose layers keep no blocks that
    would show where prompts part.

    It holds at most `most` digests. Those that were noted first go first.
    """

    __slots__ = ("_digests", "_most", "_watch")

    def __init__(self, watch: PrefixWatch, most: int = 1 << 15) -> None:
        """Start empty. The default takes about 6 MB, for a million tokens in blocks of 32."""
        self._digests: OrderedDict[bytes, None] = OrderedDict()
        self._most = most
        self._watch = watch

    def __len__(self) -> int:
        return len(self._digests)

    def note(self, digests: Sequence[bytes]) -> None:
        """Record that these blocks of a request were computed."""
        for digest in digests:
            if digest in self._digests:
                self._digests.move_to_end(digest)
                continue
            self._digests[digest] = None
            self._watch.tell(digest)
            if len(self._digests) > self._most:
                self._watch.tell(self._digests.popitem(last=False)[0])

    def reach(self, digests: Sequence[bytes], start: int) -> int:
        """Return how many leading blocks were seen, of which the first `start` are known to be."""
        while start < len(digests) and digests[start] in self._digests:
            start += 1
        return start

    def clear(self) -> None:
        """Forget all."""
        self._digests.clear()
        self._watch.is_stale = True
