"""Tracks which blocks each request holds in each group: allocation, sharing, release, invariants.

                 find_prefix, can_start
    waiting ───────────start────────────▶ running ── allocate, step, commit ──┐
       ▲      shares a cached prefix,     ▲  │  │  ▲                          │
       │      or restores from the host   │  │  │  └──────────────────────────┘
       │                                  │  │  └──free──▶ (ended: blocks with a prefix are cached)
       │                           fork ──┘  │
       └──────────────preempt────────────────┘  to the host, or to be computed again

Before tokens are computed, the tables grow to cover them. How long they must be, what is freed,
shared or copied in a group, and where a prefix ends is for the group's kind to say. In a sliding
group, blocks that have fallen behind the window are freed and their entries become the null block.
The number of blocks of a long generation is therefore bounded.

This module plans copies, but makes none. Plans are stored by request so that they can be dropped
with the request. `take_copies` returns them once per step; steps run on the device in the order of
these calls. The target block of a copy holds garbage until the step with the copy has begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from engine.contract.request import Request
from engine.contract.types import BlockId, RequestKey
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.copies import NO_COPIES, BlockCopy, StepCopies
from engine.kv_cache.group_kinds import GroupMatch, KeptMark, PlannedCopy
from engine.kv_cache.groups import LayerGroup
from engine.kv_cache.host_cache import HostCache
from engine.kv_cache.integrity import check_tables, check_targets
from engine.kv_cache.prefix_cache import PrefixCache, PrefixMatch
from engine.kv_cache.prefix_index import extend_block_hashes

__all__ = ["BlockTable", "KVCacheManager"]


class _Holding:
    """What a request holds.

    Attributes:
        tables: by group.
        num_covered: for how many tokens the tables have entries.
        num_published: the number of its blocks that `commit` has published.
    """

    __slots__ = ("num_covered", "num_published", "tables")

    def __init__(
        self, tables: tuple[BlockTable, ...], num_covered: int, num_published: int = 0
    ) -> None:
        self.tables = tables
        self.num_covered = num_covered
        self.num_published = num_published


class KVCacheManager:
    """The block tables of all live requests, with one pool per layer group.

    The calls for a request are `find_prefix` and `can_start` while it waits, `start` when it
    enters the batch, `allocate` before each step, and `commit` after it. Then comes `free`, or
    `preempt` and another `start`. Once per step, `take_copies` returns the copies planned by these
    calls.

    Attributes:
        groups, pools: the layer groups, and the blocks of each.
        block_size: the number of tokens in a block.
        keeps: whether a group's kind keeps what later steps overwrite, so that `launched` must be
            called.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        pool_sizes: Sequence[int],
        block_size: int,
        *,
        share_blocks: bool = False,
        host_blocks: Sequence[int] | None = None,
    ) -> None:
        """Create the pools.

        Args:
            groups: the layer groups.
            pool_sizes: the number of blocks of each group, without the null block.
            block_size: tokens per block.
            share_blocks: whether requests share blocks with the same prefix. If so, such blocks are
                kept for later requests until they are needed for something else.
            host_blocks: the number of host blocks for preempted requests in each group. None if
                there are none.
        """
        self.groups = tuple(groups)
        self.block_size = block_size
        self.pools = tuple(BlockPool(size) for size in pool_sizes)
        self._parts = tuple(
            (group.kind, pool) for group, pool in zip(self.groups, self.pools, strict=True)
        )
        self._advancing = tuple(i for i, (kind, _) in enumerate(self._parts) if kind.advances)
        self._keeping = tuple(i for i, (kind, _) in enumerate(self._parts) if kind.keeps)
        self.keeps = bool(self._keeping)
        self._block_pools = tuple(pool for kind, pool in self._parts if kind.grows)
        self._state_pools = tuple(pool for kind, pool in self._parts if not kind.grows)
        self._shares_blocks = share_blocks
        self._prefixes = PrefixCache(self.groups, self.pools, block_size)
        self._host = HostCache(host_blocks if host_blocks is not None else [0] * len(self.groups))
        self._holdings: dict[RequestKey, _Holding] = {}
        # Planned copies into a request's blocks of what others hold. Each holds its source block,
        # because the others may end before the copy is made.
        self._forks: dict[RequestKey, tuple[BlockCopy, ...]] = {}
        # Planned copies of what a request's next step overwrites, within its own blocks.
        self._keeps: dict[RequestKey, tuple[BlockCopy, ...]] = {}
        # Requests that started before the prefixes were forgotten: their blocks are not cached.
        self._muted: set[RequestKey] = set()
        # Where a request's tokens part from those of earlier ones, though no state is kept there.
        self._parting: dict[RequestKey, int] = {}
        self._no_match = PrefixMatch(0, 0, tuple(GroupMatch() for _ in self.groups))
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._tokens_without_state = 0

    # ---- figures -------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """The number of blocks in all groups that attend, without the null blocks."""
        return sum(pool.num_blocks for pool in self._block_pools)

    @property
    def num_used_blocks(self) -> int:
        """The number of these blocks that requests hold. A shared block counts once."""
        return sum(pool.num_used for pool in self._block_pools)

    @property
    def num_cached_blocks(self) -> int:
        """The number of these blocks that keep a prefix and have no holder."""
        return sum(pool.num_cached for pool in self._block_pools)

    def state_figures(self) -> dict[str, int]:
        """Return the statistics of states, by the name of the field in EngineStats."""
        return {
            "states_total": sum(pool.num_blocks for pool in self._state_pools),
            "states_used": sum(pool.num_used for pool in self._state_pools),
            "states_kept": sum(pool.num_cached for pool in self._state_pools),
            "state_copies": sum(pool.num_published for pool in self._state_pools),
            "state_evictions": sum(pool.num_evicted for pool in self._state_pools),
            "prefix_tokens_without_state": self._tokens_without_state,
        }

    @property
    def num_host_blocks(self) -> int:
        """The number of host blocks in all groups."""
        return self._host.num_blocks

    @property
    def num_used_host_blocks(self) -> int:
        """The number of host blocks in use."""
        return self._host.num_used

    @property
    def offloads(self) -> int:
        """How often a preempted request's KV was copied to the host."""
        return self._host.offloads

    @property
    def restores(self) -> int:
        """How often a request's KV was copied back from the host."""
        return self._host.restores

    @property
    def prefix_queries(self) -> int:
        """The number of prompt tokens that were looked up when requests started."""
        return self._prefix_queries

    @property
    def prefix_hits(self) -> int:
        """The number of looked-up prompt tokens that were found."""
        return self._prefix_hits

    def max_tokens_per_request(self, max_step_tokens: int) -> int:
        """Return the length in tokens of the longest request that fits when it runs alone.

        Steps compute at most `max_step_tokens`. If a group is too small for the blocks that a long
        request holds, it limits the request as a group with full attention does.
        """
        longest = 2**31 - 1
        for kind, pool in self._parts:
            if pool.num_blocks < kind.most_blocks(longest, max_step_tokens, self.block_size):
                longest = min(longest, pool.num_blocks * self.block_size)
        return longest

    # ---- a request begins ----------------------------------------------------------------------

    def find_prefix(self, request: Request) -> int:
        """Return how many leading tokens need not be computed if the request starts now.

        Their KV is kept on the host or in the prefix cache. The last token is always computed.
        This allocates nothing.

        O(blocks of the request), or O(1) if the last call was for the same request and none of its
        blocks has changed.
        """
        kept = self._host.kept(request.key)
        if kept is not None:
            return kept.num_tokens
        return self._match(request).num_blocks * self.block_size

    def can_start(
        self, request: Request, num_found: int, first_chunk: int, spare_blocks: Sequence[int]
    ) -> bool:
        """Return whether a request that holds no blocks can start and leave `spare_blocks` free.

        A group with full attention must have room for all tokens. A sliding group needs room only
        for the found prefix and the first chunk. Found blocks that others hold take no room. Cached
        ones do, because they can no longer be evicted.

        Args:
            request: the request.
            num_found: the result of `find_prefix`.
            first_chunk: the number of tokens that the first step computes.
            spare_blocks: the number of blocks in each group that must stay free. A negative number
                means that many blocks are expected to be freed first.
        """
        kept = self._host.kept(request.key)
        match = self._match(request) if kept is None else self._no_match
        for i, (kind, pool) in enumerate(self._parts):
            tokens = kind.tokens_at_start(request.num_tokens, num_found + first_chunk)
            part = match.groups[i]
            num_null = part.first if kept is None else kept.groups[i].first
            num_shared = 0 if part.is_copied else len(part.blocks)
            needed = kind.num_entries(tokens, self.block_size) - num_null - num_shared
            if needed + part.num_cached + spare_blocks[i] > pool.num_free:
                return False
        return True

    def start(self, request: Request) -> int:
        """Give a request that holds no blocks the prefix that `find_prefix` finds.

        Returns:
            The number of tokens in the prefix, which is the request's new num_computed_tokens.

        Raises:
            ValueError: it already holds blocks, or there is no room; nothing was allocated.
        """
        key = request.key
        if key in self._holdings:
            raise ValueError(f"request {key} has started already")
        if self._host.kept(key) is not None:
            return self._start_restored(key)
        match = self._match(request)
        num_found = match.num_blocks * self.block_size
        started = [
            kind.start(pool, part)
            for (kind, pool), part in zip(self._parts, match.groups, strict=True)
        ]
        self._holdings[key] = _Holding(
            tuple(table for table, _ in started), num_found, match.num_blocks
        )
        self._plan(self._forks, key, [copies for _, copies in started])
        if self._uses_prefixes(request):
            self._prefix_queries += request.num_prompt_tokens
            self._prefix_hits += min(num_found, request.num_prompt_tokens)
            if match.num_seen > match.num_blocks:
                self._parting[key] = match.num_seen * self.block_size
                self._tokens_without_state += self._parting[key] - num_found
        return num_found

    def _start_restored(self, key: RequestKey) -> int:
        kept = self._host.kept(key)
        if kept is None:
            raise ValueError(f"request {key} is not on the host")
        counts = [len(part.blocks) for part in kept.groups]
        if any(n > pool.num_free for n, pool in zip(counts, self.pools, strict=True)):
            raise ValueError(f"request {key} was started without room for its restored blocks")
        fresh = [pool.allocate(n) for n, pool in zip(counts, self.pools, strict=True)]
        self._host.restore(key, fresh)
        tables = tuple(
            kind.table(part.first, blocks)
            for (kind, _), part, blocks in zip(self._parts, kept.groups, fresh, strict=True)
        )
        self._holdings[key] = _Holding(tables, kept.num_tokens)
        return kept.num_tokens

    def fork(self, parent: Request, child: Request) -> int | None:
        """Let a child that holds no blocks share its parent's blocks up to the last prompt token,
        or as far as all kinds of groups allow.

        Blocks that end before that token are shared. For the block that contains it, the child gets
        a copy (see `take_copies`), or a new block if no earlier token is in it.

        Returns:
            The child's num_computed_tokens, which is at most the prompt's length − 1. None if there
            is no free block, if the parent's blocks do not (or no longer) hold the prompt, or if
            the child finds a longer prefix when it starts by itself. In that case, nothing was
            allocated.

        Raises:
            ValueError: the child holds blocks.
        """
        if child.key in self._holdings or self._host.kept(child.key) is not None:
            raise ValueError(f"request {child.key} has started already")
        position, size = parent.num_prompt_tokens - 1, self.block_size
        holding = self._holdings.get(parent.key)
        if holding is None:
            return None
        for (kind, _), table in zip(self._parts, holding.tables, strict=True):
            position = kind.fork_position(table, position, size)
        if self._keeping and position < self.find_prefix(child):
            return None
        if not self._can_fork(parent, holding, position):
            return None
        forked = [
            kind.fork(pool, table, position, size)
            for (kind, pool), table in zip(self._parts, holding.tables, strict=True)
        ]
        entry = position // size
        tables = tuple(table for table, _ in forked)
        self._holdings[child.key] = _Holding(tables, position + 1, entry)
        self._plan(self._forks, child.key, [copies for _, copies in forked])
        if parent.key in self._muted:
            self._muted.add(child.key)
        if self._leaves_prefixes(parent):
            extend_block_hashes(parent, entry, self.block_size)
            child.block_hashes = parent.block_hashes[:entry]
        return position

    def _can_fork(self, parent: Request, holding: _Holding, position: int) -> bool:
        if parent.num_computed_tokens < position or self._waits_for_copies(parent.key):
            return False  # it was preempted since, so its blocks hold less, or garbage
        return all(
            table.released <= kind.first_visible(position, self.block_size) and pool.num_free >= 1
            for (kind, pool), table in zip(self._parts, holding.tables, strict=True)
        )

    def _plan(
        self,
        plans: dict[RequestKey, tuple[BlockCopy, ...]],
        key: RequestKey,
        copies: Sequence[Sequence[PlannedCopy]],
    ) -> None:
        """Note the copies of a request, given by group, if there are any."""
        planned = tuple(
            BlockCopy(group.group_id, source, target)
            for group, part in zip(self.groups, copies, strict=True)
            for source, target in part
        )
        if planned:
            plans[key] = planned

    def cut(self, request: Request, start: int, num_tokens: int) -> int:
        """Return how many of a request's next tokens a step should take, at most `num_tokens`, so
        that it ends where the states of recurrent layers are kept: where other prompts parted from
        this one, and at the end of the prompt's last whole block.

        Args:
            request: the request.
            start: the position of the first token.
            num_tokens: how many tokens there are and the step has room for.
        """
        if self._leaves_prefixes(request):
            for place in (self._parting.get(request.key, 0), self._last_boundary(request)):
                if start < place < start + num_tokens:
                    return place - start
        return num_tokens

    def _last_boundary(self, request: Request) -> int:
        """Return where the last block ends from which another request like this one can go on."""
        return (request.num_tokens - 1) // self.block_size * self.block_size

    # ---- a request runs ------------------------------------------------------------------------

    def allocate(self, key: RequestKey, num_tokens: int, spare: int = 0) -> bool:
        """Grow the request's tables to cover `num_tokens` positions in every group.

        If there are not enough blocks, or `spare` would not stay free in a group that gives some,
        nothing changes.

        Returns:
            Whether all groups had enough blocks.
        """
        holding = self._holdings.get(key)
        if holding is not None and num_tokens <= holding.num_covered:
            return True
        size = self.block_size
        tables = holding.tables if holding else tuple(kind.table() for kind, _ in self._parts)
        missing = [
            max(0, kind.num_entries(num_tokens, size) - table.length)
            for (kind, _), table in zip(self._parts, tables, strict=True)
        ]
        if any(
            count > max(0, pool.num_free - spare)
            for count, pool in zip(missing, self.pools, strict=True)
        ):
            return False
        if holding is None:
            holding = self._holdings[key] = _Holding(tables, 0)
        holding.num_covered = -(-num_tokens // size) * size
        for table, pool, count in zip(tables, self.pools, missing, strict=True):
            table.extend(pool.allocate(count))
        return True

    def give_back(self, key: RequestKey, num_tokens: int) -> None:
        """Free the blocks that cover no token before position `num_tokens`. No step that writes to
        them may be pending.
        """
        holding, size = self._holdings[key], self.block_size
        before, after = holding.num_covered, -(-num_tokens // size) * size
        if after >= before:
            return
        holding.num_covered = after
        for (kind, pool), table in zip(self._parts, holding.tables, strict=True):
            # A table may be longer than its tokens ask: what it keeps besides stays.
            pool.free(table.cut(kind.num_entries(before, size) - kind.num_entries(after, size)))

    def launched(self, request: Request, num_tokens: int) -> None:
        """Record that steps were launched which compute the request's first `num_tokens` tokens."""
        tables = self._holdings[request.key].tables
        last_prompt_token = request.num_prompt_tokens - 1
        is_forked = request.spec.n > 1 and num_tokens <= last_prompt_token
        if not (is_forked or self._leaves_prefixes(request)):
            return
        blocks = num_tokens // self.block_size
        lasts = blocks == last_prompt_token // self.block_size
        mark = KeptMark(
            num_tokens,
            blocks,
            lasts=lasts or num_tokens == self._parting.get(request.key),
            held_for=last_prompt_token if is_forked else 0,
        )
        copies: list[list[PlannedCopy]] = [[] for _ in self.groups]
        for index in self._keeping:
            kind, pool = self._parts[index]
            copies[index] = kind.keep(pool, tables[index], mark, self.block_size)
        self._plan(self._keeps, request.key, copies)

    def commit(self, request: Request, num_computed_tokens: int) -> None:
        """Record that the KV of the request's first `num_computed_tokens` tokens is in its blocks.

        Full blocks with known tokens become shareable. Blocks that no later token can attend to are
        freed.

        Only call this for blocks that the step has computed. A request that gave up its blocks and
        started again has different ones.

        The next token is at position num_computed_tokens and attends to the window − 1 positions
        before it. O(blocks that became full or fell behind a window).
        """
        holding = self._holdings[request.key]
        known = len(request.token_ids) - request.num_pending_tokens
        num_full = min(num_computed_tokens, known) // self.block_size
        if (num_full > holding.num_published or self._keeping) and self._leaves_prefixes(request):
            self._publish(request, holding, num_full)
        for index in self._advancing:
            kind, pool = self._parts[index]
            kind.advance(pool, holding.tables[index], num_computed_tokens, self.block_size)

    def _publish(self, request: Request, holding: _Holding, num_full: int) -> None:
        extend_block_hashes(request, num_full, self.block_size)
        digests = request.block_hashes[:num_full]
        for (kind, pool), table in zip(self._parts, holding.tables, strict=True):
            kind.publish(pool, table, digests, holding.num_published)
        self._prefixes.note(digests[holding.num_published :])
        holding.num_published = num_full

    # ---- a request stops -----------------------------------------------------------------------

    def preempt(self, request: Request) -> int:
        """Free a request's blocks. Its KV goes to the host if there is room.

        If `take_copies` has not yet returned the request's planned restore, the KV stays on the
        host as it was. If it has not yet returned the planned fork, the request is computed again,
        because its copied block is still empty.

        Returns:
            The number of tokens whose KV the host keeps. 0 if all are computed again.
        """
        key = request.key
        kept = self._host.kept(key)
        if kept is not None and self._host.is_restoring(key):
            self._host.cancel_restore(key)
            self._release(key)
            return kept.num_tokens
        holding = self._holdings.get(key)
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        if holding is not None and num_tokens > 0 and key not in self._forks:
            size = self.block_size
            firsts = [kind.first_visible(num_tokens, size) for kind, _ in self._parts]
            blocks = [
                table.entries(first, kind.num_entries(num_tokens, size))
                for (kind, _), table, first in zip(self._parts, holding.tables, firsts, strict=True)
            ]
            if self._host.keep(key, num_tokens, firsts, blocks):
                self._release(key)
                return num_tokens
        self.free(key)
        return 0

    def free(self, key: RequestKey) -> None:
        """Free all of a request's blocks, on the device and the host, and drop its planned copies.

        Does nothing if the request holds no blocks.
        """
        self._release(key)
        self._host.drop(key)
        self._muted.discard(key)

    def _release(self, key: RequestKey) -> None:
        """Free the request's blocks, and the source blocks of its planned forks."""
        self._keeps.pop(key, None)
        self._parting.pop(key, None)
        for copy in self._forks.pop(key, ()):
            self.pools[copy.group].free([BlockId(copy.source)])
        holding = self._holdings.pop(key, None)
        if holding is not None:
            for table, pool in zip(holding.tables, self.pools, strict=True):
                # From the end: a prefix is useful without its tail, but a tail is useless without
                # its front.
                pool.free(reversed(table.held()))

    # ---- copies --------------------------------------------------------------------------------

    def take_copies(self) -> StepCopies:
        """Return the copies planned since the last call.

        The next step makes them before it computes anything, in the order of `StepCopies`.
        """
        offloads, restores = self._host.take()
        if not (offloads or restores or self._forks or self._keeps):
            return NO_COPIES
        forks, self._forks = self._forks, {}
        keeps, self._keeps = self._keeps, {}
        for copy in chain.from_iterable(forks.values()):
            self.pools[copy.group].free([BlockId(copy.source)])
        return StepCopies(
            offloads=tuple(chain.from_iterable(offloads.values())),
            restores=tuple(chain.from_iterable(restores.values())),
            forks=tuple(chain.from_iterable(chain(keeps.values(), forks.values()))),
            keys=frozenset(chain(offloads, restores, keeps, forks)),
        )

    def copies_failed(self, copies: StepCopies) -> frozenset[RequestKey]:
        """Handle a failed step, whose copies may not have been made.

        Returns:
            The live requests whose KV is lost. Each must be freed and computed again.
        """
        return frozenset(
            key for key in copies.keys if key in self._holdings or self._host.kept(key) is not None
        )

    def _waits_for_copies(self, key: RequestKey) -> bool:
        """Return whether some of a request's blocks hold garbage until the next step has begun."""
        return key in self._forks or self._host.is_restoring(key)

    # ---- prefixes ------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes.

        Cached blocks become free. The blocks of current requests, on the device or the host, will
        not be cached.
        """
        for pool in self.pools:
            pool.forget_prefixes()
        self._prefixes.forget()
        self._muted.update(self._holdings, self._host.keys())

    def _match(self, request: Request) -> PrefixMatch:
        return self._prefixes.find(request) if self._uses_prefixes(request) else self._no_match

    def _uses_prefixes(self, request: Request) -> bool:
        """Return whether a request may use cached prefixes.

        A request that reports prompt log-probabilities may not, because it needs the logits of the
        whole prompt.
        """
        spec = request.spec
        return self._shares_blocks and not spec.bypass_prefix_cache and spec.prompt_logprobs is None

    def _leaves_prefixes(self, request: Request) -> bool:
        return (
            self._shares_blocks
            and not request.spec.bypass_prefix_cache
            and request.key not in self._muted
        )

    # ---- tables and laws -----------------------------------------------------------------------

    def tables(self, key: RequestKey) -> tuple[BlockTable, ...]:
        """Return the request's block tables, one per group.

        They change as the request grows. A request that starts again gets new tables.
        """
        return self._holdings[key].tables

    def check_integrity(self) -> None:
        """Check the invariants of all groups and requests.

            - In each group, free + used + cached = total.
            - A used block's holder count is the number of tables and planned forks that hold it.
            - A request's tables are as long as their kinds ask.
            - The prefix indexes agree with the blocks.
            - No host block is lost.
            - A planned copy writes only to blocks that its request alone holds.

        Raises:
            ValueError: an invariant is broken; the message names it.
        """
        for pool in self.pools:
            pool.check_integrity()
        tables = {key: holding.tables for key, holding in self._holdings.items()}
        for key, holding in self._holdings.items():
            for (kind, _), table in zip(self._parts, holding.tables, strict=True):
                if table.length < kind.num_entries(holding.num_covered, self.block_size):
                    raise ValueError(f"request {key}: a table is shorter than its kind asks")
        check_tables(self.pools, tables, chain.from_iterable(self._forks.values()))
        self._host.check_integrity()
        planned = chain(
            self._forks.items(), self._keeps.items(), self._host.planned_restores().items()
        )
        check_targets(self.pools, tables, planned)
