"""Service is counted by caller: once for each position that is computed, and in bounded memory."""

from __future__ import annotations

import pytest

from engine.contract.stats import CallerStats
from engine.contract.types import CallerKey, RequestId
from engine.scheduler.live_callers import NAMED_CALLERS
from tests.engine.core_machine import POLICIES
from tests.engine.fake_runner import make_request
from tests.engine.scheduler.watched import Watched


def rows(watched: Watched) -> dict[str, CallerStats]:
    return {one.caller: one for one in watched.core.stats().callers}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_caller_s_service_is_its_prompts_and_twice_its_output(policy: str) -> None:
    watched = Watched(policy=policy, max_batch_tokens=8)
    watched.add(make_request("a", range(20), 5, caller="x"))
    watched.add(make_request("b", range(3), 2, caller="y", weight=2.5))
    watched.add(make_request("c", range(3), 0, caller="x"))
    assert (rows(watched)["x"].waiting, rows(watched)["y"].waiting) == (2, 1)
    watched.drain()
    # The last token of an output is not computed, since nothing follows it.
    assert rows(watched)["x"] == CallerStats(CallerKey("x"), 1.0, 0, 0, 20 + 2 * 4 + 3)
    assert rows(watched)["y"] == CallerStats(CallerKey("y"), 2.5, 0, 0, 3 + 2)
    assert watched.core.stats().other_callers is None


def test_what_is_found_in_the_prefix_cache_is_no_service() -> None:
    watched = Watched(max_batch_tokens=64, share_blocks=True, block_size=4)
    watched.add(make_request("a", range(16), 1, caller="x"))
    watched.drain()
    watched.add(make_request("b", [*range(12), 99, 98], 1, caller="y"))
    watched.drain()
    assert rows(watched)["y"].service == 2


def test_what_is_computed_again_after_a_preemption_is_not_counted_again() -> None:
    watched = Watched(num_blocks=4, block_size=4, max_batch_tokens=32)
    watched.add(make_request("a", range(7), 9, caller="x"))
    watched.add(make_request("b", range(7), 9, caller="y"))
    watched.drain()
    assert watched.ledger.end("b").timings.preemptions > 0
    assert rows(watched)["x"].service == rows(watched)["y"].service == 7 + 2 * 8


def test_what_is_computed_again_because_it_was_held_is_counted_again() -> None:
    watched = Watched(num_blocks=4, block_size=4, max_batch_tokens=32)
    watched.add(make_request("unread", range(7), 3, caller="x"))
    watched.step()
    watched.core.hold(RequestId("unread"))
    watched.add(make_request("other", range(12), 3, caller="y"))
    watched.step()  # takes the held one's blocks
    watched.core.unhold(RequestId("unread"))
    watched.drain()
    assert watched.ledger.end("unread").timings.preemptions == 1
    assert rows(watched)["x"].service == 7 + 7 + 2 * 2


def test_many_callers_are_summed_and_none_is_lost() -> None:
    watched = Watched(max_requests=4, num_blocks=64)
    for index in range(100):
        watched.add(make_request(f"r{index}", [1, 2], 1, caller=f"c{index}"))
    stats = watched.core.stats()
    assert len(stats.callers) == NAMED_CALLERS
    assert stats.other_callers is not None
    assert stats.other_callers.waiting == 100 - NAMED_CALLERS
    watched.drain()
    stats = watched.core.stats()
    assert len(stats.callers) == NAMED_CALLERS
    assert stats.other_callers is not None
    assert stats.other_callers.service + sum(one.service for one in stats.callers) == 200
    watched.add(make_request("late", [1], 1, caller="late"))
    assert next(iter(rows(watched))) == "late"  # takes the name of one that has no requests
    assert len(rows(watched)) == NAMED_CALLERS
    scheduler = watched.core.scheduler
    watched.drain()
    assert not scheduler.callers._active
    assert not scheduler.callers._of
    assert len(scheduler.callers._idle) == NAMED_CALLERS
