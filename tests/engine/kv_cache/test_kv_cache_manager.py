"""Block tables of full and sliding groups: covered, private, bounded and given back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.contract.request import Request
from engine.contract.types import RequestKey
from engine.kv_cache.group_kinds import SlidingAttention
from engine.kv_cache.kv_cache_manager import KVCacheManager
from tests.engine.fake_runner import make_groups, make_request


def _request(key: RequestKey, num_tokens: int = 1) -> Request:
    spec = make_request(str(key), [1] * num_tokens)
    return Request(spec=spec, arrival=0.0, max_total_tokens=10**9, key=key)


def _commit(kv_cache: KVCacheManager, key: RequestKey, num_computed_tokens: int) -> None:
    kv_cache.commit(_request(key, num_computed_tokens), num_computed_tokens)


class CacheMachine(RuleBasedStateMachine):
    """Requests that grow by chunks, release what their windows left behind, and end."""

    @initialize(
        windows=st.sampled_from([(None,), (5,), (None, 6), (4, 11), (None, 3, 9)]),
        block_size=st.sampled_from([1, 2, 4, 7]),
        num_blocks=st.integers(1, 12),
    )
    def build(self, windows: tuple[int | None, ...], block_size: int, num_blocks: int) -> None:
        self.kv_cache = KVCacheManager(
            make_groups(*windows), [num_blocks + i for i in range(len(windows))], block_size
        )
        self.computed: dict[RequestKey, int] = {}
        self.next_id = 0

    @rule(count=st.integers(1, 20))
    def add(self, count: int) -> None:
        self.next_id += 1
        self._grow(RequestKey(self.next_id), 0, count)

    @precondition(lambda self: self.computed)
    @rule(data=st.data(), count=st.integers(1, 9))
    def grow(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.computed)))
        self._grow(name, self.computed[name], count)

    @precondition(lambda self: self.computed)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.computed)))
        self.kv_cache.free(name)
        self.kv_cache.free(name)  # harmless
        del self.computed[name]

    def _grow(self, name: RequestKey, computed: int, count: int) -> None:
        kv_cache = self.kv_cache
        free = [pool.num_free for pool in kv_cache.pools]
        held = kv_cache.tables(name) if name in self.computed else None
        needed = [
            -(-(computed + count) // kv_cache.block_size) - (held[i].length if held else 0)
            for i in range(len(free))
        ]
        fits = all(need <= have for need, have in zip(needed, free, strict=True))
        assert kv_cache.allocate(name, computed + count) == fits
        if not fits:
            assert [pool.num_free for pool in kv_cache.pools] == free, "nothing may change"
            return
        for group, table in zip(kv_cache.groups, kv_cache.tables(name), strict=True):
            blocks = table.blocks[: table.length]
            assert len(blocks) * kv_cache.block_size >= computed + count
            first = 0 if group.window is None else max(0, computed - group.window + 1)
            assert (blocks[first // kv_cache.block_size :] != 0).all(), "visible blocks are held"
            if group.window is not None:
                most = group.kind.most_blocks(10**9, count, kv_cache.block_size)
                assert len(table.held()) <= most
        self.computed[name] = computed + count
        _commit(kv_cache, name, computed + count)

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "kv_cache"):
            return
        self.kv_cache.check_integrity()
        assert self.kv_cache.num_used_blocks <= self.kv_cache.num_blocks
        if not self.computed:
            assert self.kv_cache.num_used_blocks == 0


TestKVCacheManager = CacheMachine.TestCase
TestKVCacheManager.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True, database=None
)


def test_a_sliding_group_holds_a_bounded_number_of_blocks() -> None:
    kv_cache = KVCacheManager(make_groups(8), [SlidingAttention(8).most_blocks(10**9, 1, 4)], 4)
    name = RequestKey(1)
    for computed in range(1000):
        assert kv_cache.allocate(name, computed + 1)
        _commit(kv_cache, name, computed + 1)
    assert kv_cache.max_tokens_per_request(1) == 2**31 - 1


def test_the_longest_request_is_the_tightest_groups() -> None:
    assert KVCacheManager(make_groups(None, 8), [10, 10], 4).max_tokens_per_request(1) == 40
    # A sliding group that cannot hold a step's window counts as a full one.
    assert KVCacheManager(make_groups(None, 64), [10, 3], 4).max_tokens_per_request(1) == 12


def test_a_newcomer_leaves_room_for_those_who_run() -> None:
    kv_cache = KVCacheManager(make_groups(None), [10], 4)
    assert kv_cache.can_start(_request(RequestKey(1), 40), 0, 8, [0])
    assert not kv_cache.can_start(_request(RequestKey(1), 40), 0, 8, [1])
    assert not kv_cache.can_start(_request(RequestKey(1), 41), 0, 8, [0])


def test_in_a_sliding_group_a_newcomer_needs_its_first_chunk_only() -> None:
    kv_cache = KVCacheManager(make_groups(8), [5], 4)
    assert kv_cache.can_start(_request(RequestKey(1), 4000), 0, 16, [1])
    assert not kv_cache.can_start(_request(RequestKey(1), 4000), 0, 21, [0])


def test_sliding_pools_are_small() -> None:
    assert SlidingAttention(24).pool_blocks(10_000, 4, 64, 8) < 50
    assert SlidingAttention(24).pool_blocks(7, 4, 64, 8) == 7


def test_integrity_finds_a_block_in_two_tables() -> None:
    kv_cache = KVCacheManager(make_groups(None), [10], 4)
    kv_cache.allocate(RequestKey(1), 4)
    kv_cache.allocate(RequestKey(2), 4)
    kv_cache.tables(RequestKey(2))[0].blocks[0] = kv_cache.tables(RequestKey(1))[0].blocks[0]
    with pytest.raises(ValueError, match="group 0"):
        kv_cache.check_integrity()
