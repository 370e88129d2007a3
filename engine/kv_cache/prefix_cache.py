"""Finds the cached prefix that a request can start from, across all layer groups.

    tokens      │ block 0 │ block 1 │ block 2 │ block 3 │ …
    full        │   hit   │   hit   │   hit   │  miss   │      at most 3 blocks
    sliding     │  miss   │   hit   │   hit   │         │      3 blocks are possible if the next
                                              ▲              token's window reaches back at most
                                          next token         2 blocks: block 0's entry is null

The result is the longest length behind which every group's kind can go on. How far earlier prompts
went the same way, though no state is kept there, is told by the blocks of groups that attend; where
no layer attends, by a note of the digests that were computed. The search is O(blocks of the
request). Its answer is stored and its blocks are watched. A blocked request at the head of
the queue asks at every step. It gets its answer in O(1) until one of these blocks is added or
removed, gets its first holder, or loses its last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.contract.request import Request
from engine.contract.types import RequestKey
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.group_kinds import GroupMatch
from engine.kv_cache.groups import LayerGroup
from engine.kv_cache.prefix_index import PrefixWatch, SeenPrefixes, extend_block_hashes


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest prefix that all groups have.

    Attributes:
        num_blocks: its length in blocks.
        num_seen: how many blocks it would have if a state were kept wherever one may be.
        groups: each group's blocks.
    """

    num_blocks: int
    num_seen: int
    groups: tuple[GroupMatch, ...]


class PrefixCache:
    """Searches for prefixes and stores the last answer. Changes nothing but the request's
    hashes.
    """

    def __init__(
        self, groups: Sequence[LayerGroup], pools: Sequence[BlockPool], block_size: int
    ) -> None:
        """Start watching the pools' indexes."""
        self._groups = tuple((group.kind, pool) for group, pool in zip(groups, pools, strict=True))
        self._block_size = block_size
        self._watch = PrefixWatch()
        attends = any(not group.kind.keeps for group in groups)
        self._seen = None if attends else SeenPrefixes(self._watch)
        for pool in pools:
            pool.index.watch = self._watch
        self._asked: tuple[RequestKey, int, int] | None = None
        self._answer = PrefixMatch(0, 0, tuple(GroupMatch() for _ in groups))

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

    def note(self, digests: Sequence[bytes]) -> None:
        """Record that these blocks of a request were computed."""
        if self._seen is not None:
            self._seen.note(digests)

    def forget(self) -> None:
        """Forget what was noted."""
        if self._seen is not None:
            self._seen.clear()

    def _search(self, digests: Sequence[bytes]) -> PrefixMatch:
        size = self._block_size
        seen = fits = [True] * (len(digests) + 1)
        for kind, pool in self._groups:
            found = kind.fits(pool.index, digests[: len(fits) - 1], size)
            fits = [one and other for one, other in zip(fits, found, strict=False)]
            if not kind.keeps:
                seen = [one and other for one, other in zip(seen, found, strict=False)]
        length = _longest(fits)
        num_seen = _longest(seen) if self._seen is None else self._seen.reach(digests, length)
        prefix = digests[:length]
        groups = tuple(kind.match(pool, prefix, size) for kind, pool in self._groups)
        return PrefixMatch(length, num_seen, groups)


def _longest(fits: Sequence[bool]) -> int:
    return max(length for length, is_fit in enumerate(fits) if is_fit)
