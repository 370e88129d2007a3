"""Finds the cached prefix that a request can start from, across all layer groups.

    tokens      │ block 0 │ block 1 │ block 2 │ block 3 │ …
    full        │   hit   │   hit   │   hit   │  miss   │      at most 3 blocks
    sliding     │  miss   │   hit   │   hit   │         │      3 blocks are possible if the next
                                              ▲              token's window reaches back at most
                                          next token         2 blocks: block 0's entry is null

The result is the longest length that every group has. The search is O(blocks of the request). Its
answer is stored and its blocks are watched. A blocked request at the head of the queue asks at
every step. It gets its answer in O(1) until one of these blocks is added or removed, gets its first
holder, or loses its last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.contract.request import Request
from engine.contract.types import BlockId, RequestKey
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.groups import LayerGroup
from engine.kv_cache.prefix_index import PrefixIndex, PrefixWatch, extend_block_hashes


@dataclass(frozen=True, slots=True)
class GroupMatch:
    """The blocks of a prefix in one group.

    Attributes:
        first: the number of leading null entries, which the window does not reach.
        blocks: the entries that follow.
        num_cached: how many of these blocks have no holder now.
    """

    first: int = 0
    blocks: tuple[BlockId, ...] = ()
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest prefix that all groups have: its length in blocks, and each group's blocks."""

    num_blocks: int
    groups: tuple[GroupMatch, ...]


class PrefixCache:
    """Searches for prefixes and stores the last answer. Changes nothing but the request's
    hashes.
    """

    def __init__(
        self, groups: Sequence[LayerGroup], pools: Sequence[BlockPool], block_size: int
    ) -> None:
        """Start watching the pools' indexes."""
        self._pools = tuple(pools)
        self._block_size = block_size
        # How many blocks before a boundary the next token attends to; None: all.
        self._reaches = tuple(
            None if group.window is None else -(-(group.window - 1) // block_size)
            for group in groups
        )
        self._watch = PrefixWatch()
        for pool in pools:
            pool.index.watch = self._watch
        self._asked: tuple[RequestKey, int, int] | None = None
        self._answer = PrefixMatch(0, tuple(GroupMatch() for _ in groups))

    def find(self, request: Request) -> PrefixMatch:
        """Return the longest cached prefix that excludes at least the request's last token.

        It consists of whole blocks of known tokens.
        """
        known = request.num_tokens - request.num_pending_tokens
        num_blocks = min(known, request.num_tokens - 1) // self._block_size
        asked = (request.key, num_blocks, request.rope_group)
        if asked != self._asked or self._watch.is_stale:
            extend_block_hashes(request, num_blocks, self._block_size)
            digests = request.block_hashes[:num_blocks]
            if asked != self._asked:
                self._watch.digests = frozenset(digests)
                self._asked = asked
            self._answer = self._search(digests)
            self._watch.is_stale = False
        return self._answer

    def _search(self, digests: Sequence[bytes]) -> PrefixMatch:
        indexes = [pool.index for pool in self._pools]
        length = len(digests)
        for index, reach in zip(indexes, self._reaches, strict=True):
            if reach is None:
                length = _leading_hits(index, digests[:length])
        length = self._longest_agreed(digests, length)
        groups = []
        for pool, reach in zip(self._pools, self._reaches, strict=True):
            first = 0 if reach is None else max(0, length - reach)
            found = (pool.index.block(digest) for digest in digests[first:length])
            blocks = tuple(block for block in found if block is not None)
            groups.append(GroupMatch(first, blocks, sum(map(pool.is_cached, blocks))))
        return PrefixMatch(length, tuple(groups))

    def _longest_agreed(self, digests: Sequence[bytes], limit: int) -> int:
        """Return the longest length up to `limit` for which all sliding groups have their blocks.

        This takes one pass from the front. `runs` counts the consecutive hits that end at each
        block.
        """
        sliding = [
            (pool.index, reach)
            for pool, reach in zip(self._pools, self._reaches, strict=True)
            if reach is not None
        ]
        if not sliding:
            return limit
        runs = [0] * len(sliding)
        longest = 0
        for length, digest in enumerate(digests[:limit], start=1):
            agreed = True
            for i, (index, reach) in enumerate(sliding):
                runs[i] = runs[i] + 1 if index.block(digest) is not None else 0
                agreed = agreed and runs[i] >= min(length, reach)
            if agreed:
                longest = length
        return longest


def _leading_hits(index: PrefixIndex, digests: Sequence[bytes]) -> int:
    for count, digest in enumerate(digests):
        if index.block(digest) is None:
            return count
    return len(digests)
