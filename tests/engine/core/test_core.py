"""The core with a scripted runner: every request ends once, with the right tokens."""

from __future__ import annotations

import gc
import logging
import random
import tracemalloc
from dataclasses import fields

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.outputs import FinishReason
from engine.contract.request import GenerationRequest
from engine.contract.stats import EngineStats
from engine.contract.types import RequestId, TokenId
from engine.core import engine_core
from engine.core.engine_core import EngineCore
from engine.drafts.drafter import SOURCES, Drafter
from engine.drafts.row_costs import RowTimes
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.scheduler.scheduled_batch import ScheduledBatch
from tests.engine.core_machine import ENDING, POLICIES, CoreMachine
from tests.engine.fake_runner import (
    VOCAB,
    Clock,
    FakeRunner,
    Violation,
    expected_tokens,
    expiring,
    make_core,
    make_request,
    next_token,
)
from tests.engine.ledger import Ledger, drain
from tests.engine.rig import count_calls
from tests.engine.traffic import traffic

TestCore = CoreMachine.TestCase
TestCore.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


def test_a_request_from_end_to_end() -> None:
    core, runner, kv_cache = make_core()
    ledger = Ledger()
    spec = make_request("a", [1, 2, 3], 4)
    ledger.add(spec)
    core.add(spec, 100.0)
    drain(core, ledger)
    # by hand: next(3 at 2) = 93+34+7 = 134 % 101 = 33, …
    assert ledger.text("a")[0] == 33
    assert ledger.text("a") == expected_tokens([1, 2, 3], 4)
    assert ledger.end("a").reason is FinishReason.LENGTH
    assert runner.steps == 4
    assert kv_cache.num_used_blocks == 0


def test_every_statistic_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    core, _, _ = make_core()
    free = RowTimes((1, 64), (1.0, 1.0), 0.0, 0.0)
    core.scheduler.drafter = Drafter(free, sources=tuple(SOURCES))
    monkeypatch.setattr(engine_core, "EngineStats", dict)
    read = core.stats()
    assert isinstance(read, dict)
    assert read.keys() == {one.name for one in fields(EngineStats)}


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest keeps log records, whose tracebacks keep the requests."""
    monkeypatch.setattr(logging.getLogger("engine.core.engine_core"), "disabled", True)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(policy, marks=() if policy in ("fifo", "fair") else pytest.mark.slow)
        for policy in POLICIES
    ],
)
def test_ten_thousand_requests(policy: str) -> None:
    """With cancels, failures and too few blocks: each ends once, with the oracle's tokens, and
    nothing of them stays.
    """
    core, runner, kv_cache = make_core(
        policy=policy,
        windows=(None, 12) if policy == "priority" else (None,),
        num_blocks=44,
        block_size=4,
        max_batch_tokens=64,
        max_requests=24,
        overlap=policy != "fifo",
        late=policy == "prefill_first",
        share_blocks=True,
        host_blocks=8,
    )
    chance = random.Random(7)
    traffic(core, runner, 300, chance, first=20_000)  # whatever stays is there from here on
    kv_cache.reset_prefix_cache()
    runner.released.clear()
    gc.collect()
    objects = len(gc.get_objects())
    count = 10_000 if policy == "fifo" else 3_000
    ledger = traffic(core, runner, count, chance)
    ledger.check(core.max_context_tokens)
    assert len(ledger.over) == count
    reasons = {end.reason for end in ledger.ends.values()}
    assert reasons >= {
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.CANCELLED,
        FinishReason.ERROR,
    }
    assert core.stats().preemptions > 0
    assert (runner.overlapped > 0) == core.overlap
    kv_cache.check_integrity()
    kv_cache.reset_prefix_cache()
    stats = core.stats()
    assert stats.blocks_used == stats.blocks_cached == stats.host_blocks_used == 0
    assert not runner.histories
    assert not runner.in_flight
    runner.released.clear()
    del ledger
    gc.collect()
    assert len(gc.get_objects()) < objects + 600  # heaps may keep 64 ended ones each


@pytest.mark.usefixtures("quiet")
def test_memory_returns_to_where_it_was() -> None:
    """Bytes, since lists of numbers are no objects to the collector."""
    core, runner, kv_cache = make_core(
        policy="priority", num_blocks=44, max_batch_tokens=64, max_requests=24, share_blocks=True
    )
    chance = random.Random(1)

    def settle(count: int, first: int) -> int:
        traffic(core, runner, count, chance, first=first)
        kv_cache.reset_prefix_cache()
        runner.released.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = settle(300, 0)
        after = settle(900, 300)
    finally:
        tracemalloc.stop()
    assert after < before + 150_000  # a request that stayed would take over 1,000


@pytest.mark.parametrize("policy", POLICIES)
def test_cost_of_a_step_does_not_depend_on_the_queue(policy: str) -> None:
    """Python calls in a step, counted: the same with 20,000 waiting as with 20; and cancels."""

    def calls(waiting: int) -> tuple[int, int]:
        core, _, _ = make_core(policy=policy, num_blocks=64, max_requests=8, verify=False)
        for index in range(waiting):
            spec = make_request(
                f"r{index}", [1, 2, 3], 10_000, time_limit_s=1e9, priority=index % 5
            )
            core.add(spec, 100.0)
        for _ in range(20):
            core.step()
        names = [one.request_id for one in core.scheduler.waiting.values()][:12]

        def cancel() -> None:
            for name in names[:4]:
                core.cancel(name)

        def steps() -> None:
            for _ in range(10):
                core.step()

        return count_calls(steps), count_calls(cancel)

    few, many = calls(20), calls(20_000)
    assert many[0] <= few[0] * 1.1 + 50
    assert many[1] <= few[1] * 1.1 + 50


def test_first_come_first_served() -> None:
    core, _, _ = make_core(num_blocks=8, block_size=4, max_requests=4)
    ledger = Ledger()
    for index in range(12):
        spec = make_request(f"r{index}", [index, 2, 3, 4, 5], 6)
        ledger.add(spec)
        core.add(spec, 100.0 + index)
    drain(core, ledger)
    started = [ledger.end(f"r{i}").timings.first_scheduled for i in range(12)]
    assert started == sorted(started, key=lambda value: value or 0.0)


def test_preemption_keeps_tokens_and_timestamps() -> None:
    clock = Clock()
    core, runner, _ = make_core(num_blocks=8, block_size=2, max_batch_tokens=8, clock=clock)
    ledger = Ledger()
    for name in "abc":
        spec = make_request(name, [1, 2, ord(name) % VOCAB], 9)
        ledger.add(spec)
        core.add(spec, clock())
    first_tokens: dict[str, float] = {}
    while core.has_work:
        clock.now += 1.0
        step = core.step()
        for output in step.outputs:
            if output.token_ids:
                first_tokens.setdefault(output.request_id, step.time)
        ledger.take(step)
    ledger.check(core.max_context_tokens)
    preempted = [end for end in ledger.ends.values() if end.timings.preemptions]
    assert preempted
    for (name, _), end in ledger.ends.items():
        assert end.reason is FinishReason.LENGTH
        assert end.timings.first_token == first_tokens[name]
        assert end.timings.first_scheduled is not None
        assert end.timings.first_scheduled <= first_tokens[name]
        assert end.timings.last_token == end.timings.finished
    assert core.stats().preemptions == sum(end.timings.preemptions for end in preempted)
    assert runner.steps > 9


def test_time_limits_end_waiting_and_running_requests() -> None:
    clock = Clock()
    core, _, kv_cache = make_core(max_requests=1, clock=clock)
    ledger = Ledger()
    for name in ("running", "waiting"):
        spec = make_request(name, [1, 2], 1000, time_limit_s=5.0)
        ledger.add(spec)
        core.add(spec, clock())
    ledger.take(core.step())
    clock.now += 4.9
    ledger.take(core.step())
    assert ledger.live == ["running", "waiting"]
    clock.now += 0.2
    ledger.take(core.step())
    assert {end.reason for end in ledger.ends.values()} == {FinishReason.TIME_LIMIT}
    assert kv_cache.num_used_blocks == 0
    assert ledger.end("waiting").timings.first_scheduled is None


def test_a_failing_step_fails_its_batch_and_no_one_else() -> None:
    core, runner, kv_cache = make_core(max_requests=2)
    ledger = Ledger()
    for name in "abcd":
        spec = make_request(name, [1, 2, 3], 5)
        ledger.add(spec)
        core.add(spec, 100.0)
    core.step()
    runner.fail = 1
    step = core.step()
    ledger.take(step)
    assert sorted(ledger.over) == ["a", "b"]
    failures = [output.finish.failure for output in step.outputs if output.finish is not None]
    assert len({failure.error_id for failure in failures if failure is not None}) == 1
    assert all("scripted" not in failure.message for failure in failures if failure is not None)
    drain(core, ledger)
    assert ledger.end("c").reason is FinishReason.LENGTH
    assert ledger.text("d") == expected_tokens([1, 2, 3], 5)
    kv_cache.check_integrity()


def test_ended_requests_with_far_deadlines_are_not_kept() -> None:
    core, _, _ = make_core(max_requests=8)
    for index in range(2000):
        core.add(make_request(f"r{index}", [1], 1, time_limit_s=1e9), 100.0)
        core.step()
    assert len(core._live._deadlines) < 200
    assert len(core.scheduler.waiting) == 0


# ---- overlapped steps ------------------------------------------------------------------------


requests = st.lists(
    st.tuples(
        st.integers(1, 20),
        st.integers(0, 9),
        st.sampled_from([1, 1, 3]),
        st.integers(-1, 1),
        st.booleans(),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    specs=requests,
    policy=st.sampled_from(POLICIES),
    num_blocks=st.integers(8, 20),
    budget=st.sampled_from([2, 16]),
)
def test_overlapped_steps_deliver_the_same(
    specs: list[tuple[int, int, int, int, bool, int]], policy: str, num_blocks: int, budget: int
) -> None:
    """Token by token and end by end, whatever comes in between the steps."""

    def run(overlap: bool) -> tuple[object, ...]:
        core, runner, _ = make_core(
            policy=policy,
            num_blocks=num_blocks,
            max_batch_tokens=budget,
            max_requests=4,
            overlap=overlap,
            late=overlap,
        )
        ledger = Ledger()
        for index, (length, max_tokens, n, priority, history, wait) in enumerate(specs):
            spec = make_request(
                f"r{index}",
                list(range(length)),
                max_tokens,
                n=n,
                priority=priority,
                history=history,
                ending=ENDING,
                prompt_logprobs=0,
            )
            ledger.add(spec)
            core.add(spec, core.clock())
            for _ in range(wait):
                ledger.take(core.step())
        drain(core, ledger)
        ledger.check(core.max_context_tokens)
        assert overlap or not runner.overlapped
        ends = {key: (end.reason, end.usage) for key, end in ledger.ends.items()}
        return ledger.tokens, ends

    assert run(True) == run(False)


def overlapped(**options: object) -> tuple[EngineCore, FakeRunner, KVCacheManager, Ledger]:
    core, runner, kv_cache = make_core(overlap=True, late=True, **options)  # type: ignore[arg-type]
    return core, runner, kv_cache, Ledger()


def add(core: EngineCore, ledger: Ledger, *specs: GenerationRequest) -> None:
    for spec in specs:
        ledger.add(spec)
        core.add(spec, core.clock())


def test_the_next_step_is_launched_before_the_last_one_is_collected() -> None:
    core, runner, _, ledger = overlapped()
    add(core, ledger, make_request("a", [1, 2, 3], 4))
    assert core.step().outputs == ()
    assert len(runner.in_flight) == 1
    first = core.step()
    assert [output.token_ids for output in first.outputs] == [(33,)]
    assert len(runner.in_flight) == 1
    ledger.take(first)
    drain(core, ledger)
    assert runner.steps == 4  # max_tokens is known beforehand: no step too many
    assert ledger.text("a") == expected_tokens([1, 2, 3], 4)


def test_the_token_behind_a_stop_is_dropped() -> None:
    core, runner, kv_cache, ledger = overlapped()
    tokens = expected_tokens([1, 2, 3], 9)
    stop = next(i for i in range(2, 9) if tokens[i] not in tokens[:i])
    add(core, ledger, make_request("a", [1, 2, 3], 9, ending=[tokens[stop]]))
    drain(core, ledger)
    assert ledger.text("a") == tokens[: stop + 1]
    end = ledger.end("a")
    assert end.stop_token_id == tokens[stop]
    assert end.usage.completion_tokens == stop + 1
    assert core.stats().generated_tokens == stop + 1
    assert runner.steps == stop + 2  # one was launched in vain
    assert kv_cache.num_used_blocks == 0


@pytest.mark.parametrize("end", ["cancel", "finish", "time", "fail"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_every_end_in_every_state(end: str, steps: int, n: int, overlap: bool) -> None:
    """Before, in and after the prompt's chunks, and before and after the choices part."""
    clock = Clock()
    core, runner, kv_cache = make_core(
        overlap=overlap, late=overlap, max_batch_tokens=4, clock=clock
    )
    ledger = Ledger()
    add(core, ledger, make_request("a", range(10), 6, n=n, time_limit_s=5.0))
    add(core, ledger, make_request("b", [9, 9], 3))
    for _ in range(steps):
        ledger.take(core.step())
    had = [len(ledger.text("a", choice)) for choice in range(n)]
    name = RequestId("a")
    if end == "cancel":
        assert core.cancel(name)
    elif end == "finish":
        assert all(core.finish(name, 1, choice) for choice in range(n))
    elif end == "time":
        clock.now += 5.0
    else:
        runner.fail = 1
    ledger.take(core.step())
    drain(core, ledger)
    ledger.check(core.max_context_tokens)
    reasons = [
        ledger.ends[name, choice].reason for choice in range(n) if (name, choice) in ledger.ends
    ]
    if end == "fail":
        assert reasons == [FinishReason.ERROR]
    else:
        reason = {
            "cancel": FinishReason.CANCELLED,
            "finish": FinishReason.STOP,
            "time": FinishReason.TIME_LIMIT,
        }[end]
        assert reasons == [reason] * n
        kept = [ledger.end("a", choice).usage.completion_tokens for choice in range(n)]
        assert kept == ([min(1, count) for count in had] if end == "finish" else had)
    assert len(runner.released) == len(set(runner.released)) == n + 1
    assert kv_cache.num_used_blocks == 0


def test_a_launch_that_fails_loses_nothing_of_the_step_before() -> None:
    core, runner, kv_cache, ledger = overlapped()
    add(core, ledger, make_request("a", [1, 2, 3], 8), make_request("b", [4], 1))
    ledger.take(core.step())
    runner.fail = 1
    ledger.take(core.step())
    assert ledger.text("a") == expected_tokens([1, 2, 3], 1)
    assert ledger.end("a").reason is FinishReason.ERROR
    assert ledger.end("a").usage.completion_tokens == 1
    assert ledger.end("b").reason is FinishReason.LENGTH  # it was not in the failed step
    assert kv_cache.num_used_blocks == 0
    assert not core.has_work


def test_results_that_fail_leave_the_next_step_to_the_others() -> None:
    core, runner, kv_cache, ledger = overlapped(max_requests=2)
    add(core, ledger, make_request("a", [1, 2, 3], 8))
    runner.fail_results = 1
    ledger.take(core.step())
    add(core, ledger, make_request("b", [4, 5], 3))
    ledger.take(core.step())
    assert ledger.end("a").reason is FinishReason.ERROR
    assert ledger.end("a").usage.completion_tokens == 0
    drain(core, ledger)
    assert ledger.text("b") == expected_tokens([4, 5], 3)
    assert kv_cache.num_used_blocks == 0


@pytest.mark.parametrize("late", [False, True])
def test_choices_whose_copies_failed_are_computed_again(late: bool) -> None:
    """The step that should have copied the prompt's last block for a choice fails, without having
    that choice in it, when the step with the choice's next token is in flight already.
    """
    core, runner, kv_cache = make_core(
        policy="prefill_first", max_batch_tokens=4, overlap=True, late=late
    )
    ledger = Ledger()
    failed: list[ScheduledBatch] = []

    def fail_forks(batch: ScheduledBatch) -> None:
        if batch.copies.forks:
            failed.append(batch)
            runner.fail_results = 1

    runner.hook = fail_forks
    add(core, ledger, make_request("a", range(6), 6, n=2), make_request("b", range(50, 60), 3))
    drain(core, ledger)
    (batch,) = failed
    assert [part.request.request_id for part in batch.requests] == ["b"]
    assert ledger.end("b").reason is FinishReason.ERROR
    ledger.check(core.max_context_tokens)
    for choice in range(2):
        assert ledger.end("a", choice).reason is FinishReason.LENGTH
    assert ledger.end("a", 1).timings.preemptions == 1
    assert kv_cache.num_used_blocks == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at_launch", [False, True])
@pytest.mark.parametrize("what", ["offloads", "restores"])
def test_what_was_not_copied_to_the_host_or_back_is_computed_again(
    what: str, at_launch: bool, overlap: bool
) -> None:
    core, runner, kv_cache = make_core(
        policy="priority", num_blocks=8, overlap=overlap, late=overlap, host_blocks=8
    )
    ledger = Ledger()
    failed: list[ScheduledBatch] = []

    def fail_copies(batch: ScheduledBatch) -> None:
        if getattr(batch.copies, what) and not failed:
            failed.append(batch)
            runner.fail, runner.fail_results = int(at_launch), int(not at_launch)

    runner.hook = fail_copies
    add(core, ledger, make_request("low", range(15), 9, priority=-1))
    for _ in range(4):
        ledger.take(core.step())
    add(core, ledger, make_request("high", range(50, 66), 5))
    drain(core, ledger)
    assert len(failed) == 1
    ledger.check(core.max_context_tokens)
    # who was in the step has failed, and nobody else
    lost, kept = ("high", "low") if what == "offloads" else ("low", "high")
    assert ledger.end(lost).reason is FinishReason.ERROR
    assert ledger.end(kept).reason is FinishReason.LENGTH
    assert kv_cache.num_used_host_blocks == kv_cache.num_used_blocks == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_an_offloaded_request_goes_on_where_it_was(overlap: bool) -> None:
    core, runner, _ = make_core(
        policy="priority", num_blocks=8, overlap=overlap, late=overlap, host_blocks=8
    )
    ledger = Ledger()
    add(core, ledger, make_request("low", range(15), 9, priority=-1))
    for _ in range(4):
        ledger.take(core.step())
    add(core, ledger, make_request("high", range(50, 66), 5))
    ledger.take(core.step())
    ledger.take(core.step())
    (low,) = core.scheduler.waiting.values()
    assert low.num_computed_tokens > 15
    assert core.stats().host_blocks_used > 0
    drain(core, ledger)
    ledger.check(core.max_context_tokens)
    stats = core.stats()
    assert (stats.preemptions, stats.offloads, stats.restores) == (1, 1, 1)
    assert stats.prompt_tokens == 15 + 16  # nothing was computed twice
    assert runner.copied["restores"] == runner.copied["offloads"] > 0


def test_a_step_that_needs_pending_tokens_samples_once_they_are_collected() -> None:
    """It is launched before that like any other; nobody's steps are more or later for it."""
    core, runner, _, ledger = overlapped()
    add(core, ledger, make_request("a", [1, 2, 3], 5, history=True), make_request("b", [4], 5))
    drain(core, ledger)
    assert runner.overlapped == 4
    assert runner.steps == 5
    assert runner.events == [
        ("launch", 1),
        ("sample", 1),
        *(
            event
            for step in range(2, 6)
            for event in (("launch", step), ("result", step - 1), ("sample", step))
        ),
        ("result", 5),
    ]
    assert ledger.text("a") == expected_tokens([1, 2, 3], 5)
    assert ledger.text("b") == expected_tokens([4], 5)


def test_a_step_that_needs_no_pending_token_samples_at_its_launch() -> None:
    core, runner, _, ledger = overlapped()
    add(core, ledger, make_request("b", [4], 3))
    drain(core, ledger)
    assert [event for event in runner.events if event[0] != "result"] == [
        (what, step) for step in (1, 2, 3) for what in ("launch", "sample")
    ]


def test_grammars_do_not_end_the_overlap() -> None:
    core, runner, kv_cache = make_core(overlap=True, late=True, num_blocks=64)
    core.add(make_request("a", [1, 2, 3], 9), 100.0, lambda: Countdown(5))
    core.add(make_request("b", [4], 9), 100.0)
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    while core.has_work:
        for output in core.step().outputs:
            tokens[output.request_id] += output.token_ids
    assert tokens == {"a": even_tokens([1, 2, 3], 5, 0), "b": expected_tokens([4], 9)}
    assert runner.steps == 9
    assert runner.overlapped == 8
    assert kv_cache.num_used_blocks == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_choice_that_fails_ends_its_step_alone(late: bool) -> None:
    """The step before it was collected, and a request that is in neither goes on."""
    core, runner, kv_cache = make_core(overlap=True, late=late, max_requests=2, num_blocks=64)
    ledger = Ledger()
    add(core, ledger, make_request("a", [1, 2, 3], 8, history=True), make_request("b", [4], 8))
    ledger.take(core.step())
    add(core, ledger, make_request("c", [5, 6], 3))
    runner.fail_samples = 1
    ledger.take(core.step())
    for name, prompt in (("a", [1, 2, 3]), ("b", [4])):
        assert ledger.end(name).reason is FinishReason.ERROR
        assert ledger.text(name) == expected_tokens(prompt, 1)
    drain(core, ledger)
    assert ledger.text("c") == expected_tokens([5, 6], 3)
    assert kv_cache.num_used_blocks == 0
    assert not runner.in_flight


def test_a_result_that_is_collected_late_is_read_from_what_was_launched() -> None:
    """The guard of the late runner fails where a batch's list is read after its launch."""
    core, _runner, _ = make_core()
    core.add(make_request("a", [1, 2, 3], 2), 100.0)
    batch = core.scheduler.schedule(100.0)
    assert batch is not None
    view, expire = expiring(batch)
    assert view.requests[0].request.token_ids.tolist() == [1, 2, 3]
    expire()
    for read in (
        lambda: view.requests[0].request.token_ids[0],
        lambda: len(view.requests[0].request.token_ids),
        lambda: view.requests[0].tables[0].blocks[0],
        lambda: view.requests[0].tables[0].held(),
    ):
        with pytest.raises(Violation):
            read()
    assert batch.requests[0].request.token_ids.tolist() == [1, 2, 3]


# ---- choices ---------------------------------------------------------------------------------


@pytest.mark.parametrize("share_blocks", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_choices_have_one_prompt_and_tokens_of_their_own(share_blocks: bool, overlap: bool) -> None:
    core, runner, _kv_cache = make_core(num_blocks=32, share_blocks=share_blocks, overlap=overlap)
    ledger = Ledger()
    prompt = list(range(11))
    add(core, ledger, make_request("a", prompt, 5, n=4, prompt_logprobs=0))
    drain(core, ledger)
    for choice in range(4):
        assert ledger.text("a", choice) == expected_tokens(prompt, 5, choice=choice)
        assert ledger.end("a", choice).reason is FinishReason.LENGTH
    assert len({tuple(ledger.text("a", choice)) for choice in range(4)}) == 4
    firsts = {ledger.end("a", choice).timings.first_scheduled for choice in range(4)}
    assert firsts == {100.0}
    assert len(runner.released) == 4


def test_more_choices_than_places_wait_their_turn() -> None:
    core, _runner, _ = make_core(num_blocks=6, max_requests=2)
    ledger = Ledger()
    add(core, ledger, make_request("a", [1, 2, 3, 4, 5], 6, n=7), make_request("b", [1], 2))
    drain(core, ledger)
    ledger.check(core.max_context_tokens)
    assert len(ledger.ends) == 8


def test_an_error_of_one_choice_ends_all_with_one_output() -> None:
    core, runner, kv_cache = make_core()
    ledger = Ledger()
    add(core, ledger, make_request("a", [1, 2, 3], 9, n=3))
    for _ in range(3):
        ledger.take(core.step())
    delivered = sum(len(ledger.text("a", choice)) for choice in range(3))
    runner.invalid = {RequestId("a")}
    step = core.step()
    ledger.take(step)
    assert len(step.outputs) == 1
    finish = step.outputs[0].finish
    assert finish is not None
    assert finish.usage.completion_tokens == delivered > 0
    assert kv_cache.num_used_blocks == 0
    assert len(runner.released) == 3


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_where_the_first_choice_ends_before_they_part_the_next_one_leads(steps: int) -> None:
    core, _runner, _ = make_core(max_batch_tokens=4)
    ledger = Ledger()
    add(core, ledger, make_request("a", range(12), 3, n=3), make_request("b", [1, 2], 3))
    for _ in range(steps):
        ledger.take(core.step())
    assert core.finish(RequestId("a"), 0, 0)
    assert core.finish(RequestId("a"), 0, 1)
    drain(core, ledger)
    ledger.check(core.max_context_tokens)
    assert ledger.text("a", 2) == expected_tokens(range(12), 3, choice=2)
    assert [ledger.end("a", choice).usage.completion_tokens for choice in range(3)] == [0, 0, 3]


def test_a_prompt_alone_is_reported_by_a_choice_that_lives() -> None:
    core, _, _ = make_core()
    ledger = Ledger()
    add(core, ledger, make_request("a", [1, 2, 3], 0, n=2))
    assert core.finish(RequestId("a"), 0, 0)
    drain(core, ledger)
    assert ledger.prompts_done == {"a"}


def test_a_prompt_alone_ends_all_choices() -> None:
    core, _, _ = make_core()
    ledger = Ledger()
    add(core, ledger, make_request("a", [1, 2, 3], 0, n=3, prompt_logprobs=2))
    drain(core, ledger)
    assert {end.reason for end in ledger.ends.values()} == {FinishReason.LENGTH}
    assert {end.usage.completion_tokens for end in ledger.ends.values()} == {0}


@pytest.mark.parametrize("host_blocks", [None, 32])
@pytest.mark.parametrize("overlap", [False, True])
def test_prompt_logprobs_are_whole_after_chunks_and_preemptions(
    host_blocks: int | None, overlap: bool
) -> None:
    core, _runner, _ = make_core(
        policy="priority",
        num_blocks=10,
        max_batch_tokens=5,
        host_blocks=host_blocks,
        share_blocks=True,
        overlap=overlap,
        late=overlap,
    )
    ledger = Ledger()
    add(core, ledger, make_request("a", range(31), 4, prompt_logprobs=0))
    for _ in range(4):
        ledger.take(core.step())
    assert not ledger.prompts_done
    add(core, ledger, make_request("urgent", range(50, 66), 2, priority=5))
    drain(core, ledger)  # the ledger compares them
    ledger.check(core.max_context_tokens)
    assert core.stats().preemptions == 1
    assert ledger.prompts_done == {"a", "urgent"}


# ---- grammars --------------------------------------------------------------------------------


class Countdown:
    """Allows even tokens, refuses some, and is complete after so many."""

    is_free = False

    def __init__(self, left: int, refused: int | None = None) -> None:
        self.left = left
        self.refused = refused
        self.accepted: list[int] = []
        self.expected_s = self.spent_s = 0.0
        self.failure: str | None = None

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        row[:] = 0
        for token in range(0, VOCAB, 2):
            row[token // 32] |= np.int32(np.uint32(1 << (token % 32)).view(np.int32))

    def accept(self, token: TokenId) -> bool:
        if self.refused is not None and len(self.accepted) == self.refused:
            return False
        self.accepted.append(token)
        return True

    @property
    def is_complete(self) -> bool:
        return len(self.accepted) >= self.left


def even_tokens(prompt: list[int], count: int, choice: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        token = next_token(tokens[-1], len(tokens) - 1, choice)
        while token % 2:
            token = TokenId((token + 1) % VOCAB)
        tokens.append(token)
    return tokens[len(prompt) :]


def collect(core: EngineCore) -> tuple[dict[int, list[int]], list[object]]:
    tokens: dict[int, list[int]] = {}
    finishes: list[object] = []
    for _ in range(100):
        if not core.has_work:
            break
        for output in core.step().outputs:
            tokens.setdefault(output.choice, []).extend(output.token_ids)
            if output.finish is not None:
                finishes.append(output.finish)
    return tokens, finishes


@pytest.mark.parametrize("overlap", [False, True])
def test_each_choice_follows_its_own_grammar(overlap: bool) -> None:
    core, _, _ = make_core(overlap=overlap, late=overlap, num_blocks=64)
    matchers: list[Countdown] = []

    def make() -> Countdown:
        matchers.append(Countdown(4))
        return matchers[-1]

    core.add(make_request("a", [1, 2, 3], 20, n=3), 100.0, make)
    tokens, _ = collect(core)
    assert len(matchers) == 3
    for choice, matcher in enumerate(matchers):
        assert tokens[choice] == matcher.accepted == even_tokens([1, 2, 3], 4, choice)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_token_that_the_grammar_refuses_is_an_error_and_is_not_counted(overlap: bool) -> None:
    core, runner, kv_cache = make_core(overlap=overlap, late=overlap)
    core.add(make_request("a", [1, 2, 3], 20), 100.0, lambda: Countdown(9, refused=2))
    tokens, (finish,) = collect(core)
    assert tokens[0] == even_tokens([1, 2, 3], 2)
    assert finish.reason is FinishReason.ERROR  # type: ignore[attr-defined]
    assert finish.usage.completion_tokens == 2  # type: ignore[attr-defined]
    assert core.stats().generated_tokens == 2
    assert kv_cache.num_used_blocks == 0
    assert len(runner.released) == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_matcher_that_needs_to_hold_nothing_more_is_dropped(overlap: bool) -> None:
    class Freed(Countdown):
        @property
        def is_free(self) -> bool:
            return len(self.accepted) == 3

    matchers: list[Freed] = []

    def make() -> Freed:
        matchers.append(Freed(99))
        matchers[-1].expected_s = 1.0
        return matchers[-1]

    core, _, _ = make_core(overlap=overlap, late=overlap, num_blocks=64)
    core.add(make_request("a", [1, 2, 3], 9, n=2), 100.0, make)
    tokens, _ = collect(core)
    for choice, matcher in enumerate(matchers):
        held = even_tokens([1, 2, 3], 3, choice)
        assert matcher.accepted == held
        expected = [1, 2, 3, *held]
        while len(expected) < 12:
            expected.append(next_token(expected[-1], len(expected) - 1, choice))
        assert tokens[choice] == expected[3:]


def test_a_grammar_that_breaks_is_its_requests_alone() -> None:
    class Broken(Countdown):
        def accept(self, token: TokenId) -> bool:
            raise ValueError("broken")

    def unmade() -> Countdown:
        raise ValueError("unmade")

    core, _, kv_cache = make_core()
    core.add(make_request("x", [1], 3), 100.0, lambda: Broken(2))
    core.add(make_request("y", [1], 3, n=2, time_limit_s=9.0), 100.0, unmade)
    core.add(make_request("z", [1, 2], 3), 100.0)
    ends = {}
    tokens: list[int] = []
    while core.has_work:
        for output in core.step().outputs:
            if output.finish is not None:
                assert output.request_id not in ends
                ends[output.request_id] = output.finish
            tokens += output.token_ids
    assert ends[RequestId("x")].reason is ends[RequestId("y")].reason is FinishReason.ERROR
    assert tokens == expected_tokens([1, 2], 3)
    failure = ends[RequestId("x")].failure
    assert failure is not None
    assert "broken" not in failure.message
    assert kv_cache.num_used_blocks == 0
