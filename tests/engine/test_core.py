"""The core with a scripted runner: every request ends once, with the right tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core import EngineCore
from engine.outputs import Finish, FinishReason, StepOutputs
from engine.request import GenerationRequest
from engine.types import RequestId
from tests.engine.fake_runner import (
    VOCAB,
    Clock,
    expected_tokens,
    make_core,
    make_request,
)

ENDING = (5, 77)


class Ledger:
    """What came out, request by request, held against the oracle."""

    def __init__(self) -> None:
        self.specs: dict[RequestId, GenerationRequest] = {}
        self.tokens: dict[RequestId, list[int]] = {}
        self.ends: dict[RequestId, Finish] = {}
        self.prompts_done: set[RequestId] = set()

    def add(self, spec: GenerationRequest) -> None:
        self.specs[spec.request_id] = spec
        self.tokens[spec.request_id] = []

    @property
    def live(self) -> list[RequestId]:
        return [name for name in self.specs if name not in self.ends]

    def take(self, step: StepOutputs) -> None:
        for output in step.outputs:
            name = output.request_id
            assert name in self.specs
            assert name not in self.ends, "an output after the end"
            if output.prompt_done is not None:
                assert name not in self.prompts_done
                self.prompts_done.add(name)
            if output.token_ids:
                assert name in self.prompts_done
            self.tokens[name] += output.token_ids
            if output.finish is not None:
                self.ends[name] = output.finish

    def check(self, context: int) -> None:
        for name, spec in self.specs.items():
            ending = spec.stop.stop_token_ids
            right = expected_tokens(
                spec.prompt, spec.stop.max_tokens, ending=ending, context=context
            )
            tokens = self.tokens[name]
            assert tokens == right[: len(tokens)], "tokens differ from the oracle"
            end = self.ends.get(name)
            if end is None:
                continue
            assert end.usage.prompt_tokens == len(spec.prompt)
            assert end.usage.completion_tokens <= len(tokens)
            assert end.timings.arrival <= end.timings.finished
            if end.reason in (FinishReason.LENGTH, FinishReason.CONTEXT):
                assert tokens == right
                full = len(tokens) == spec.stop.max_tokens
                assert (end.reason is FinishReason.LENGTH) == full
            if end.stop_token_id is not None:
                assert tokens == right
                assert tokens[-1] == end.stop_token_id
            assert (end.failure is not None) == (end.reason is FinishReason.ERROR)


class CoreMachine(RuleBasedStateMachine):
    """Adds, cancels, finishes, deadlines, failing steps and unsampleable rows, in any order."""

    @initialize(
        windows=st.sampled_from([(None,), (6,), (None, 5), (9, 3)]),
        num_blocks=st.integers(3, 20),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.sampled_from([1, 3, 8, 32]),
        max_requests=st.sampled_from([1, 3, 8]),
        context=st.sampled_from([None, 24]),
    )
    def build(
        self,
        windows: tuple[int | None, ...],
        num_blocks: int,
        block_size: int,
        budget: int,
        max_requests: int,
        context: int | None,
    ) -> None:
        self.clock = Clock()
        self.core, self.runner, self.kv_cache = make_core(
            windows=windows,
            num_blocks=num_blocks,
            block_size=block_size,
            max_batch_tokens=budget,
            max_requests=max_requests,
            max_context=context,
            clock=self.clock,
        )
        self.ledger = Ledger()
        self.count = 0

    @rule(
        length=st.integers(1, 30),
        max_tokens=st.integers(0, 14),
        first=st.integers(0, VOCAB - 1),
        stops=st.booleans(),
        limit=st.sampled_from([None, None, 2.0, 9.0]),
    )
    def add(
        self, length: int, max_tokens: int, first: int, stops: bool, limit: float | None
    ) -> None:
        longest = self.core.max_context_tokens - (1 if max_tokens else 0)
        if longest < 1:
            return
        self.count += 1
        spec = make_request(
            f"r{self.count}",
            [(first + 3 * i) % VOCAB for i in range(min(length, longest))],
            max_tokens,
            ending=ENDING if stops else (),
            time_limit_s=limit,
        )
        self.ledger.add(spec)
        self.core.add(spec, self.clock())

    @precondition(lambda self: self.ledger.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.ledger.live))
        running = len(self.core.scheduler.running)
        if self.core.cancel(name):
            assert name not in self.core.scheduler.running
            assert len(self.core.scheduler.running) <= running
            with pytest.raises(KeyError):
                self.kv_cache.tables(name)  # its blocks are back, before the next step
            assert not self.core.cancel(name)
            self.ledger.take(self.core.take_outputs())
            assert self.ledger.ends[name].reason is FinishReason.CANCELLED

    @precondition(lambda self: self.ledger.live)
    @rule(data=st.data(), kept=st.integers(-1, 20))
    def finish(self, data: st.DataObject, kept: int) -> None:
        name = data.draw(st.sampled_from(self.ledger.live))
        had = len(self.ledger.tokens[name])
        assert self.core.finish(name, kept)
        self.ledger.take(self.core.take_outputs())
        end = self.ledger.ends[name]
        assert end.reason is FinishReason.STOP
        assert end.usage.completion_tokens == max(0, min(kept, had))

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def step(self, seconds: float) -> None:
        self.clock.now += seconds
        self.ledger.take(self.core.step())

    @rule(count=st.integers(2, 10))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.ledger.take(self.core.step())

    @rule()
    def failing_step(self) -> None:
        batch_before = set(self.core.scheduler.running)
        self.runner.fail = 1
        before = self.runner.steps
        self.ledger.take(self.core.step())
        if self.runner.steps > before:
            assert batch_before or self.ledger.ends
        self.runner.fail = 0

    @precondition(lambda self: self.ledger.live)
    @rule(data=st.data())
    def unsampleable(self, data: st.DataObject) -> None:
        self.runner.invalid = {data.draw(st.sampled_from(self.ledger.live))}
        self.ledger.take(self.core.step())
        self.runner.invalid = set()

    @rule()
    def fail_all(self) -> None:
        if self.count % 7 == 3:
            self.core.fail_all("stopped", retryable=True)
            self.ledger.take(self.core.take_outputs())
            assert not self.ledger.live

    @invariant()
    def laws(self) -> None:
        if not hasattr(self, "core"):
            return
        self.kv_cache.check_integrity()
        self.ledger.check(self.core.max_context_tokens)
        stats = self.core.stats()
        assert stats.requests_accepted - stats.requests_finished == len(self.ledger.live)
        assert stats.running + stats.waiting == len(self.ledger.live)
        assert len(set(self.runner.released)) == len(self.ledger.ends)
        assert len(self.runner.released) == len(self.ledger.ends)
        if not self.ledger.live:
            assert self.kv_cache.num_used_blocks == 0

    def teardown(self) -> None:
        if hasattr(self, "core"):
            drain(self.core, self.ledger)
            self.ledger.check(self.core.max_context_tokens)
            assert self.kv_cache.num_used_blocks == 0


def drain(core: EngineCore, ledger: Ledger) -> int:
    """Step until everything has ended; how many steps it took. Raises if someone starves."""
    work = sum(len(spec.prompt) + spec.stop.max_tokens + 2 for spec in ledger.specs.values())
    limit = 50 + work * 40  # every step moves somebody by a token; preempted ones start again
    steps = 0
    while core.has_work:
        ledger.take(core.step())
        steps += 1
        assert steps < limit, f"no end: {ledger.live}"
    assert not ledger.live
    return steps


TestCore = CoreMachine.TestCase
TestCore.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


def test_a_request_from_end_to_end() -> None:
    core, runner, kv_cache = make_core()
    ledger = Ledger()
    spec = make_request("a", [1, 2, 3], 4)
    ledger.add(spec)
    core.add(spec, 100.0)
    drain(core, ledger)
    # by hand: next(3 at 2) = 93+34+7 = 134 % 101 = 33, …
    assert ledger.tokens[RequestId("a")][0] == 33
    assert ledger.tokens[RequestId("a")] == expected_tokens([1, 2, 3], 4)
    assert ledger.ends[RequestId("a")].reason is FinishReason.LENGTH
    assert runner.steps == 4
    assert kv_cache.num_used_blocks == 0


@pytest.mark.parametrize("windows", [(None,), (None, 12)])
def test_thousands_of_requests(windows: tuple[int | None, ...]) -> None:
    """With cancels, failures and too few blocks: each ends once, with the oracle's tokens."""
    core, runner, kv_cache = make_core(
        windows=windows, num_blocks=60, block_size=4, max_batch_tokens=64, max_requests=24
    )
    ledger = Ledger()
    chance = random.Random(7)
    for index in range(3000):
        prompt = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 40))]
        spec = make_request(
            f"r{index}", prompt, chance.randint(0, 20), ending=ENDING if index % 2 else ()
        )
        ledger.add(spec)
        core.add(spec, 100.0)
    steps = 0
    while core.has_work:
        runner.fail = 1 if steps % 101 == 100 else 0
        if steps % 13 == 0 and core.scheduler.running:
            core.cancel(chance.choice(list(core.scheduler.running)))
        ledger.take(core.step())
        steps += 1
        assert steps < 20_000
    ledger.check(core.max_context_tokens)
    kv_cache.check_integrity()
    reasons = {end.reason for end in ledger.ends.values()}
    assert len(ledger.ends) == 3000
    assert reasons >= {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR}
    assert core.stats().preemptions > 0
    assert runner.chunks > 0
    assert kv_cache.num_used_blocks == 0


def test_cost_of_a_step_does_not_depend_on_the_queue() -> None:
    """Python calls in a step, counted: the same with 20,000 waiting as with 20."""
    import sys

    def calls_per_step(waiting: int) -> int:
        core, _, _ = make_core(num_blocks=64, max_requests=8, verify=False)
        for index in range(waiting):
            core.add(make_request(f"r{index}", [1, 2, 3], 10_000, time_limit_s=1e9), 100.0)
        for _ in range(20):
            core.step()
        count = 0

        def profile(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            for _ in range(10):
                core.step()
        finally:
            sys.setprofile(None)
        return count

    few, many = calls_per_step(20), calls_per_step(20_000)
    assert many <= few * 1.1


def test_first_come_first_served() -> None:
    core, _, _ = make_core(num_blocks=8, block_size=4, max_requests=4)
    ledger = Ledger()
    for index in range(12):
        spec = make_request(f"r{index}", [index, 2, 3, 4, 5], 6)
        ledger.add(spec)
        core.add(spec, 100.0 + index)
    drain(core, ledger)
    started = [ledger.ends[RequestId(f"r{i}")].timings.first_scheduled for i in range(12)]
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
    for name, end in ledger.ends.items():
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
    assert ledger.ends[RequestId("waiting")].timings.first_scheduled is None


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
    assert sorted(ledger.ends) == ["a", "b"]
    failures = [output.finish.failure for output in step.outputs if output.finish is not None]
    assert len({failure.error_id for failure in failures if failure is not None}) == 1
    assert all("scripted" not in failure.message for failure in failures if failure is not None)
    drain(core, ledger)
    assert ledger.ends[RequestId("c")].reason is FinishReason.LENGTH
    assert ledger.tokens[RequestId("d")] == expected_tokens([1, 2, 3], 5)
    kv_cache.check_integrity()


def test_ended_requests_with_far_deadlines_are_not_kept() -> None:
    core, _, _ = make_core(max_requests=8)
    for index in range(2000):
        core.add(make_request(f"r{index}", [1], 1, time_limit_s=1e9), 100.0)
        core.step()
    assert len(core._live._deadlines) < 200
