"""What each policy promises, with the scripted runner."""

from __future__ import annotations

import pytest

from engine.contract.errors import ConfigError
from engine.contract.outputs import FinishReason
from engine.contract.types import RequestId
from engine.core.engine_core import EngineCore
from engine.scheduler.base import Scheduler, StepPlan
from engine.scheduler.fifo import FIFOScheduler
from engine.scheduler.policies import register_scheduler, scheduler_class
from engine.scheduler.prefill_first import PATIENCE
from engine.scheduler.priority import PriorityScheduler
from engine.scheduler.request_heap import RequestHeap
from engine.scheduler.step_times import StepTimes
from tests.engine.core_machine import POLICIES
from tests.engine.fake_runner import make_core, make_request
from tests.engine.ledger import drain
from tests.engine.scheduler.watched import Watched

# ---- first in, first out -----------------------------------------------------------------------


def test_fifo_gives_decoding_requests_their_tokens_first() -> None:
    watched = Watched(max_batch_tokens=4)
    watched.add(make_request("a", [1, 2], 9))
    watched.step()
    watched.add(make_request("b", range(9), 2), make_request("c", [1], 2))
    assert watched.step() == {"a": 1, "b": 3}
    assert watched.step() == {"a": 1, "b": 3}
    assert watched.step() == {"a": 1, "b": 3}  # nine tokens in three chunks
    assert watched.step() == {"a": 1, "b": 1, "c": 1}
    watched.drain()


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    watched = Watched(num_blocks=8, block_size=4, max_batch_tokens=32)
    watched.add(make_request("a", range(20), 9), make_request("big", range(24), 2))
    watched.add(make_request("small", [1], 2))
    assert watched.step() == {"a": 20}
    assert watched.step() == {"a": 1}  # small would fit, big does not
    watched.drain()
    assert watched.ledger.end("big").timings.first_scheduled is not None


def test_the_last_one_is_preempted_and_goes_on_where_it_was() -> None:
    watched = Watched(num_blocks=4, block_size=4, max_batch_tokens=32)
    watched.add(make_request("a", range(7), 9), make_request("b", range(7), 9))
    watched.drain()
    assert watched.ledger.end("a").timings.preemptions == 0
    assert watched.ledger.end("b").timings.preemptions > 0


# ---- prefill first -----------------------------------------------------------------------------


def test_prefill_first_lets_prompts_through_before_decoding_goes_on() -> None:
    watched = Watched(policy="prefill_first", max_batch_tokens=4)
    watched.add(make_request("a", [1, 2], 9))
    watched.step()
    watched.add(make_request("b", range(8), 2), make_request("c", [1, 2, 3], 2))
    assert watched.step() == {"b": 4}
    assert watched.step() == {"b": 4}
    assert watched.step() == {"c": 3, "a": 1}  # what is left of the budget
    watched.drain()


@pytest.mark.parametrize(("budget", "decoding"), [(4, 1), (4, 4), (2, 6)])
def test_prefill_first_does_not_starve_decoding(budget: int, decoding: int) -> None:
    """With prompts waiting all the time, each gets a token within the bound."""
    watched = Watched(
        policy="prefill_first", num_blocks=200, max_batch_tokens=budget, max_requests=decoding + 1
    )
    names = [f"d{index}" for index in range(decoding)]
    watched.add(*(make_request(name, [1], 30) for name in names))
    for _ in range(decoding * 2):
        watched.step()
    watched.add(*(make_request(f"p{index}", range(40), 1) for index in range(20)))
    bound = PATIENCE + -(-(decoding + 1) // budget)
    since = dict.fromkeys(names, 0)
    longest = 0
    for _ in range(60):
        batch = watched.step()
        for name in names:
            since[name] = 0 if name in batch else since[name] + 1
            longest = max(longest, since[name])
    assert PATIENCE - 1 <= longest <= bound
    watched.drain()


def test_prefill_first_never_preempts_the_one_that_was_started_first() -> None:
    watched = Watched(policy="prefill_first", num_blocks=10, block_size=2, max_batch_tokens=8)
    watched.add(*(make_request(f"r{index}", [1, 2, index], 12) for index in range(6)))
    watched.drain()
    assert watched.ledger.end("r0").timings.preemptions == 0
    assert watched.core.stats().preemptions > 0


# ---- priorities --------------------------------------------------------------------------------


def test_higher_priorities_go_first_and_equal_ones_by_arrival() -> None:
    watched = Watched(policy="priority", max_requests=1)
    order = [("a", 0), ("b", 5), ("c", -7), ("d", 5), ("e", 100), ("f", 0)]
    watched.add(*(make_request(name, [1], 1, priority=level) for name, level in order))
    assert [next(iter(watched.step())) for _ in order] == ["e", "b", "d", "a", "f", "c"]


def test_a_waiting_request_takes_the_place_of_the_least_and_latest() -> None:
    watched = Watched(policy="priority", max_requests=3)
    watched.add(
        make_request("low", [1], 9, priority=-1),
        make_request("low2", [1], 9, priority=-1),
        make_request("mid", [1], 9),
    )
    watched.step()
    watched.add(make_request("high", [1, 2], 2, priority=1), make_request("mid2", [1], 2))
    assert watched.step() == {"high": 2, "mid": 1, "mid2": 1}  # mid2 is above low as well
    watched.drain()
    preemptions = {
        name: watched.ledger.end(name).timings.preemptions for name in watched.ledger.specs
    }
    assert preemptions == {"low": 1, "low2": 1, "mid": 0, "high": 0, "mid2": 0}


def test_a_waiting_request_takes_blocks_of_lower_priorities_only() -> None:
    watched = Watched(policy="priority", num_blocks=8, block_size=4, max_batch_tokens=40)
    watched.add(make_request("equal", range(15), 3), make_request("low", range(11), 3, priority=-1))
    watched.step()
    watched.add(make_request("high", range(8), 2))
    assert watched.step() == {"high": 8, "equal": 1}
    watched.drain()
    assert watched.ledger.end("equal").timings.preemptions == 0
    assert watched.ledger.end("low").timings.preemptions == 1


def test_nobody_is_preempted_where_it_would_not_help() -> None:
    watched = Watched(policy="priority", num_blocks=8, block_size=4, max_batch_tokens=40)
    watched.add(make_request("high", range(20), 3, priority=1))
    watched.add(make_request("low", range(4), 6, priority=-1))
    watched.step()
    watched.add(make_request("mid", range(16), 2))  # needs four blocks; three are not high's
    assert watched.step() == {"high": 1, "low": 1}
    watched.drain()
    assert watched.core.stats().preemptions == 0


def test_blocks_that_a_window_has_left_behind_are_no_reason_to_preempt() -> None:
    watched = Watched(
        policy="priority", num_blocks=8, block_size=4, max_batch_tokens=40, windows=(8,)
    )
    watched.add(make_request("high", range(20), 8, priority=1))
    watched.add(make_request("low", range(20), 8, priority=-1))
    while "low" not in watched.step():
        pass
    watched.add(make_request("mid", range(28), 2))  # needs seven; low has had six, and holds three
    assert watched.step() == {"high": 1, "low": 1}
    assert watched.core.stats().preemptions == 0
    watched.drain()


def test_of_the_running_the_lowest_that_came_last_is_preempted_for_blocks() -> None:
    watched = Watched(policy="priority", num_blocks=7, block_size=2, max_batch_tokens=32)
    watched.add(
        make_request("first", [1, 2, 3], 8),
        make_request("low", [1, 2, 3], 8, priority=-1),
        make_request("second", [1, 2, 3], 8),
    )
    watched.drain()
    ends = {name: watched.ledger.end(name).timings for name in ("first", "low", "second")}
    assert ends["first"].preemptions == 0
    assert ends["low"].preemptions > 0
    assert ends["first"].finished <= ends["second"].finished <= ends["low"].finished


def test_who_is_preempted_leaves_the_step_that_is_put_together() -> None:
    watched = Watched(policy="priority", num_blocks=7, block_size=4, max_batch_tokens=8)
    watched.add(make_request("late", range(7), 9))
    watched.step()
    early = make_request("early", range(50, 70), 2)
    watched.ledger.add(early)
    watched.core.add(early, 1.0)
    assert watched.step() == {"late": 1, "early": 7}
    assert watched.step() == {"late": 1, "early": 7}
    # late comes first, as it decodes; then the seven blocks are not enough for early
    assert watched.step() == {"early": 6}
    watched.drain()
    assert watched.ledger.end("late").timings.preemptions == 1


def test_within_a_level_decoding_goes_before_prefilling() -> None:
    watched = Watched(policy="priority", max_batch_tokens=4)
    watched.add(make_request("a", range(6), 9))
    watched.step()
    watched.add(make_request("b", [1], 9))
    watched.step()
    watched.add(make_request("c", range(20), 2), make_request("d", range(9), 2, priority=1))
    assert watched.step() == {"d": 4}
    assert watched.step() == {"d": 4}
    assert watched.step() == {"d": 1, "a": 1, "b": 1, "c": 1}
    watched.drain()


# ---- time limits that cannot be met ----------------------------------------------------------


def test_without_a_measurement_only_a_passed_limit_counts() -> None:
    watched = Watched(policy="priority", max_requests=1, max_batch_tokens=4)
    watched.add(make_request("a", range(40), 3, time_limit_s=1e-6))
    watched.clock.now -= 0.001
    assert watched.step() == {"a": 4}


def test_a_request_whose_prefill_alone_takes_too_long_is_ended_instead_of_run() -> None:
    watched = Watched(policy="priority", num_blocks=200, max_requests=1, max_batch_tokens=4)
    watched.seconds = 1.0
    watched.add(make_request("a", range(8), 3))
    watched.step()
    watched.step()  # full steps of one second each
    watched.add(
        make_request("hopeless", range(40), 3, time_limit_s=9.5),  # ten steps
        make_request("possible", range(40), 3, time_limit_s=30.0),
        make_request("free", range(40), 3),
    )
    seen = watched.step()
    assert watched.ledger.over == {"hopeless"}
    end = watched.ledger.end("hopeless")
    assert end.reason is FinishReason.TIME_LIMIT
    assert end.timings.first_scheduled is None
    assert "hopeless" not in seen
    watched.drain()
    assert watched.ledger.end("possible").reason is FinishReason.LENGTH
    assert all("hopeless" not in step for step in watched.steps)


def test_a_request_deep_in_the_queue_ends_when_its_last_moment_has_passed() -> None:
    watched = Watched(policy="priority", num_blocks=200, max_requests=1, max_batch_tokens=4)
    watched.seconds = 1.0
    watched.add(make_request("a", range(4), 40))
    for _ in range(3):
        watched.step()
    watched.add(
        *(make_request(f"w{index}", [1], 3) for index in range(50)),
        make_request("deep", range(40), 3, time_limit_s=20.0),  # must begin within ten seconds
    )
    steps = 0
    while "deep" not in watched.ledger.over:
        watched.step()
        steps += 1
    assert 10 <= steps <= 12
    assert watched.ledger.end("deep").reason is FinishReason.TIME_LIMIT


def test_none_is_ended_that_could_have_made_it() -> None:
    """Steps get slower and faster again: the fastest of the last ones counts."""
    watched = Watched(policy="priority", num_blocks=200, max_requests=1, max_batch_tokens=4)
    for watched.seconds in (0.5, 7.0, 3.0):
        watched.add(make_request(f"s{watched.seconds}", range(4), 2))
        watched.step()
        watched.step()
    watched.add(make_request("a", range(8), 1, time_limit_s=1.1))
    watched.seconds = 0.5
    assert watched.step() == {"a": 4}
    assert watched.step() == {"a": 4}
    assert watched.ledger.end("a").reason is FinishReason.LENGTH


def test_a_choice_that_waits_hopelessly_leaves_the_others_running() -> None:
    watched = Watched(policy="priority", num_blocks=200, max_requests=1, max_batch_tokens=4)
    watched.seconds = 1.0
    watched.add(make_request("a", range(12), 40, n=2, time_limit_s=12.0))
    while not watched.ledger.ends:
        watched.step()
    assert set(watched.ledger.ends) == {(RequestId("a"), 1)}
    assert watched.clock.now < 112.0
    watched.drain()
    assert len(watched.ledger.text("a", 0)) > len(watched.ledger.text("a", 1)) == 0


def test_who_has_ended_is_not_given_up_again() -> None:
    """Between `choose` and `take_hopeless` a pending step may be collected, and fail."""
    watched = Watched(policy="priority", num_blocks=200, max_batch_tokens=4)
    scheduler = watched.core.scheduler
    scheduler.measured(4, 1.0)
    watched.add(make_request("a", range(40), 3, time_limit_s=5.0))
    watched.add(make_request("b", range(40), 3, time_limit_s=5.0))
    batch = scheduler.schedule(watched.clock())
    assert batch is not None
    assert batch.is_empty
    assert watched.core.cancel(RequestId("a"))
    given_up = [one.request_id for one in scheduler.take_hopeless(watched.clock())]
    assert given_up == ["b"]


def test_step_times() -> None:
    times = StepTimes(8)
    assert times.at_least(1000) == 0.0
    times.add(3, 0.25)
    assert times.at_least(17) == 3 * 0.25  # nothing better is known of full steps
    times.add(8, 1.0)
    times.add(8, 2.0)
    assert times.at_least(17) == 2 * 1.0 + 0.25
    assert times.at_least(16) == 2.0
    for _ in range(64):
        times.add(8, 3.0)
    assert times.at_least(17) == 9.0  # the faster ones are forgotten


def test_the_heap_drops_what_has_left_and_stays_small() -> None:
    watched = Watched(policy="priority", max_requests=1)
    scheduler = watched.core.scheduler
    assert isinstance(scheduler, PriorityScheduler)
    watched.add(*(make_request(f"r{i}", [1], 1, time_limit_s=1e6) for i in range(1000)))
    for index in range(1000):
        watched.core.cancel(RequestId(f"r{index}"))
    assert len(scheduler._queue) <= 64
    assert len(scheduler._limits) <= 64
    assert scheduler.next_waiting() is None
    assert len(scheduler._queue) == 0


def test_the_heap_keeps_the_first_entry_of_a_request() -> None:
    core, _, _ = make_core()
    core.add(make_request("a", [1], 1), 100.0)
    (request,) = core.scheduler.waiting.values()
    heap = RequestHeap(core.scheduler.waiting)
    for rank in range(200, 100, -1):
        heap.push((float(rank),), request)
    heap.tidy()
    assert len(heap) == 1
    assert heap.peek() == ((101.0,), request)


# ---- the safety margin -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_the_safety_margin_keeps_blocks_of_each_group_free(policy: str) -> None:
    watched = Watched(
        policy=policy,
        windows=(None, 8),
        num_blocks=(20, 10),
        block_size=4,
        max_batch_tokens=64,
        safety_margin=0.5,
    )
    watched.add(*(make_request(f"r{index}", range(8), 3) for index in range(6)))
    # 2 blocks of each group a request; 5 of the second group must stay free
    assert len(watched.step()) == 2
    free = [pool.num_free for pool in watched.kv_cache.pools]
    assert free[0] >= 10
    assert free[1] >= 5
    watched.drain()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("margin", [0.0, 1.0])
def test_the_margin_blocks_no_one_where_nothing_runs(policy: str, margin: float) -> None:
    watched = Watched(policy=policy, num_blocks=16, safety_margin=margin)
    watched.add(*(make_request(f"r{index}", range(20), 3) for index in range(4)))
    watched.drain()
    most = max(len(step) for step in watched.steps)
    assert (most == 1) == (margin == 1.0)


# ---- policies of one's own ---------------------------------------------------------------------


def test_the_policies_have_their_names() -> None:
    assert scheduler_class("fifo") is FIFOScheduler
    assert scheduler_class("priority") is PriorityScheduler
    with pytest.raises(ConfigError, match=r"scheduler_type: is 'x'; it must be one of .*fifo"):
        scheduler_class("x")


def test_what_is_no_policy_is_refused() -> None:
    class Unfinished(Scheduler):
        pass

    with pytest.raises(ConfigError, match="registered already"):
        register_scheduler("fifo", PriorityScheduler)
    with pytest.raises(ConfigError, match="no scheduler"):
        register_scheduler("mine", int)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no scheduler"):
        register_scheduler("mine", Unfinished)
    with pytest.raises(ConfigError, match="is no name"):
        register_scheduler("", FIFOScheduler)
    with pytest.raises(ConfigError):
        scheduler_class("mine")


def test_all_that_run_go_into_a_step_at_once_or_none() -> None:
    watched = Watched(num_blocks=6, block_size=4, max_batch_tokens=8)
    watched.add(make_request("a", [1, 2], 12), make_request("b", range(3), 12))
    watched.step()
    scheduler = watched.core.scheduler
    rows = list(scheduler.running.values())

    def extend_all(budget: int) -> tuple[bool, dict[str, int], int]:
        plan = StepPlan(budget)
        done = scheduler.extend_all(plan)
        parts = {part.request.request_id: part.num_tokens for part in plan.parts.values()}
        assert all(part.num_sampled == 1 for part in plan.parts.values())
        return done, parts, plan.budget

    assert extend_all(1) == (False, {}, 1)
    assert extend_all(2) == (True, {"a": 1, "b": 1}, 0)
    assert extend_all(8) == (True, {"a": 1, "b": 1}, 6)
    rows[1].num_computed_tokens = 0  # as if it had lost them
    assert extend_all(4) == (False, {}, 4)
    assert extend_all(8) == (True, {"a": 1, "b": 4}, 3)
    rows[1].num_computed_tokens = 3
    rows[1].token_ids.extend([rows[1].token_ids[0]] * 40)
    assert extend_all(99) == (False, {}, 99), "there are no blocks for so many"
    del rows[1].token_ids[-40:]
    plan = StepPlan(8)
    scheduler.extend(plan, rows[0])
    with pytest.raises(ValueError, match="an empty step"):
        scheduler.extend_all(plan)


def test_a_policy_that_breaks_its_contract_is_told_so() -> None:
    class Twice(Scheduler):
        def choose(self, plan: StepPlan, now: float) -> None:
            for request in list(self.waiting.values()):
                self.admit(plan, request, now)
                self.extend(plan, request)

    class Idle(Scheduler):
        def choose(self, plan: StepPlan, now: float) -> None:
            for request in list(self.waiting.values()):
                self.admit(plan, request, now)

    for policy, message in ((Twice, "once"), (Idle, "chose none")):
        watched = Watched()
        options = {"max_batch_tokens": 16, "max_requests_per_batch": 4}
        watched.core = EngineCore(
            policy(watched.kv_cache, **options),  # type: ignore[arg-type]
            watched.runner,
            max_context_tokens=64,
        )
        watched.add(make_request("a", [1, 2], 3))
        with pytest.raises((ValueError, RuntimeError), match=message):
            drain(watched.core, watched.ledger)
