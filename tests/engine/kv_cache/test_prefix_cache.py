"""Prefixes that are found: how long, for whom, in which groups, and at what cost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.contract.request import PENDING_TOKEN, Request
from engine.contract.types import TokenId
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.kv_cache.prefix_cache import PrefixCache
from tests.engine.fake_runner import make_groups
from tests.engine.kv_cache.simulation import digests_of, make_request

PROMPT = [5, 7, 1, 3, 2, 8, 6, 4, 9, 0]


def _manager(*windows: int | None, blocks: int = 20, block_size: int = 2) -> KVCacheManager:
    windows = windows or (None,)
    return KVCacheManager(
        make_groups(*windows), [blocks] * len(windows), block_size, share_blocks=True
    )


def _compute(kv_cache: KVCacheManager, request: Request, chunk: int | None = None) -> int:
    """Start a request, compute all its tokens, and say how many were found."""
    found = kv_cache.start(request)
    at = found
    while at < request.num_tokens:
        at = min(request.num_tokens, at + (chunk or request.num_tokens))
        assert kv_cache.allocate(request.key, at)
        request.num_computed_tokens = at
        kv_cache.commit(request, at)
        kv_cache.check_integrity()
    return found


def _leave(kv_cache: KVCacheManager, tokens: Sequence[int], salt: bytes = b"") -> None:
    """Compute a request and end it: what stays is what others may find."""
    request = make_request(1000, tokens, salt=salt)
    _compute(kv_cache, request)
    kv_cache.free(request.key)


def _find(kv_cache: KVCacheManager, tokens: Sequence[int], key: int = 2000) -> int:
    return kv_cache.find_prefix(make_request(key, tokens))


def _evict(pool: BlockPool, digest: bytes) -> None:
    """Let one cached block go before its turn."""
    block = pool.index.block(digest)
    assert block is not None
    del pool._cached[block]
    pool.index.remove(block)
    pool._free.append(block)


def test_a_prefix_is_found_in_whole_blocks_and_never_whole() -> None:
    kv_cache = _manager()
    assert _find(kv_cache, PROMPT) == 0
    _leave(kv_cache, PROMPT)
    assert kv_cache.num_cached_blocks == 5
    assert kv_cache.num_used_blocks == 0
    assert _find(kv_cache, PROMPT) == 8, "the last token is always computed"
    assert _find(kv_cache, [*PROMPT, 1]) == 10
    assert _find(kv_cache, [*PROMPT[:5], 99, *PROMPT[6:]], key=3) == 4, "a partial hit"
    assert _find(kv_cache, [99, *PROMPT[1:]], key=4) == 0
    assert _find(kv_cache, PROMPT[:1], key=5) == 0


def test_the_digests_are_chained_from_the_salt() -> None:
    kv_cache = _manager()
    request = make_request(1, PROMPT, salt=b"tenant")
    _compute(kv_cache, request)
    assert request.block_hashes == digests_of(b"tenant", PROMPT, 2)
    assert len({len(digest) for digest in request.block_hashes} | {16}) == 1


def test_found_blocks_are_shared_and_the_rest_is_private() -> None:
    kv_cache = _manager()
    first, second = make_request(1, PROMPT), make_request(2, [*PROMPT[:6], 1, 1, 1])
    _compute(kv_cache, first)
    assert _compute(kv_cache, second) == 6
    mine, theirs = (kv_cache.tables(r.key)[0].held() for r in (first, second))
    assert mine[:3] == theirs[:3]
    assert not set(mine[3:]) & set(theirs[3:])
    assert kv_cache.num_used_blocks == 5 + 2
    kv_cache.free(first.key)
    kv_cache.check_integrity()
    assert kv_cache.num_cached_blocks == 2, "the shared ones are held still"


def test_an_equal_block_that_was_computed_beside_the_first_stays_private() -> None:
    kv_cache = _manager()
    first, twin = make_request(1, PROMPT), make_request(2, PROMPT)
    for request in (first, twin):
        assert kv_cache.start(request) == 0
        assert kv_cache.allocate(request.key, 10)
    for request in (first, twin):
        kv_cache.commit(request, 10)
    kv_cache.check_integrity()
    kv_cache.free(twin.key)
    assert kv_cache.num_cached_blocks == 0
    kv_cache.free(first.key)
    assert kv_cache.num_cached_blocks == 5


def test_tenants_share_nothing() -> None:
    kv_cache = _manager()
    _leave(kv_cache, PROMPT, salt=b"a")
    assert kv_cache.find_prefix(make_request(1, PROMPT, salt=b"a")) == 8
    assert kv_cache.find_prefix(make_request(2, PROMPT, salt=b"b")) == 0
    assert kv_cache.find_prefix(make_request(3, PROMPT)) == 0


def test_tenants_share_nothing_in_a_rope_group_either() -> None:
    kv_cache = _manager()

    def request_of(key: int, salt: bytes, rope_group: int) -> Request:
        request = make_request(key, PROMPT, salt=salt)
        request.rope_group = rope_group
        return request

    first = request_of(1, b"a", 1)
    _compute(kv_cache, first)
    kv_cache.free(first.key)
    assert kv_cache.find_prefix(request_of(2, b"a", 1)) == 8
    for key, (salt, rope_group) in enumerate(((b"b", 1), (b"", 1), (b"a", 0), (b"a", 2)), start=3):
        assert kv_cache.find_prefix(request_of(key, salt, rope_group)) == 0


def test_a_request_that_changes_its_rope_group_is_looked_up_anew() -> None:
    """As the core has it when a request outgrows the original length and starts again."""
    kv_cache = _manager()
    _leave(kv_cache, PROMPT)
    request = make_request(1, PROMPT)
    assert kv_cache.find_prefix(request) == 8
    request.rope_group = 1
    request.block_hashes.clear()
    assert kv_cache.find_prefix(request) == 0


def test_who_bypasses_neither_uses_nor_leaves() -> None:
    kv_cache = _manager()
    loner = make_request(1, PROMPT, bypass=True)
    assert _compute(kv_cache, loner) == 0
    kv_cache.free(loner.key)
    assert kv_cache.num_cached_blocks == 0
    _leave(kv_cache, PROMPT)
    assert _compute(kv_cache, make_request(2, PROMPT, bypass=True)) == 0
    assert kv_cache.prefix_queries == len(PROMPT), "of the one who looked"


def test_who_reports_on_its_prompt_uses_nothing_but_leaves() -> None:
    kv_cache = _manager()
    scorer = make_request(1, PROMPT, prompt_logprobs=0)
    _compute(kv_cache, scorer)
    kv_cache.free(scorer.key)
    assert kv_cache.find_prefix(make_request(2, PROMPT, prompt_logprobs=3)) == 0
    assert kv_cache.find_prefix(make_request(3, PROMPT)) == 8


def test_without_sharing_nothing_is_kept() -> None:
    kv_cache = KVCacheManager(make_groups(None), [20], 2)
    _leave(kv_cache, PROMPT)
    assert kv_cache.num_cached_blocks == 0
    assert _find(kv_cache, PROMPT) == 0
    assert kv_cache.prefix_queries == 0


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    kv_cache = _manager()
    request = make_request(1, PROMPT)
    _compute(kv_cache, request)
    for token in (11, 12, 13):
        request.token_ids.append(TokenId(token))
        assert kv_cache.allocate(request.key, request.num_tokens)
        kv_cache.commit(request, request.num_tokens)
    kv_cache.free(request.key)
    assert _find(kv_cache, [*PROMPT, 11, 12, 13, 50, 51]) == 12
    assert _find(kv_cache, [*PROMPT, 11, 99, 13, 50, 51], key=3) == 10


def test_pending_tokens_are_not_hashed() -> None:
    kv_cache = _manager()
    request = make_request(1, PROMPT[:3])
    _compute(kv_cache, request)
    request.token_ids.append(PENDING_TOKEN)
    request.num_pending_tokens = 1
    assert kv_cache.allocate(request.key, 4)
    kv_cache.commit(request, 4)
    assert len(request.block_hashes) == 1
    request.token_ids[3] = TokenId(PROMPT[3])
    request.num_pending_tokens = 0
    kv_cache.commit(request, 4)
    assert _find(kv_cache, PROMPT) == 4


def test_what_was_not_committed_is_not_found() -> None:
    kv_cache = _manager()
    request = make_request(1, PROMPT)
    kv_cache.start(request)
    kv_cache.allocate(request.key, 10)
    assert _find(kv_cache, PROMPT) == 0
    kv_cache.commit(request, 5)
    assert _find(kv_cache, PROMPT) == 4
    kv_cache.free(request.key)
    assert kv_cache.num_cached_blocks == 2


def test_queries_and_hits_are_counted_once_a_start() -> None:
    kv_cache = _manager()
    _leave(kv_cache, PROMPT)
    assert (kv_cache.prefix_queries, kv_cache.prefix_hits) == (10, 0)
    request = make_request(2, PROMPT)
    for _ in range(5):
        assert kv_cache.find_prefix(request) == 8
        assert kv_cache.can_start(request, 8, 2, [0])
    assert (kv_cache.prefix_queries, kv_cache.prefix_hits) == (10, 0)
    kv_cache.start(request)
    assert (kv_cache.prefix_queries, kv_cache.prefix_hits) == (20, 8)


def test_the_tail_of_a_prefix_is_evicted_before_its_front() -> None:
    kv_cache = _manager(blocks=5)
    _leave(kv_cache, PROMPT)
    other = make_request(2, [1, 1, 1, 1])
    assert kv_cache.can_start(other, 0, 4, [0])
    kv_cache.start(other)
    assert kv_cache.allocate(other.key, 4)
    assert _find(kv_cache, [*PROMPT, 1], key=3) == 6


def test_cached_blocks_that_are_found_take_room_those_that_are_held_do_not() -> None:
    kv_cache = _manager(blocks=7)
    _leave(kv_cache, PROMPT)
    other = make_request(2, [*PROMPT, 1, 2])
    assert kv_cache.can_start(other, 10, 2, [1])
    assert not kv_cache.can_start(other, 10, 2, [2]), "5 cached ones and 1 more are needed"
    holder = make_request(3, PROMPT)
    assert _compute(kv_cache, holder) == 8
    assert kv_cache.pools[0].num_free == 2
    assert kv_cache.can_start(other, 10, 2, [0]), "1 cached one and 1 more are needed"
    assert not kv_cache.can_start(other, 10, 2, [1])


def test_a_sliding_group_needs_its_window_only() -> None:
    kv_cache = _manager(None, 5)
    request = make_request(1, PROMPT)
    _compute(kv_cache, request, chunk=2)
    sliding = kv_cache.pools[1]
    assert sliding.num_cached == 3, "the blocks that the window has left"
    kv_cache.free(request.key)
    # The token at 8 sees four positions before it: blocks 2 and 3.
    for digest in request.block_hashes[:2]:
        _evict(sliding, digest)
    newcomer = make_request(2, PROMPT)
    assert kv_cache.find_prefix(newcomer) == 8
    assert kv_cache.start(newcomer) == 8
    full, window = kv_cache.tables(newcomer.key)
    assert (full.released, full.length) == (0, 4)
    assert (window.released, window.length) == (2, 4)
    assert window.blocks[:2].tolist() == [0, 0]
    kv_cache.check_integrity()


def test_all_groups_must_agree_on_the_length() -> None:
    kv_cache = _manager(None, 3, 7)
    _leave(kv_cache, PROMPT)
    request = make_request(2, [*PROMPT, 1])
    assert kv_cache.find_prefix(request) == 10
    digests = digests_of(b"", PROMPT, 2)
    # Window 7 sees three blocks before a boundary. Without block 3 it can start at 6 or less.
    _evict(kv_cache.pools[2], digests[3])
    assert kv_cache.find_prefix(request) == 6
    # Window 3 sees one. Without block 2 there it can start at 4, and only there.
    _evict(kv_cache.pools[1], digests[2])
    assert kv_cache.find_prefix(request) == 4
    assert kv_cache.start(request) == 4
    assert [table.released for table in kv_cache.tables(request.key)] == [0, 1, 0]


def test_reset_forgets_all_prefixes() -> None:
    kv_cache = _manager()
    _leave(kv_cache, [1, 2, 3, 4])
    holder = make_request(1, PROMPT)
    _compute(kv_cache, holder)
    kv_cache.reset_prefix_cache()
    kv_cache.check_integrity()
    assert kv_cache.num_cached_blocks == 0
    assert _find(kv_cache, [1, 2, 3, 4, 5]) == 0
    assert _find(kv_cache, PROMPT, key=3) == 0
    # What began before leaves nothing: its later blocks stand on KV that was to be forgotten.
    holder.token_ids.extend((1, 2))
    kv_cache.allocate(holder.key, 12)
    kv_cache.commit(holder, 12)
    kv_cache.free(holder.key)
    assert kv_cache.num_cached_blocks == 0
    _leave(kv_cache, PROMPT)
    assert _find(kv_cache, PROMPT, key=4) == 8


def test_who_began_before_a_reset_and_is_computed_again_leaves_prefixes() -> None:
    kv_cache = _manager()
    request = make_request(1, PROMPT)
    _compute(kv_cache, request)
    kv_cache.reset_prefix_cache()
    assert kv_cache.preempt(request) == 0
    _compute(kv_cache, request)
    kv_cache.free(request.key)
    assert _find(kv_cache, PROMPT) == 8


def test_a_request_cannot_start_twice() -> None:
    kv_cache = _manager()
    request = make_request(1, PROMPT)
    kv_cache.start(request)
    with pytest.raises(ValueError, match="started already"):
        kv_cache.start(request)


def test_the_blocked_head_of_the_queue_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    search = PrefixCache._search

    def counted(self: PrefixCache, digests: Sequence[bytes]) -> object:
        searches.append(len(digests))
        return search(self, digests)

    monkeypatch.setattr(PrefixCache, "_search", counted)
    kv_cache = _manager(None, 7, blocks=400)
    tokens = list(range(400))
    _leave(kv_cache, tokens)
    head = make_request(1, [*tokens, 1])
    others = [make_request(10 + i, [1000 + i] * 8) for i in range(30)]
    searches.clear()
    for other in others:
        assert kv_cache.find_prefix(head) == 400
        kv_cache.can_start(head, 400, 1, [0, 0])
        # Others come and go, and leave blocks of their own. `allocate` starts them unseen.
        assert kv_cache.allocate(other.key, 8)
        kv_cache.commit(other, 8)
        kv_cache.free(other.key)
    assert len(searches) == 1
    assert len(head.block_hashes) == 200
    # One block of its own goes: it is looked up again, once, and less is found.
    pool = kv_cache.pools[0]
    assert pool.allocate(pool.num_free - pool.num_cached + 1)
    assert kv_cache.find_prefix(head) == 398
    assert kv_cache.find_prefix(head) == 398
    assert len(searches) == 2
