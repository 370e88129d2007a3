"""Held requests: no step takes them, they are preempted first, and go on where they were."""

from __future__ import annotations

import threading

import pytest

from engine.contract.outputs import FinishReason
from engine.contract.types import RequestId
from tests.engine.core_machine import POLICIES
from tests.engine.fake_runner import expected_tokens, make_core, make_request
from tests.engine.ledger import drain
from tests.engine.rig import WAIT, LoopRig, Sink, count_calls
from tests.engine.scheduler.watched import CoreRig


class Rig(CoreRig):
    def add(self, name: str, length: int = 3, max_tokens: int = 9, **options: object) -> None:
        spec = make_request(name, range(length), max_tokens, **options)  # type: ignore[arg-type]
        self.ledger.add(spec)
        self.core.add(spec, self.clock())

    def steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.ledger.take(self.core.step())

    def hold(self, name: str) -> None:
        assert self.core.hold(RequestId(name))

    def unhold(self, name: str) -> None:
        assert self.core.unhold(RequestId(name))

    def drain(self) -> None:
        drain(self.core, self.ledger)
        self.ledger.check(self.core.max_context_tokens)

    def preemptions(self, name: str) -> int:
        return self.ledger.end(name).timings.preemptions


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_held_request_keeps_its_blocks_and_goes_on(policy: str, overlap: bool) -> None:
    rig = Rig(policy=policy, overlap=overlap, late=overlap, num_blocks=64)
    rig.add("a")
    rig.add("b", max_tokens=30)
    rig.steps(4)
    had = len(rig.ledger.text("a"))
    rig.hold("a")
    used = rig.kv_cache.num_used_blocks
    rig.steps(10)
    assert len(rig.ledger.text("a")) <= had + overlap
    assert rig.kv_cache.num_used_blocks >= used
    stats = rig.core.stats()
    assert (stats.running, stats.waiting, stats.held, stats.holds) == (1, 0, 1, 1)
    rig.unhold("a")
    rig.steps()
    assert rig.core.stats().held == 0
    rig.drain()
    assert rig.preemptions("a") == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("overlap", [False, True])
def test_held_requests_are_preempted_first(policy: str, overlap: bool) -> None:
    """Not the one that runs and came last, or is of the lowest priority."""
    rig = Rig(policy=policy, overlap=overlap, num_blocks=9, block_size=4, max_batch_tokens=32)
    rig.add("held", length=11)
    rig.add("also", length=3)
    rig.steps(2)
    rig.hold("held")
    rig.add("first", length=8, max_tokens=8)
    rig.add("last", length=4, max_tokens=4)  # with "also" and "first" nine blocks in the end
    rig.steps(6)
    assert rig.core.stats().preemptions == 1
    rig.drain()
    assert [rig.preemptions(name) for name in ("also", "first", "last", "held")] == [0, 0, 0, 1]


def test_of_held_requests_the_one_that_was_held_first_is_preempted() -> None:
    rig = Rig(num_blocks=10, block_size=4, max_batch_tokens=32)
    for name in ("later", "first"):
        rig.add(name, length=11)
    rig.steps(2)
    rig.hold("first")
    rig.hold("later")
    rig.add("newcomer", length=16, max_tokens=2)
    rig.steps(2)
    rig.unhold("first")
    rig.unhold("later")
    rig.drain()
    assert [rig.preemptions(name) for name in ("first", "later")] == [1, 0]


@pytest.mark.parametrize("overlap", [False, True])
def test_who_waits_takes_the_place_and_the_blocks_of_held_ones(overlap: bool) -> None:
    rig = Rig(num_blocks=8, block_size=4, max_batch_tokens=64, max_requests=2, overlap=overlap)
    rig.add("one", length=11)
    rig.add("two", length=11)
    rig.steps(2)
    rig.add("newcomer", length=25, max_tokens=3)
    rig.hold("one")
    rig.steps()
    assert RequestId("newcomer") not in rig.ledger.prompts_done  # two needs its blocks
    rig.hold("two")
    rig.steps(5)
    assert rig.ledger.end("newcomer").reason is FinishReason.LENGTH
    rig.drain()
    assert rig.preemptions("newcomer") == 0


def test_a_waiting_request_of_higher_priority_need_not_wait_for_held_blocks() -> None:
    """The batch is full of lower ones, and the blocks are those of a held one."""
    rig = Rig(policy="priority", num_blocks=8, block_size=4, max_batch_tokens=64, max_requests=1)
    rig.add("held", length=19)
    rig.steps()
    rig.hold("held")
    rig.add("low", length=3, max_tokens=40, priority=-1)
    rig.steps()
    rig.add("high", length=20, max_tokens=2, priority=1)
    rig.steps(2)
    assert rig.ledger.end("high").reason is FinishReason.LENGTH


@pytest.mark.parametrize("host_blocks", [None, 12])
def test_where_the_batch_is_full_it_waits_at_the_head_of_the_queue(host_blocks: int | None) -> None:
    rig = Rig(num_blocks=64, max_requests=1, overlap=True, host_blocks=host_blocks)
    rig.add("a", max_tokens=20)
    rig.steps(3)
    rig.hold("a")
    rig.add("b", max_tokens=5)
    rig.add("c", max_tokens=5)
    rig.steps(2)
    rig.unhold("a")
    rig.steps(2)
    assert rig.core.stats().waiting == 2
    rig.drain()
    ends = [rig.ledger.end(name).timings.finished for name in ("b", "a", "c")]
    assert ends == sorted(ends)
    assert rig.preemptions("a") == 1
    assert rig.core.stats().restores == (0 if host_blocks is None else 1)


@pytest.mark.parametrize("host_blocks", [None, 12])
def test_of_two_that_come_back_to_one_place_one_may_be_in_the_step_that_runs(
    host_blocks: int | None,
) -> None:
    rig = Rig(num_blocks=64, max_requests=1, overlap=True, host_blocks=host_blocks)
    for name in ("a", "b"):
        rig.add(name, max_tokens=20)
        rig.steps(3)
        rig.hold(name)
    for name in ("a", "b"):
        rig.unhold(name)
    rig.drain()
    assert rig.preemptions("a") == 0
    assert rig.preemptions("b") == 1


def test_one_that_waits_leaves_the_queue_and_comes_back_to_its_head() -> None:
    rig = Rig(max_requests=1)
    for name in "abc":
        rig.add(name, max_tokens=2)
    rig.steps()
    rig.hold("c")
    assert rig.core.num_waiting == 1
    rig.unhold("c")
    assert [one.request_id for one in rig.core.scheduler.waiting.values()] == ["c", "b"]
    rig.drain()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("when", [0, 1, 2, 3, 5])
def test_a_hold_is_for_all_choices_also_those_that_have_not_begun(when: int, overlap: bool) -> None:
    rig = Rig(num_blocks=64, max_batch_tokens=4, overlap=overlap, late=overlap)
    rig.add("a", length=10, n=3)
    rig.steps(when)
    rig.hold("a")
    rig.steps(3)
    tokens = [list(rig.ledger.text("a", choice)) for choice in range(3)]
    rig.steps(5)
    assert tokens == [rig.ledger.text("a", choice) for choice in range(3)]
    assert not rig.core.scheduler.running
    assert not rig.core.scheduler.waiting
    rig.drain()
    assert all(rig.ledger.end("a", i).reason is FinishReason.LENGTH for i in range(3))


def test_a_choice_that_takes_over_the_prompt_of_a_held_request_is_held() -> None:
    rig = Rig(max_batch_tokens=4)
    rig.add("a", length=10, n=2)
    rig.steps()
    rig.hold("a")
    assert rig.core.finish(RequestId("a"), 0, 0)
    rig.steps(9)
    assert not rig.ledger.text("a", 1)
    rig.drain()
    assert rig.ledger.end("a", 1).reason is FinishReason.LENGTH


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pending_token_that_the_host_must_know_is_waited_for(policy: str) -> None:
    """Held and released while its step runs; the runner refuses a pending token there."""
    rig = Rig(policy=policy, num_blocks=64, overlap=True, late=True)
    rig.add("a", max_tokens=20, history=True)
    rig.add("b", max_tokens=20)
    for _ in range(12):
        rig.steps()
        rig.hold("a")
        rig.unhold("a")
    rig.drain()


def test_ends_of_held_requests() -> None:
    rig = Rig(num_blocks=64)
    for name in ("cancelled", "finished", "late"):
        rig.add(name, time_limit_s=5.0 if name == "late" else None)
    rig.steps(3)
    for name in ("cancelled", "finished", "late"):
        rig.hold(name)
    assert not rig.core.has_work
    assert rig.core.end_overdue() == 5.0
    assert rig.core.cancel(RequestId("cancelled"))
    assert rig.core.finish(RequestId("finished"), 2)
    rig.clock.now += 6.0
    assert rig.core.end_overdue() is None
    rig.steps()
    reasons = [rig.ledger.end(name).reason for name in ("cancelled", "finished", "late")]
    assert reasons == [FinishReason.CANCELLED, FinishReason.STOP, FinishReason.TIME_LIMIT]
    assert rig.kv_cache.num_used_blocks == 0
    assert rig.core.stats().held == 0
    assert not rig.core.has_work


def test_what_a_failed_step_should_have_offloaded_is_computed_again() -> None:
    rig = Rig(num_blocks=9, block_size=4, max_batch_tokens=32, host_blocks=12)
    rig.add("held", length=20)
    rig.steps(3)
    rig.hold("held")
    rig.add("other", length=20)
    rig.runner.fail = 1
    rig.steps()
    assert rig.ledger.end("other").reason is FinishReason.ERROR
    assert rig.core.stats().held == 1
    rig.drain()
    assert rig.ledger.end("held").reason is FinishReason.LENGTH


@pytest.mark.parametrize("policy", POLICIES)
def test_cost_of_a_step_does_not_depend_on_how_many_are_held(policy: str) -> None:
    def calls(held: int) -> tuple[int, int]:
        core, _, _ = make_core(
            policy=policy, num_blocks=9000, max_requests=4, max_batch_tokens=64, verify=False
        )
        for index in range(held):
            core.add(make_request(f"h{index}", [1, 2, 3], 2000, time_limit_s=1e9), 100.0)
            core.step()
            core.hold(RequestId(f"h{index}"))
        for index in range(4):
            core.add(make_request(f"r{index}", [1, 2, 3], 2000), 100.0)
        for _ in range(20):
            core.step()
        assert core.stats().held == held

        def steps() -> None:
            for _ in range(10):
                core.step()

        def hold() -> None:
            core.unhold(RequestId("h7"))
            core.hold(RequestId("h7"))

        return count_calls(steps), count_calls(hold)

    few, many = calls(20), calls(2000)
    assert many[0] <= few[0] * 1.1 + 50
    assert many[1] <= few[1] * 1.1 + 50


# ---- the loop ----------------------------------------------------------------------------------


def test_the_loop_sleeps_while_all_are_held_and_wakes_for_a_time_limit() -> None:
    sink = Sink()
    rig = LoopRig(sink=sink)
    begun, commanded = threading.Event(), threading.Event()

    def wait_in_the_first_step(batch: object) -> None:
        begun.set()
        assert commanded.wait(WAIT)

    rig.runner.hook = wait_in_the_first_step
    rig.loop.start()
    rig.loop.submit(make_request("a", [1, 2], 200, time_limit_s=1.0))
    assert begun.wait(WAIT)
    assert rig.loop.hold_request("a")
    commanded.set()
    assert sink.done.wait(WAIT)
    end = sink.steps[-1].outputs[-1].finish
    assert end is not None
    assert end.reason is FinishReason.TIME_LIMIT
    assert rig.runner.steps < 200
    rig.loop.stop(timeout=WAIT)


def test_a_stop_lets_held_requests_finish() -> None:
    sink = Sink()
    rig = LoopRig(sink=sink)
    rig.hold()
    rig.loop.start()
    rig.loop.submit(make_request("a", [1, 2], 7))
    rig.wait_for_step()
    assert rig.loop.hold_request("a")
    rig.let()
    rig.loop.stop(timeout=WAIT)
    assert not rig.loop.is_running()
    assert not rig.loop.hold_request("a")
    tokens = [t for step in sink.steps for out in step.outputs for t in out.token_ids]
    assert tokens == expected_tokens([1, 2], 7)


def test_a_hard_stop_ends_held_requests() -> None:
    sink = Sink()
    rig = LoopRig(sink=sink)
    rig.hold()
    rig.loop.start()
    rig.loop.submit(make_request("a", [1, 2], 7))
    rig.wait_for_step()
    assert rig.loop.hold_request("a")
    rig.let()
    rig.loop.stop(hard_stop=True, timeout=WAIT)
    end = sink.steps[-1].outputs[-1].finish
    assert end is not None
    assert end.failure is not None
    assert end.failure.retryable
