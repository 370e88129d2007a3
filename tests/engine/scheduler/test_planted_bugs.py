"""The machines that test the core find bugs: each of these is planted, and must be found."""

from __future__ import annotations

import random
from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from engine.contract.outputs import FinishReason
from engine.contract.request import Request
from engine.contract.types import RequestKey
from engine.core.endings import LiveRequests
from engine.core.engine_core import EngineCore
from engine.core.step_results import StepResults
from engine.scheduler.base import Scheduler, StepPlan
from engine.scheduler.fifo import FIFOScheduler
from engine.scheduler.prefill_first import PrefillFirstScheduler
from engine.scheduler.priority import PriorityScheduler
from engine.scheduler.request_heap import RequestHeap
from engine.scheduler.scheduled_batch import ScheduledBatch, ScheduledRequest
from tests.engine.core_machine import POLICIES, CoreMachine
from tests.engine.fake_runner import Violation, make_core
from tests.engine.traffic import traffic

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: dict[str, Plant] = {}

_launched = Scheduler.launched
_verified = Scheduler.verified
_remove = Scheduler.remove
_preempt = Scheduler.preempt
_extend = Scheduler.extend
_extend_all = Scheduler.extend_all
_close = LiveRequests.close
_append = StepResults._append
_schedule = Scheduler.schedule
_launch_step = EngineCore._launch


def plant(function: Plant) -> Plant:
    PLANTS[function.__name__] = function
    return function


@plant
def a_waiting_request_is_skipped_for_ever(patch: pytest.MonkeyPatch) -> None:
    def next_waiting(self: Scheduler) -> Request | None:
        return next((one for one in self.waiting.values() if one.key % 5), None)

    patch.setattr(Scheduler, "next_waiting", next_waiting)


@plant
def the_heap_forgets_who_was_preempted(patch: pytest.MonkeyPatch) -> None:
    push = RequestHeap.push

    def forgetful(self: RequestHeap, rank: tuple[float, ...], request: Request) -> None:
        if not request.preemptions:
            push(self, rank, request)

    patch.setattr(RequestHeap, "push", forgetful)


@plant
def a_choice_ends_twice(patch: pytest.MonkeyPatch) -> None:
    def append(self: StepResults, live: Any, part: ScheduledRequest, *rest: Any) -> None:
        _append(self, live, part, *rest)
        request = part.request
        if request.status.is_terminal and self._live.outputs:
            self._live.outputs.append(self._live.outputs[-1])

    patch.setattr(StepResults, "_append", append)


@plant
def an_ended_request_keeps_running(patch: pytest.MonkeyPatch) -> None:
    def remove(self: Scheduler, request: Request) -> None:
        was_running = request.key in self.running
        _remove(self, request)
        if was_running and request.num_output_tokens == 3:
            self.running[request.key] = request

    patch.setattr(Scheduler, "remove", remove)


@plant
def a_token_is_delivered_twice(patch: pytest.MonkeyPatch) -> None:
    def append(self: StepResults, live: Any, part: ScheduledRequest, *rest: Any) -> None:
        count = len(self._live.outputs)
        _append(self, live, part, *rest)
        new = self._live.outputs[count:]
        if part.request.preemptions and new and new[-1].finish is None:
            self._live.outputs.append(new[-1])

    patch.setattr(StepResults, "_append", append)


@plant
def the_token_behind_a_stop_is_delivered(patch: pytest.MonkeyPatch) -> None:
    def accept(self: StepResults, live: Any, request: Request, position: int, token: int) -> object:
        if token in request.ending_token_ids and not request.num_pending_tokens > 1:
            return FinishReason.STOP
        if position + 1 < request.max_total_tokens:
            return None
        full = position + 1 - request.num_prompt_tokens >= request.spec.stop.max_tokens
        return FinishReason.LENGTH if full else FinishReason.CONTEXT

    patch.setattr(StepResults, "_accept", accept)


@plant
def the_budget_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def extend(self: Scheduler, plan: StepPlan, request: Request) -> bool:
        is_in = _extend(self, plan, request)
        if is_in and plan.parts[request.key].num_tokens == 1:
            plan.budget += 1
        return is_in

    patch.setattr(Scheduler, "extend", extend)


@plant
def all_at_once_ignores_the_budget(patch: pytest.MonkeyPatch) -> None:
    def extend_all(self: Scheduler, plan: StepPlan) -> bool:
        budget = plan.budget
        plan.budget += 8
        if _extend_all(self, plan):
            return True
        plan.budget = budget
        return False

    patch.setattr(Scheduler, "extend_all", extend_all)


@plant
def all_at_once_asks_for_no_blocks(patch: pytest.MonkeyPatch) -> None:
    def extend_all(self: Scheduler, plan: StepPlan) -> bool:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(Scheduler, "_has_room", lambda *_: True)
            return _extend_all(self, plan)

    patch.setattr(Scheduler, "extend_all", extend_all)


@plant
def all_at_once_leaves_half_a_step(patch: pytest.MonkeyPatch) -> None:
    def extend_all(self: Scheduler, plan: StepPlan) -> bool:
        for request in self.runnable():
            if plan.budget < request.num_tokens_to_compute or not self.extend(plan, request):
                return False
        return True

    patch.setattr(Scheduler, "extend_all", extend_all)


@plant
def preempted_tokens_are_lost(patch: pytest.MonkeyPatch) -> None:
    def preempt(self: Scheduler, plan: StepPlan, request: Request) -> None:
        _preempt(self, plan, request)
        del request.token_ids[request.num_prompt_tokens + 1 :]

    patch.setattr(Scheduler, "preempt", preempt)


@plant
def preempted_tokens_are_not_computed_again(patch: pytest.MonkeyPatch) -> None:
    def preempt(self: Scheduler, plan: StepPlan, request: Request) -> None:
        computed = request.num_computed_tokens
        _preempt(self, plan, request)
        self.kv_cache.start = lambda request: computed  # type: ignore[method-assign]

    patch.setattr(Scheduler, "preempt", preempt)


@plant
def running_requests_are_preempted_while_a_step_is_pending(patch: pytest.MonkeyPatch) -> None:
    def schedule(
        self: Scheduler,
        now: float,
        *,
        is_step_pending: bool = False,
        resting: Container[RequestKey] = (),
    ) -> ScheduledBatch | None:
        return _schedule(self, now, resting=resting)

    patch.setattr(Scheduler, "schedule", schedule)


@plant
def tokens_are_chosen_before_the_step_before_is_collected(patch: pytest.MonkeyPatch) -> None:
    def launch(self: EngineCore, batch: ScheduledBatch, now: float) -> bool:
        is_launched = _launch_step(self, batch, now)
        if is_launched:
            self._in_flight[-1].pending.sample()
        return is_launched

    patch.setattr(EngineCore, "_launch", launch)


@plant
def tokens_are_never_chosen_later(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineCore, "_sample", lambda self: None)


@plant
def blocks_of_the_cancelled_are_kept(patch: pytest.MonkeyPatch) -> None:
    def remove(self: Scheduler, request: Request) -> None:
        self.waiting.pop(request.key, None)
        if self.running.pop(request.key, None) is None or request.num_output_tokens:
            self.kv_cache.free(request.key)

    patch.setattr(Scheduler, "remove", remove)


@plant
def pending_tokens_count_as_computed_twice(patch: pytest.MonkeyPatch) -> None:
    def launched(self: Scheduler, part: ScheduledRequest) -> None:
        _launched(self, part)
        if part.request.num_pending_tokens:
            part.request.num_computed_tokens += 1

    patch.setattr(Scheduler, "launched", launched)


@plant
def drafts_count_as_computed(patch: pytest.MonkeyPatch) -> None:
    def launched(self: Scheduler, part: ScheduledRequest) -> None:
        _launched(self, part)
        part.request.num_computed_tokens += len(part.drafts)

    patch.setattr(Scheduler, "launched", launched)


@plant
def wrong_drafts_are_kept(patch: pytest.MonkeyPatch) -> None:
    def append(
        self: StepResults, live: Any, part: ScheduledRequest, tokens: Any, *rest: Any
    ) -> None:
        drafts = tuple(tokens[: len(part.drafts)])
        _append(self, live, part._replace(drafts=drafts), tokens, *rest)

    patch.setattr(StepResults, "_append", append)


@plant
def a_draft_is_kept_by_the_token_of_the_next_row(patch: pytest.MonkeyPatch) -> None:
    def append(
        self: StepResults, live: Any, part: ScheduledRequest, tokens: Any, *rest: Any
    ) -> None:
        rows = zip(part.drafts, tokens, tokens[1:], strict=False)
        drafts = tuple([own if draft == after else draft for draft, own, after in rows])
        _append(self, live, part._replace(drafts=drafts), tokens, *rest)

    patch.setattr(StepResults, "_append", append)


@plant
def an_ending_token_is_followed_by_drafts(patch: pytest.MonkeyPatch) -> None:
    def append(
        self: StepResults, live: Any, part: ScheduledRequest, tokens: Any, *rest: Any
    ) -> None:
        request, ending = part.request, part.request.ending_token_ids
        right = [own for own, draft in zip(tokens, part.drafts, strict=False) if own == draft]
        request.ending_token_ids = ending - frozenset(right)
        _append(self, live, part, tokens, *rest)
        request.ending_token_ids = ending

    patch.setattr(StepResults, "_append", append)


@plant
def usage_counts_wrong_drafts_as_accepted(patch: pytest.MonkeyPatch) -> None:
    count = StepResults._count_drafts

    def counted(self: StepResults, request: Request, drafts: int, kept: int, **rest: Any) -> None:
        count(self, request, drafts, kept, **rest)
        request.num_accepted_draft_tokens += drafts - kept

    patch.setattr(StepResults, "_count_drafts", counted)


@plant
def blocks_of_wrong_drafts_are_shared(patch: pytest.MonkeyPatch) -> None:
    def verified(self: Scheduler, request: Request, num_drafts: int) -> None:
        _verified(self, request, num_drafts)
        self.kv_cache.commit(request, request.num_computed_tokens + 1)

    patch.setattr(Scheduler, "verified", verified)


@plant
def a_request_goes_on_before_its_drafts_are_verified(patch: pytest.MonkeyPatch) -> None:
    def launched(self: Scheduler, part: ScheduledRequest) -> None:
        _launched(self, part)
        part.request.is_verifying = False

    patch.setattr(Scheduler, "launched", launched)


@plant
def rows_of_drafts_are_not_skipped(patch: pytest.MonkeyPatch) -> None:
    """The requests behind them then get the tokens of others."""
    take = StepResults.take

    def shifted(self: StepResults, step: Any, sampled: Any) -> None:
        parts = tuple(
            part._replace(num_sampled=1, drafts=()) if part.drafts else part
            for part in step.batch.requests
        )
        take(self, replace(step, batch=replace(step.batch, requests=parts)), sampled)

    patch.setattr(StepResults, "take", shifted)


@plant
def the_first_choice_takes_the_others_with_it(patch: pytest.MonkeyPatch) -> None:
    def close(self: LiveRequests, live: Any, request: Request, reason: FinishReason) -> None:
        was, live.is_forked = live.is_forked, True
        _close(self, live, request, reason)
        live.is_forked = was

    patch.setattr(LiveRequests, "close", close)


@plant
def the_newest_always_goes_first(patch: pytest.MonkeyPatch) -> None:
    """With few blocks, two requests then preempt each other for ever."""

    def choose(self: FIFOScheduler, plan: StepPlan, now: float) -> None:
        while plan.budget > 0 and self.waiting and len(self.running) < self.max_requests_per_batch:
            head = next(iter(self.waiting.values()))
            if head.key in plan.preempted:
                break
            while self.running and not self.could_admit(plan, head, ()):
                self.preempt(plan, next(iter(self.running.values())))
            if not self.admit(plan, head, now):
                return
        for request in self.runnable():
            if plan.budget > 0 and request.key not in plan.parts:
                self.extend(plan, request)

    for policy in (FIFOScheduler, PrefillFirstScheduler, PriorityScheduler):
        patch.setattr(policy, "choose", choose)


def run_traffic() -> None:
    for index, policy in enumerate(POLICIES * 2):
        core, runner, kv_cache = make_core(
            policy=policy,
            windows=(None, 12) if index % 2 else (None,),
            num_blocks=24,
            max_batch_tokens=32,
            max_requests=12,
            overlap=index >= 3,
            late=index >= 3,
            share_blocks=index >= 2,
            host_blocks=4,
        )
        drafts = 4 if index % 4 > 1 else 0
        ledger = traffic(core, runner, 80, random.Random(index), most_drafts=drafts)
        ledger.check(core.max_context_tokens)
        ledger.check_drafts(core.stats())
        kv_cache.check_integrity()
        assert kv_cache.num_used_blocks == 0


def run_machine() -> None:
    run_state_machine_as_test(
        CoreMachine,
        settings=settings(
            max_examples=150,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
        ),
    )


def test_without_a_planted_bug_all_is_well() -> None:
    """The state machine says so in test_core."""
    run_traffic()


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the quick one, or else by the thorough one."""
    PLANTS[name](monkeypatch)
    with pytest.raises((AssertionError, Violation, KeyError, ValueError, RuntimeError)):
        run_both()


def run_both() -> None:
    run_traffic()
    run_machine()
