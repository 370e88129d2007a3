"""The states that are kept of a request: which, for how long, and which go first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.contract.request import Request
from engine.contract.types import TokenId
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.kv_cache.prefix_index import PrefixWatch, SeenPrefixes
from engine.kv_cache.state_slot import StateSlot
from tests.engine.fake_runner import make_groups
from tests.engine.kv_cache.simulation import digests_of, make_request

SIZE = 2
PROMPT = [5, 7, 1, 3, 2, 8, 6, 4, 9]


def _manager(slots: int, *, blocks: int = 100) -> KVCacheManager:
    groups = make_groups(None, StateSlot())
    return KVCacheManager(groups, [blocks, slots], SIZE, share_blocks=True)


def _lone(slots: int) -> KVCacheManager:
    """Of a model without attention."""
    return KVCacheManager(make_groups(StateSlot()), [slots], SIZE, share_blocks=True)


def _step(kv_cache: KVCacheManager, request: Request, end: int) -> None:
    kv_cache.take_copies()
    kv_cache.launched(request, end)
    request.num_computed_tokens = end
    kv_cache.commit(request, end)
    kv_cache.check_integrity()


def _begin(kv_cache: KVCacheManager, request: Request) -> int:
    """Start a request and compute its tokens as they are cut."""
    found = kv_cache.start(request)
    _compute(kv_cache, request, found)
    return found


def _compute(kv_cache: KVCacheManager, request: Request, at: int = 0) -> None:
    assert kv_cache.allocate(request.key, request.num_tokens)
    while at < request.num_tokens:
        at += kv_cache.cut(request, at, request.num_tokens - at)
        _step(kv_cache, request, at)


def _generate(kv_cache: KVCacheManager, request: Request, count: int) -> None:
    for token in range(count):
        request.token_ids.append(TokenId(100 + token))
        assert kv_cache.allocate(request.key, request.num_tokens)
        _step(kv_cache, request, request.num_tokens)


def _serve(
    kv_cache: KVCacheManager, key: int, prompt: Sequence[int], count: int = 0, **options: Any
) -> int:
    """Start a request, let it end, and return how many tokens it found."""
    request = make_request(key, prompt, **options)
    found = _begin(kv_cache, request)
    _generate(kv_cache, request, count)
    kv_cache.free(request.key)
    return found


def _kept(kv_cache: KVCacheManager, tokens: Sequence[int]) -> list[int]:
    """After how many of these tokens a state is kept."""
    digests = digests_of(b"", tokens, SIZE)
    index = kv_cache.pools[-1].index
    return [SIZE * (i + 1) for i, one in enumerate(digests) if index.block(one) is not None]


def test_of_an_output_only_the_latest_state_is_kept() -> None:
    kv_cache = _manager(10)
    request = make_request(1, PROMPT)
    _begin(kv_cache, request)
    assert _kept(kv_cache, PROMPT) == [8]
    for count in range(1, 30):
        _generate(kv_cache, request, 1)
        latest = (len(PROMPT) + count - 1) // SIZE * SIZE
        assert _kept(kv_cache, request.token_ids) == sorted({8, latest})
    assert kv_cache.pools[1].num_used <= 2, "its own, and one whose copy is planned"


def test_a_kept_state_that_others_copy_stays_until_they_have() -> None:
    kv_cache = _manager(10)
    request = make_request(1, PROMPT)
    _begin(kv_cache, request)
    _generate(kv_cache, request, 2)
    other = make_request(2, [*request.token_ids[:10], 0, 0])
    assert kv_cache.start(other) == 10
    _generate(kv_cache, request, 3)
    (copy,) = [one for one in kv_cache.take_copies().forks if one.target != one.source][-1:]
    assert copy.group == 1
    kv_cache.check_integrity()


def test_the_next_turn_finds_the_end_when_the_output_ended_anywhere() -> None:
    for count in range(1, 12):
        kv_cache = _manager(4)
        request = make_request(1, PROMPT)
        _begin(kv_cache, request)
        _generate(kv_cache, request, count)
        kv_cache.free(request.key)
        history = [*request.token_ids, 0, 0, 0]
        assert len(request.token_ids) - _serve(kv_cache, 2, history) < 2 * SIZE


def test_running_requests_hold_a_slot_each() -> None:
    """Kept states give way to requests that wait, so as many run as there are slots."""
    kv_cache = _manager(4)
    for key in range(1, 5):
        request = make_request(key, [key, *PROMPT])
        assert kv_cache.can_start(request, 0, 10, [0, 0])
        _begin(kv_cache, request)
        _generate(kv_cache, request, 1)
    assert kv_cache.pools[1].num_used == 4
    assert not kv_cache.can_start(make_request(9, PROMPT), 0, 9, [0, 0])


def test_the_least_recently_used_go_first_and_of_a_request_its_end_last() -> None:
    kv_cache = _manager(6)
    first, second = [1, *PROMPT], [2, *PROMPT]
    _serve(kv_cache, 1, first, 5)
    _serve(kv_cache, 2, second, 5)
    ends = [[*prompt, 100, 101, 102, 103] for prompt in (first, second)]
    assert [_kept(kv_cache, one) for one in ends] == [[8, 14], [8, 14]]
    assert _serve(kv_cache, 3, [*first, 0]) == 8, "used again, it goes last"
    _serve(kv_cache, 4, [3, *PROMPT])
    assert _kept(kv_cache, ends[1]) == [14], "the place in the prompt goes before the end"
    assert 8 in _kept(kv_cache, ends[0])


@pytest.mark.parametrize("kind", ["bypass", "muted"])
def test_who_leaves_no_prefixes_evicts_no_state(kind: str) -> None:
    kv_cache = _manager(3)
    request = make_request(1, [1, *PROMPT], bypass=kind == "bypass")
    kv_cache.start(request)
    if kind == "muted":
        kv_cache.reset_prefix_cache()
    for first in (2, 3):  # with its own slot, all are in use
        _serve(kv_cache, first, [first, *PROMPT])
    kept = [_kept(kv_cache, [first, *PROMPT]) for first in (2, 3)]
    assert kv_cache.pools[1].num_cached == 2
    _compute(kv_cache, request)
    _generate(kv_cache, request, 9)
    assert [_kept(kv_cache, [first, *PROMPT]) for first in (2, 3)] == kept == [[8], [8]]
    assert _kept(kv_cache, request.token_ids) == []


def test_the_last_free_slot_is_for_who_waits_unless_the_state_lasts() -> None:
    kv_cache = _manager(2)
    request = make_request(1, PROMPT)
    _begin(kv_cache, request)
    _generate(kv_cache, request, 9)
    assert _kept(kv_cache, request.token_ids) == [8]


def test_a_state_that_nobody_may_find_is_held_until_the_choices_go_on_from_it() -> None:
    kv_cache, prompt = _manager(8), [*PROMPT, *PROMPT]
    parent, child = make_request(1, prompt, bypass=True), make_request(2, prompt, choice=1)
    parent.spec = child.spec = replace(parent.spec, n=2)
    kv_cache.start(parent)
    assert kv_cache.allocate(parent.key, len(prompt))
    _step(kv_cache, parent, 8)
    _step(kv_cache, parent, 13)
    kv_cache.take_copies()
    kv_cache.launched(parent, len(prompt))
    parent.num_computed_tokens = len(prompt)
    assert kv_cache.fork(parent, child) == 8, "as it is before the last step is collected"
    kv_cache.commit(parent, len(prompt))
    kv_cache.check_integrity()


def test_choices_of_a_known_prompt_wait_for_its_state_rather_than_begin_anew() -> None:
    kv_cache = _manager(8)
    _serve(kv_cache, 1, PROMPT)
    parent, child = make_request(2, PROMPT), make_request(3, PROMPT, choice=1)
    assert _begin(kv_cache, parent) == 8
    assert kv_cache.fork(parent, child) is None
    assert kv_cache.find_prefix(child) == kv_cache.start(child) == 8


def test_a_state_that_is_evicted_between_match_and_start_is_not_found() -> None:
    kv_cache = _manager(2)
    _serve(kv_cache, 1, PROMPT)
    request = make_request(2, [*PROMPT, 0])
    assert kv_cache.find_prefix(request) == 8
    _begin(kv_cache, make_request(3, [1, *PROMPT]))  # its slot, and the one of a planned copy
    assert kv_cache.find_prefix(request) == 0
    assert kv_cache.can_start(request, 0, 9, [0, 0])
    assert kv_cache.start(request) == 0


# ---- where prompts part, if no layer attends -----------------------------------------------------


def test_without_attention_the_third_prompt_goes_on_where_two_parted() -> None:
    kv_cache = _lone(8)
    common = PROMPT[:6]
    found = [_serve(kv_cache, key, [*common, key, 0, 0]) for key in (11, 12, 13, 14)]
    assert found == [0, 0, 6, 6]
    assert kv_cache.state_figures()["prefix_tokens_without_state"] == 6
    # The fifth parts earlier from all of them, and the sixth finds that.
    assert [_serve(kv_cache, key, [*PROMPT[:3], 7, key, 0, 0]) for key in (15, 16)] == [0, 2]


def test_outputs_are_seen_too() -> None:
    kv_cache = _lone(9)
    _serve(kv_cache, 1, PROMPT, 9)
    history = [*PROMPT, 100, 101, 102]
    assert [_serve(kv_cache, key, [*history, key, 0, 0]) for key in (2, 3)] == [8, 12]


@pytest.mark.parametrize("other", [{"salt": b"mine"}, {"bypass": True}])
def test_what_another_may_not_find_shows_it_nothing(other: dict[str, Any]) -> None:
    kv_cache = _lone(8)
    _serve(kv_cache, 1, PROMPT, **other)
    assert [_serve(kv_cache, key, [*PROMPT[:6], key, 0, 0]) for key in (2, 3, 4)] == [0, 0, 6]


def test_a_reset_forgets_what_was_seen() -> None:
    kv_cache = _lone(8)
    _serve(kv_cache, 1, PROMPT)
    kv_cache.reset_prefix_cache()
    assert [_serve(kv_cache, key, [*PROMPT[:6], key, 0, 0]) for key in (2, 3, 4)] == [0, 0, 6]


def test_who_waits_learns_what_was_seen_meanwhile() -> None:
    kv_cache = _lone(8)
    waits = make_request(9, [*PROMPT[:6], 9, 0, 0])
    assert kv_cache.find_prefix(waits) == 0
    first = make_request(1, [*PROMPT[:6], 1, 0, 0])
    assert kv_cache.start(first) == 0
    assert kv_cache.find_prefix(waits) == 0
    _compute(kv_cache, first)
    assert kv_cache.start(waits) == 0
    assert kv_cache.cut(waits, 0, 9) == 6


def test_what_is_seen_is_bounded_and_the_oldest_goes_first() -> None:
    watch = PrefixWatch()
    seen = SeenPrefixes(watch, most=4)
    digests = [bytes([i]) * 16 for i in range(6)]
    seen.note(digests[:4])
    seen.note(digests[:1])  # again: it is the latest
    watch.digests, watch.is_stale = frozenset(digests[1:2]), False
    seen.note(digests[4:5])
    assert watch.is_stale, "one of those that somebody asked for has gone"
    assert len(seen) == 4
    assert [seen.reach([one], 0) for one in digests] == [1, 0, 1, 1, 1, 0]
    assert seen.reach(digests, 2) == 5
    seen.clear()
    assert seen.reach(digests, 0) == len(seen) == 0
