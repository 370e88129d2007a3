"""A state machine of the core: anything that may happen to requests, in any order, under any policy
and any cache. The scripted runner checks what it is given, the ledger what comes out.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.contract.outputs import FinishReason
from engine.contract.types import RequestId, RequestKey, TokenId
from engine.core.engine_core import EngineCore
from tests.engine.fake_runner import (
    VOCAB,
    Clock,
    echoed,
    expected_tokens,
    make_core,
    make_request,
)
from tests.engine.ledger import Ledger, drain

ENDING = (5, 77)
POLICIES = ("fifo", "prefill_first", "priority", "fair")


def draft(core: EngineCore, most: int, chance: random.Random) -> None:
    """Draft what follows in every running choice: some of it right, and at times something
    wrong.
    """
    for one in core.scheduler.running.values() if most else ():
        if one.matcher is not None:
            continue  # the runner has one mask a request
        count = one.num_output_tokens  # with pending tokens; what is right goes on beyond ends
        right = expected_tokens(one.spec.prompt, count + most, choice=one.choice)[count:]
        drafts = right[: chance.randint(0, most)]
        if chance.random() < 0.5:
            place = chance.randint(0, len(drafts))
            # What the row behind it says is the same, or something else.
            echo = echoed(one.num_tokens + place, one.choice)
            drafts.insert(place, chance.choice((TokenId(3), echo)))
        one.drafts = tuple(map(TokenId, drafts[:most]))


class CoreMachine(RuleBasedStateMachine):
    """See the module."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        overlap=st.booleans(),
        late=st.booleans(),
        windows=st.sampled_from([(None,), (6,), (None, 5), (9, 3)]),
        num_blocks=st.integers(3, 20),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.sampled_from([1, 3, 8, 32]),
        max_requests=st.sampled_from([1, 3, 8, 8]),
        context=st.sampled_from([None, 24]),
        share_blocks=st.booleans(),
        host_blocks=st.sampled_from([None, 2, 12]),
        margin=st.sampled_from([None, None, 0.0, 0.3, 1.0]),
        target_s=st.sampled_from([0.0, 0.0, 0.0001, 0.5]),
        most_drafts=st.sampled_from([0, 0, 2, 6]),
    )
    def build(
        self,
        policy: str,
        overlap: bool,
        late: bool,
        windows: tuple[int | None, ...],
        num_blocks: int,
        block_size: int,
        budget: int,
        max_requests: int,
        context: int | None,
        share_blocks: bool,
        host_blocks: int | None,
        margin: float | None,
        target_s: float,
        most_drafts: int,
    ) -> None:
        self.clock = Clock()
        self.core, self.runner, self.kv_cache = make_core(
            policy=policy,
            overlap=overlap,
            late=late,
            windows=windows,
            num_blocks=num_blocks,
            block_size=block_size,
            max_batch_tokens=budget,
            max_requests=max_requests,
            max_context=context,
            clock=self.clock,
            share_blocks=share_blocks,
            host_blocks=host_blocks,
            safety_margin=margin,
            target_step_time=target_s,
        )
        self.ledger = Ledger()
        self.most_drafts, self.chance = most_drafts, random.Random(block_size)
        self.count = 0
        self.lengths: dict[RequestKey, int] = {}  # of the held choices, when they were held

    @rule(
        length=st.integers(1, 30),
        max_tokens=st.integers(0, 14),
        first=st.sampled_from([0, 0, 0, 7, 50]),
        stops=st.booleans(),
        limit=st.sampled_from([None, None, 2.0, 9.0]),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        priority=st.sampled_from([0, 0, -3, 7]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        history=st.sampled_from([False, False, True]),
        logprobs=st.booleans(),
        caller=st.sampled_from(["", "", "b", "c"]),
        weight=st.sampled_from([1.0, 1.0, 0.25, 4.0]),
    )
    def add_one(self, **options: Any) -> None:
        """A request of any kind."""
        self.add(**options)

    def add(
        self,
        length: int,
        max_tokens: int,
        first: int,
        stops: bool,
        limit: float | None,
        n: int,
        priority: int,
        prompt_logprobs: int | None,
        history: bool,
        logprobs: bool,
        caller: str = "",
        weight: float = 1.0,
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
            n=n,
            priority=priority,
            prompt_logprobs=prompt_logprobs,
            history=history,
            logprobs=logprobs,
            caller=caller,
            weight=weight,
        )
        self.ledger.add(spec)
        self.core.add(spec, self.clock())

    @rule(
        count=st.integers(2, 8),
        length=st.integers(1, 9),
        max_tokens=st.integers(4, 14),
        stops=st.booleans(),
        steps=st.integers(0, 12),
    )
    def crowd(self, count: int, length: int, max_tokens: int, stops: bool, steps: int) -> None:
        """Many at once, so that blocks run out."""
        for index in range(count):
            self.add(
                length=length + index % 2,
                max_tokens=max_tokens,
                first=(0, 7)[index % 2],
                stops=stops,
                limit=None,
                n=3 if index == 4 else 1,
                priority=(0, 0, 7)[index % 3],
                prompt_logprobs=0 if index == 1 else None,
                history=index == 6,
                logprobs=False,
                caller=("b", "b", "c")[index % 3],
            )
        self.steps(steps)

    @precondition(lambda self: self.ledger.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.ledger.live))
        live = self.ledger.live_choices(name)
        keys = [one.key for one in self.core._live.by_id[name].choices.values()]
        assert self.core.cancel(name)
        for key in keys:  # its blocks are back, before the next step
            assert key not in self.core.scheduler.running
            assert key not in self.core.scheduler.waiting
            with pytest.raises(KeyError):
                self.kv_cache.tables(key)
        assert not self.core.cancel(name)
        self.ledger.take(self.core.take_outputs())
        for choice in live:
            assert self.ledger.ends[name, choice].reason is FinishReason.CANCELLED

    @precondition(lambda self: self.ledger.live)
    @rule(data=st.data(), kept=st.integers(-1, 20))
    def finish(self, data: st.DataObject, kept: int) -> None:
        name = data.draw(st.sampled_from(self.ledger.live))
        choice = data.draw(st.sampled_from(self.ledger.live_choices(name)))
        had = len(self.ledger.tokens[name, choice])
        assert self.core.finish(name, kept, choice)
        assert not self.core.finish(name, kept, choice)
        self.ledger.take(self.core.take_outputs())
        end = self.ledger.ends[name, choice]
        assert end.reason is FinishReason.STOP
        assert end.usage.completion_tokens == max(0, min(kept, had))

    @precondition(lambda self: self.ledger.live)
    @rule(data=st.data(), settled=st.booleans())
    def hold(self, data: st.DataObject, settled: bool) -> None:
        name = data.draw(st.sampled_from(self.ledger.live))
        if settled:
            self.core.settle()
            self.ledger.take(self.core.take_outputs())
        live = self.core._live.by_id.get(name)
        is_new = live is not None and not live.is_held
        assert self.core.hold(name) is is_new
        if live is not None and is_new:
            self.lengths |= {
                one.key: one.num_tokens + self.most_drafts * one.is_verifying
                for one in live.choices.values()
            }

    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        held = [name for name, live in self.core._live.by_id.items() if live.is_held]
        name = data.draw(st.sampled_from(held or [RequestId("nobody")]))
        assert self.core.unhold(name) is bool(held)
        assert not self.core.unhold(name)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def step(self, seconds: float) -> None:
        self.clock.now += seconds
        self.steps(1)

    @rule()
    def forget(self) -> None:
        """As if the model had changed: nothing that was computed is left, and all go on."""
        self.core.forget_computed()
        self.ledger.take(self.core.take_outputs())
        kv_cache = self.core.scheduler.kv_cache
        assert kv_cache.num_used_blocks == kv_cache.num_cached_blocks == 0
        assert kv_cache.num_used_host_blocks == 0

    @rule(count=st.integers(2, 10))
    def some_steps(self, count: int) -> None:
        self.steps(count)

    def steps(self, count: int) -> None:
        for _ in range(count):
            draft(self.core, self.most_drafts, self.chance)
            self.ledger.take(self.core.step())

    @rule(when=st.sampled_from(["launch", "choice", "result"]))
    def failing_step(self, when: str) -> None:
        if when == "result":
            self.runner.fail_results = 1
        elif when == "choice":
            self.runner.fail_samples = 1
        else:
            self.runner.fail = 1
        self.ledger.take(self.core.step())
        self.runner.fail = self.runner.fail_results = self.runner.fail_samples = 0

    @precondition(lambda self: self.ledger.live)
    @rule(data=st.data())
    def unsampleable(self, data: st.DataObject) -> None:
        self.runner.invalid = {data.draw(st.sampled_from(self.ledger.live))}
        self.ledger.take(self.core.step())
        self.runner.invalid = set()

    @precondition(lambda self: self.count % 7 == 3)
    @rule()
    def fail_all(self) -> None:
        self.core.fail_all("stopped", retryable=True)
        self.ledger.take(self.core.take_outputs())
        assert not self.ledger.live

    @invariant()
    def laws(self) -> None:
        if not hasattr(self, "core"):
            return
        self.kv_cache.check_integrity()
        self.ledger.check(self.core.max_context_tokens)
        core, stats = self.core, self.core.stats()
        lives = core._live.by_id.values()
        assert set(core._live.by_id) == set(self.ledger.live)
        assert stats.requests_accepted - stats.requests_finished == len(lives)
        in_scheduler = sum(len(live.choices) if live.is_forked else 1 for live in lives)
        assert stats.running + stats.waiting + stats.held == in_scheduler
        for live in lives:
            for one in live.choices.values():
                places = [
                    one.key in place for place in (core.scheduler.running, core.scheduler.waiting)
                ]
                if live.is_held:
                    assert not any(places)
                    assert one.num_tokens <= self.lengths[one.key], "a step took a held request"
        returning = len(core.scheduler._returning)
        assert sum(one.running for one in stats.callers) == stats.running + returning
        assert sum(one.waiting for one in stats.callers) == stats.waiting
        assert stats.other_callers is None
        assert stats.running <= core.scheduler.max_requests_per_batch
        assert len(set(self.runner.released)) == len(self.runner.released), "released twice"
        assert stats.generated_tokens == sum(map(len, self.ledger.tokens.values()))
        self.ledger.check_drafts(stats)
        assert stats.draft_tokens <= self.runner.drafted
        if not self.ledger.live:
            assert self.kv_cache.num_used_blocks == 0
            assert self.kv_cache.num_used_host_blocks == 0
            assert len(self.runner.released) == len(self.ledger.tokens)

    def teardown(self) -> None:
        if hasattr(self, "core"):
            drain(self.core, self.ledger)
            self.laws()
