"""Forked and preempted requests: what they hold, and which copies are planned, and dropped."""

from __future__ import annotations

import pytest

from engine.contract.request import Request
from engine.contract.types import GroupId, RequestKey
from engine.kv_cache.copies import NO_COPIES
from engine.kv_cache.group_kinds import FullAttention
from engine.kv_cache.groups import LayerGroup
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.kv_cache.state_slot import StateSlot
from tests.engine.fake_runner import make_groups
from tests.engine.kv_cache.simulation import make_request

PROMPT = [5, 7, 1, 3, 2, 8, 6, 4, 9, 0]


def _manager(
    *windows: int | None, blocks: int = 20, block_size: int = 4, slots: int = 20, share: bool = True
) -> KVCacheManager:
    windows = windows or (None,)
    return KVCacheManager(
        make_groups(*windows),
        [blocks] * len(windows),
        block_size,
        share_blocks=share,
        host_blocks=[slots] * len(windows),
    )


def _run(kv_cache: KVCacheManager, request: Request, *, commit: bool = True) -> Request:
    """Compute all of a request's tokens."""
    kv_cache.start(request)
    assert kv_cache.allocate(request.key, request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    if commit:
        kv_cache.commit(request, request.num_tokens)
    return request


def _held(kv_cache: KVCacheManager, request: Request, group: int = 0) -> list[int]:
    table = kv_cache.tables(request.key)[group]
    return table.blocks[: table.length].tolist()


def _preempt(kv_cache: KVCacheManager, request: Request) -> int:
    request.num_computed_tokens = kv_cache.preempt(request)
    kv_cache.check_integrity()
    return request.num_computed_tokens


# ---- fork ---------------------------------------------------------------------------------------


def test_a_child_shares_whole_blocks_and_copies_the_one_it_goes_on_in() -> None:
    kv_cache = _manager()
    parent = _run(kv_cache, make_request(1, PROMPT), commit=False)
    child = make_request(2, PROMPT, choice=1)
    assert kv_cache.fork(parent, child) == 9
    mine, theirs = _held(kv_cache, parent), _held(kv_cache, child)
    assert theirs[:2] == mine[:2]
    assert theirs[2] != mine[2]
    assert len(theirs) == 3
    copies = kv_cache.take_copies()
    assert [(c.group, c.source, c.target) for c in copies.forks] == [(0, mine[2], theirs[2])]
    assert (copies.offloads, copies.restores, copies.keys) == ((), (), {child.key})
    assert kv_cache.take_copies() is NO_COPIES
    kv_cache.check_integrity()
    kv_cache.free(parent.key)
    kv_cache.free(child.key)
    assert kv_cache.num_used_blocks == 0


@pytest.mark.parametrize("length", [1, 5, 9])
def test_a_block_that_would_hold_nothing_earlier_is_fresh(length: int) -> None:
    kv_cache = _manager()
    parent = _run(kv_cache, make_request(1, PROMPT[:length]))
    child = make_request(2, PROMPT[:length])
    assert kv_cache.fork(parent, child) == length - 1
    assert kv_cache.take_copies().is_empty
    mine, theirs = _held(kv_cache, parent), _held(kv_cache, child)
    assert theirs[:-1] == mine[:-1]
    assert theirs[-1] != mine[-1]
    kv_cache.check_integrity()


def test_a_child_in_a_sliding_group_gets_what_its_first_token_sees() -> None:
    kv_cache = _manager(None, 4, block_size=2)
    parent = make_request(1, PROMPT)
    kv_cache.start(parent)
    kv_cache.allocate(parent.key, 6)
    kv_cache.commit(parent, 6)
    kv_cache.allocate(parent.key, 10)
    parent.num_computed_tokens = 10
    child = make_request(2, PROMPT)
    assert kv_cache.fork(parent, child) == 9
    kv_cache.commit(parent, 10)
    kv_cache.check_integrity()
    # The token at 9 sees 6, 7 and 8: block 3 is shared, block 4 is copied.
    assert _held(kv_cache, child, 1)[:3] == [0, 0, 0]
    assert _held(kv_cache, child, 1)[3] == _held(kv_cache, parent, 1)[3] != 0
    assert len(kv_cache.take_copies().forks) == 2


def test_a_fork_takes_all_or_nothing() -> None:
    kv_cache = KVCacheManager(make_groups(None, 6), [20, 3], 4)
    parent = _run(kv_cache, make_request(1, PROMPT))
    second = make_request(2, PROMPT)
    third = make_request(3, PROMPT)
    assert kv_cache.fork(parent, second) == 9
    free = [pool.num_free for pool in kv_cache.pools]
    assert free[1] == 0
    assert kv_cache.fork(parent, third) is None
    assert [pool.num_free for pool in kv_cache.pools] == free
    assert len(kv_cache.take_copies().forks) == 2
    kv_cache.check_integrity()


def test_a_parent_that_ends_leaves_the_source_of_the_copy_until_it_is_made() -> None:
    kv_cache = _manager(blocks=4)
    parent = _run(kv_cache, make_request(1, PROMPT))
    child = make_request(2, PROMPT)
    kv_cache.fork(parent, child)
    source = _held(kv_cache, parent)[2]
    kv_cache.free(parent.key)
    kv_cache.check_integrity()
    assert kv_cache.pools[0].num_free == 0
    assert kv_cache.take_copies().forks[0].source == source
    assert kv_cache.pools[0].num_free == 1
    kv_cache.check_integrity()


def test_a_child_that_ends_before_its_copy_is_made_drops_it() -> None:
    kv_cache = _manager()
    parent = _run(kv_cache, make_request(1, PROMPT))
    child = make_request(2, PROMPT)
    kv_cache.fork(parent, child)
    kv_cache.free(child.key)
    kv_cache.check_integrity()
    assert kv_cache.take_copies() is NO_COPIES
    assert kv_cache.num_used_blocks == 3


def test_a_child_that_is_preempted_before_its_copy_is_made_is_computed_again() -> None:
    kv_cache = _manager()
    parent = _run(kv_cache, make_request(1, PROMPT))
    child = make_request(2, PROMPT)
    child.num_computed_tokens = kv_cache.fork(parent, child) or 0
    assert _preempt(kv_cache, child) == 0
    assert kv_cache.take_copies() is NO_COPIES
    assert kv_cache.num_used_host_blocks == 0
    assert kv_cache.find_prefix(child) == 8, "and finds the prompt in the cache"


def test_who_lost_its_prompt_has_no_children() -> None:
    kv_cache = _manager()
    parent, child = make_request(1, PROMPT), make_request(2, PROMPT)
    assert kv_cache.fork(parent, child) is None, "it holds nothing"
    _run(kv_cache, parent)
    _preempt(kv_cache, parent)
    assert kv_cache.fork(parent, child) is None, "it is on the host"
    kv_cache.take_copies()
    kv_cache.start(parent)
    assert kv_cache.fork(parent, child) is None, "its blocks hold garbage before the restore"
    kv_cache.take_copies()
    assert kv_cache.fork(parent, child) == 9
    with pytest.raises(ValueError, match="started already"):
        kv_cache.fork(parent, child)
    half = make_request(3, PROMPT)
    kv_cache.start(half)
    half.num_computed_tokens = 8
    kv_cache.allocate(half.key, 8)
    assert kv_cache.fork(half, make_request(4, PROMPT)) is None, "it computes its prompt again"


def test_children_take_over_the_hashes() -> None:
    kv_cache = _manager()
    parent = _run(kv_cache, make_request(1, PROMPT))
    child = make_request(2, PROMPT)
    kv_cache.fork(parent, child)
    assert child.block_hashes == parent.block_hashes[:2]
    assert child.block_hashes is not parent.block_hashes


def test_children_of_a_request_that_began_before_a_reset_leave_nothing_either() -> None:
    kv_cache = _manager()
    parent = _run(kv_cache, make_request(1, [*PROMPT, 1, 2]))
    kv_cache.reset_prefix_cache()
    child = make_request(2, [*PROMPT, 1, 2])
    kv_cache.fork(parent, child)
    kv_cache.take_copies()
    kv_cache.commit(child, 12)
    kv_cache.free(parent.key)
    kv_cache.free(child.key)
    assert kv_cache.num_cached_blocks == 0


# ---- offload ------------------------------------------------------------------------------------


def test_a_preempted_request_comes_back_from_the_host() -> None:
    kv_cache = _manager(share=False)
    request = _run(kv_cache, make_request(1, PROMPT))
    request.token_ids.append(request.token_ids[0])
    blocks = _held(kv_cache, request)
    assert _preempt(kv_cache, request) == 10
    assert kv_cache.num_used_blocks == 0
    assert kv_cache.num_used_host_blocks == 3
    assert kv_cache.offloads == 0, "not yet"
    copies = kv_cache.take_copies()
    assert [c.source for c in copies.offloads] == blocks
    assert copies.keys == {request.key}
    assert kv_cache.offloads == 1
    assert kv_cache.find_prefix(request) == 10
    assert kv_cache.can_start(request, 10, 1, [17])
    assert not kv_cache.can_start(request, 10, 1, [18])
    assert kv_cache.start(request) == 10
    kv_cache.check_integrity()
    back = kv_cache.take_copies()
    assert [c.source for c in back.restores] == [c.target for c in copies.offloads]
    assert [c.target for c in back.restores] == _held(kv_cache, request)
    assert (back.offloads, kv_cache.num_used_host_blocks, kv_cache.restores) == ((), 0, 1)
    kv_cache.check_integrity()


def test_only_blocks_that_hold_computed_tokens_are_kept() -> None:
    kv_cache = _manager()
    request = make_request(1, PROMPT)
    kv_cache.start(request)
    kv_cache.allocate(request.key, 10)
    request.num_computed_tokens = 4
    assert _preempt(kv_cache, request) == 4
    assert len(kv_cache.take_copies().offloads) == 1
    untouched = make_request(2, [1, *PROMPT])
    kv_cache.start(untouched)
    kv_cache.allocate(untouched.key, 8)
    assert _preempt(kv_cache, untouched) == 0
    assert kv_cache.take_copies() is NO_COPIES


def test_a_host_without_room_in_one_group_keeps_nothing() -> None:
    kv_cache = KVCacheManager(make_groups(None, 6), [20, 20], 4, host_blocks=[20, 1])
    request = _run(kv_cache, make_request(1, PROMPT))
    assert _preempt(kv_cache, request) == 0
    assert kv_cache.num_used_host_blocks == 0
    assert kv_cache.num_used_blocks == 0
    assert kv_cache.take_copies() is NO_COPIES
    assert kv_cache.num_host_blocks == 21


def test_null_entries_of_a_sliding_group_stay_null() -> None:
    kv_cache = _manager(None, 4, block_size=2)
    request = _run(kv_cache, make_request(1, PROMPT))
    request.token_ids.append(request.token_ids[0])
    assert _held(kv_cache, request, 1)[:3] == [0, 0, 0]
    assert _preempt(kv_cache, request) == 10
    assert kv_cache.num_used_host_blocks == 5 + 2
    kv_cache.take_copies()
    assert kv_cache.start(request) == 10
    assert _held(kv_cache, request, 1)[:3] == [0, 0, 0]
    assert 0 not in _held(kv_cache, request, 1)[3:]
    assert kv_cache.tables(request.key)[1].released == 3
    kv_cache.check_integrity()


def test_preempted_before_its_restore_is_made_it_stays_on_the_host() -> None:
    kv_cache = _manager()
    request = _run(kv_cache, make_request(1, PROMPT))
    _preempt(kv_cache, request)
    offloads = kv_cache.take_copies().offloads
    kv_cache.start(request)
    assert _preempt(kv_cache, request) == 9
    assert kv_cache.take_copies() is NO_COPIES
    assert kv_cache.num_used_blocks == 0
    kv_cache.start(request)
    restores = kv_cache.take_copies().restores
    assert [c.source for c in restores] == [c.target for c in offloads]


def test_preempted_and_back_in_the_same_step_it_takes_the_way_over_the_host() -> None:
    kv_cache = _manager()
    request = _run(kv_cache, make_request(1, PROMPT))
    _preempt(kv_cache, request)
    kv_cache.start(request)
    kv_cache.check_integrity()
    copies = kv_cache.take_copies()
    assert [c.target for c in copies.offloads] == [c.source for c in copies.restores]


def test_slots_that_a_restore_reads_are_not_given_away_in_its_step() -> None:
    kv_cache = _manager(slots=3)
    first = _run(kv_cache, make_request(1, PROMPT))
    second = _run(kv_cache, make_request(2, PROMPT[::-1]))
    third = _run(kv_cache, make_request(3, [9] * 10))
    assert _preempt(kv_cache, first) == 9
    kv_cache.take_copies()
    kv_cache.start(first)
    assert _preempt(kv_cache, second) == 0, "offloads come before restores"
    kv_cache.take_copies()
    assert _preempt(kv_cache, third) == 9


def test_a_cancelled_request_takes_its_planned_copies_with_it() -> None:
    kv_cache = _manager()
    request = _run(kv_cache, make_request(1, PROMPT))
    _preempt(kv_cache, request)
    kv_cache.free(request.key)
    kv_cache.check_integrity()
    assert kv_cache.take_copies() is NO_COPIES
    assert kv_cache.num_used_host_blocks == 0

    request = _run(kv_cache, make_request(2, PROMPT))
    _preempt(kv_cache, request)
    kv_cache.take_copies()
    kv_cache.start(request)
    kv_cache.free(request.key)
    kv_cache.check_integrity()
    assert kv_cache.take_copies() is NO_COPIES
    assert (kv_cache.num_used_host_blocks, kv_cache.num_used_blocks) == (0, 0)
    assert kv_cache.restores == 0


def test_shared_blocks_are_copied_and_stay_with_the_others() -> None:
    kv_cache = _manager()
    first = _run(kv_cache, make_request(1, PROMPT))
    second = _run(kv_cache, make_request(2, PROMPT))
    shared = _held(kv_cache, first)[:2]
    assert _held(kv_cache, second)[:2] == shared
    _preempt(kv_cache, second)
    assert [c.source for c in kv_cache.take_copies().offloads][:2] == shared
    assert _held(kv_cache, first)[:2] == shared
    kv_cache.start(second)
    assert not set(_held(kv_cache, second)) & set(shared)
    kv_cache.check_integrity()


def test_restored_blocks_are_shared_only_after_their_step() -> None:
    kv_cache = _manager(blocks=3)
    request = _run(kv_cache, make_request(1, PROMPT))
    _preempt(kv_cache, request)
    kv_cache.take_copies()
    assert kv_cache.num_cached_blocks == 2
    kv_cache.start(request)  # evicts its own cached blocks
    assert kv_cache.num_cached_blocks == 0
    other = make_request(2, PROMPT)
    assert kv_cache.find_prefix(other) == 0
    kv_cache.take_copies()
    kv_cache.commit(request, 9)
    assert kv_cache.find_prefix(other) == 8


def test_a_request_on_the_host_is_not_looked_up_in_the_prefix_cache() -> None:
    kv_cache = _manager()
    request = _run(kv_cache, make_request(1, PROMPT))
    queries = kv_cache.prefix_queries
    _preempt(kv_cache, request)
    kv_cache.take_copies()
    assert kv_cache.find_prefix(request) == 9
    kv_cache.start(request)
    assert kv_cache.prefix_queries == queries


def test_failed_copies_name_those_who_lost_their_kv() -> None:
    kv_cache = _manager()
    parent = _run(kv_cache, make_request(1, PROMPT))
    child, offloaded, gone = (make_request(key, PROMPT) for key in (2, 3, 4))
    restored = _run(kv_cache, make_request(5, [1, 2, 3, 4, 5]))
    _preempt(kv_cache, restored)
    kv_cache.take_copies()
    assert kv_cache.start(restored) == 4
    kv_cache.fork(parent, child)
    for request in (offloaded, gone):
        _run(kv_cache, request)
        assert _preempt(kv_cache, request) == 9
    copies = kv_cache.take_copies()
    kv_cache.free(gone.key)  # it ended before the step's failure was known
    lost = kv_cache.copies_failed(copies)
    assert lost == {child.key, offloaded.key, restored.key}
    for key in lost:
        kv_cache.free(key)
    kv_cache.check_integrity()
    assert kv_cache.num_used_host_blocks == 0
    assert kv_cache.num_used_blocks == 3, "the parent's"
    assert kv_cache.copies_failed(NO_COPIES) == frozenset()


def test_who_comes_back_from_a_failed_offload_has_lost_its_kv_too() -> None:
    kv_cache = _manager()
    request = _run(kv_cache, make_request(1, PROMPT))
    _preempt(kv_cache, request)
    failed = kv_cache.take_copies()
    kv_cache.start(request)
    kv_cache.take_copies()  # the next step is under way when the first one's failure shows
    assert kv_cache.num_used_host_blocks == 0
    assert kv_cache.copies_failed(failed) == {request.key}


def test_a_restore_without_room_takes_nothing() -> None:
    kv_cache = _manager(blocks=4, share=False)
    request = _run(kv_cache, make_request(1, PROMPT))
    _preempt(kv_cache, request)
    kv_cache.take_copies()
    _run(kv_cache, make_request(2, PROMPT[:8]))
    assert not kv_cache.can_start(request, 9, 1, [0])
    with pytest.raises(ValueError, match="without room"):
        kv_cache.start(request)
    kv_cache.check_integrity()
    assert kv_cache.num_used_host_blocks == 3


def test_integrity_finds_copies_that_go_astray() -> None:
    kv_cache = _manager()
    request = _run(kv_cache, make_request(1, PROMPT))
    _preempt(kv_cache, request)
    kv_cache._host._free[0].append(0)
    with pytest.raises(ValueError, match="lost or doubled"):
        kv_cache.check_integrity()

    kv_cache = _manager()
    parent, child = _run(kv_cache, make_request(1, PROMPT)), make_request(2, PROMPT)
    kv_cache.fork(parent, child)
    kv_cache._forks[parent.key] = kv_cache._forks.pop(child.key)
    with pytest.raises(ValueError, match="target is not in its table"):
        kv_cache.check_integrity()


def test_what_is_kept_beside_a_requests_tokens_is_not_given_back() -> None:
    groups = [
        LayerGroup(group_id=GroupId(index), kind=kind, layers=(index,), bytes_per_token=1)
        for index, kind in enumerate((FullAttention(), StateSlot()))
    ]
    kv_cache, key = KVCacheManager(groups, [20, 6], 4), RequestKey(1)
    assert kv_cache.allocate(key, 5)
    assert kv_cache.allocate(key, 15)
    full, slot = kv_cache.tables(key)
    slot.extend(kv_cache.pools[1].allocate(1))
    kv_cache.give_back(key, 6)
    assert (full.length, slot.length) == (2, 2)
    kv_cache.check_integrity()
