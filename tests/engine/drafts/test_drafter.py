"""How many drafts a step computes, of which requests, and what that may cost."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Self

import pytest
from typing_extensions import override

from engine.contract.request import GenerationRequest, Request
from engine.contract.sampling_params import SamplingParams, StopParams
from engine.contract.types import CallerKey, RequestId, RequestKey, TokenId
from engine.drafts import drafter as module
from engine.drafts.draft_source import DraftSource, Guess
from engine.drafts.drafter import Drafter
from engine.drafts.row_costs import DecodeRows, RowCosts, RowTimes
from engine.drafts.suffix_index import SharedIndexes

TILE = RowTimes((1, 6, 7, 12, 13, 64), (0.03, 0.03, 0.034, 0.034, 0.04, 0.12), 0.0, 0.0)
"""As on two cores with the 0.6B shape: six rows take as long as one."""
LINEAR = RowTimes((1, 64), (0.01, 0.64), 0.0, 0.0)
"""Where each row costs as much as the first."""


class Always(DraftSource):
    """Guesses 1, 1, 1, …"""

    name = "history"
    num_kinds = 1

    @classmethod
    @override
    def begin(cls, request: Request, indexes: SharedIndexes) -> Self:
        return cls()

    @override
    def guess(self, tokens: array[int], most: int) -> Guess | None:
        return Guess(array("i", [1] * most), 0)


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.SOURCES, "history", Always)


class Run:
    """Requests whose drafts are kept with some probability each, in time that does not pass."""

    def __init__(self, times: RowTimes, callers: str, target_s: float = 0.0) -> None:
        self.costs = RowCosts(times)
        self.drafter = Drafter(
            times, sources=("history",), target_s=target_s, clock=lambda: self.spent
        )
        self.requests = [self._request(index, name) for index, name in enumerate(callers)]
        self.spent = 0.0
        self.seconds: list[float] = []
        self.plain: list[float] = []
        self.tokens = [0] * len(callers)
        self.drafts: list[list[int]] = []
        self._chance = random.Random(1)

    @staticmethod
    def _request(index: int, caller: str) -> Request:
        spec = GenerationRequest(
            request_id=RequestId(str(index)),
            prompt=(TokenId(2),),
            sampling=SamplingParams(),
            stop=StopParams(max_tokens=10**6),
            caller=CallerKey(caller),
        )
        request = Request(spec, 0.0, 10**6, key=RequestKey(index + 1))
        request.max_drafted_tokens = 10**6
        return request

    def steps(self, count: int, *probabilities: float) -> None:
        for _ in range(count):
            self.drafter.draft(self.requests)
            counts = [len(request.drafts) for request in self.requests]
            rows = DecodeRows(len(counts), sum(counts), 0, 0)
            self.seconds.append(self.costs.estimate(rows))
            self.plain.append(self.costs.estimate(DecodeRows(len(counts), 0, 0, 0)))
            self.drafts.append(counts)
            for index, (request, p) in enumerate(zip(self.requests, probabilities, strict=True)):
                kept = 0
                while kept < counts[index] and self._chance.random() < p:
                    kept += 1
                if counts[index]:
                    self.drafter.judge(request, counts[index], kept, is_over=False)
                self.tokens[index] += kept + 1
                request.token_ids.extend([1] * (kept + 1))
            self.drafter.measured(rows, self.seconds[-1])

    @property
    def speedup(self) -> float:
        """Tokens per second, relative to steps without drafts."""
        tokens = sum(self.tokens) / len(self.tokens)
        return tokens * sum(self.plain) / len(self.plain) / sum(self.seconds)


@pytest.mark.parametrize(
    ("probability", "least"), [(1.0, 7.0), (0.9, 4.0), (0.7, 2.6), (0.5, 1.7), (0.3, 1.3)]
)
def test_drafts_pay_where_rows_are_free(probability: float, least: float) -> None:
    run = Run(TILE, "a")
    run.steps(1000, probability)
    assert run.speedup >= least


@pytest.mark.parametrize("times", [TILE, LINEAR])
@pytest.mark.parametrize("callers", ["a", "ab", "aaaaaaaa"])
def test_wrong_drafts_cost_a_hundredth(times: RowTimes, callers: str) -> None:
    run = Run(times, callers)
    run.steps(1000, *[0.0] * len(callers))
    assert run.speedup >= 0.985
    late = sum(run.seconds[500:]) / sum(run.plain[500:])
    assert late <= 1.011
    if times is TILE or len(callers) == 1:
        assert any(map(sum, run.drafts[500:])), "it is tried again, rarely"


def test_a_request_that_begins_to_repeat_is_noticed() -> None:
    run = Run(TILE, "a")
    run.steps(500, 0.0)
    run.steps(100, 1.0)
    assert run.tokens[0] > 500 + 100 * 4


@pytest.mark.parametrize("callers", ["ab", "aabb"])
def test_others_wait_at_most_a_twentieth_longer(callers: str) -> None:
    run = Run(TILE, callers)
    run.steps(300, *[1.0] + [0.0] * (len(callers) - 1))
    assert all(now <= 1.05 * plain for now, plain in zip(run.seconds, run.plain, strict=True))
    assert run.tokens[0] > 1.5 * 300


@pytest.mark.parametrize("at_load", [TILE, LINEAR])
@pytest.mark.parametrize("machine", [TILE, LINEAR])
@pytest.mark.parametrize("probability", [0.3, 0.8, 1.0])
def test_a_neighbour_without_drafts_hardly_waits(
    machine: RowTimes, at_load: RowTimes, probability: float
) -> None:
    """Also where rows cost something else than was measured at load."""
    run = Run(at_load, "ab")
    run.costs = RowCosts(machine)
    run.requests[1].max_drafted_tokens = 0
    run.steps(2000, probability, 0.0)
    gaps = sorted(now / plain for now, plain in zip(run.seconds, run.plain, strict=True))
    assert gaps[int(0.99 * len(gaps))] <= 1.05


def test_a_caller_may_wait_longer_for_its_own() -> None:
    run = Run(TILE, "aaaa")
    run.steps(200, 1.0, 1.0, 1.0, 1.0)
    assert run.speedup > 3
    assert max(run.seconds) > 1.05 * run.plain[0]
    alone = Run(TILE, "aaaa", target_s=0.034)
    alone.steps(200, 1.0, 1.0, 1.0, 1.0)
    assert max(alone.seconds) <= 0.034


def test_the_cost_of_rows_is_learned() -> None:
    """Where more rows cost twice what was measured at load."""
    run = Run(TILE, "a")
    run.costs = RowCosts(RowTimes((1, 2, 64), (0.03, 0.09, 0.3), 0.0, 0.0))
    run.steps(1000, 0.5)
    assert run.speedup >= 0.97


def test_a_step_that_was_delayed_counts_little() -> None:
    costs = RowCosts(TILE)
    for _ in range(50):
        costs.learn(DecodeRows(1, 0, 9, 0), 0.03)
        costs.learn(DecodeRows(1, 5, 9, 0), 0.031)
    costs.learn(DecodeRows(1, 5, 9, 0), 3.0)
    assert costs.estimate(DecodeRows(1, 5, 9, 0)) < 0.033


def test_drafts_that_no_step_took_are_taken_away() -> None:
    run = Run(TILE, "ab")
    run.drafter.draft(run.requests)
    assert any(request.drafts for request in run.requests)
    run.drafter.draft([])
    assert not any(request.drafts for request in run.requests)


def test_no_more_drafts_than_there_is_room_for() -> None:
    run = Run(TILE, "a")
    (request,) = run.requests
    request.max_drafted_tokens = request.num_tokens + 4
    run.drafter.draft(run.requests)
    assert len(request.drafts) == 3
    request.max_drafted_tokens = 0
    run.drafter.draft(run.requests)
    assert request.drafts == ()


def test_asking_is_paid_for() -> None:
    """If asking takes as long as a step, requests whose guesses fail are hardly asked."""
    run = Run(LINEAR, "aaaa")
    asked = 0

    def slow(self: Always, tokens: array[int], most: int) -> None:
        nonlocal asked
        asked += 1
        run.spent += 1e-3

    guess: Callable[..., object] = Always.guess
    try:
        Always.guess = slow  # type: ignore[assignment, method-assign]
        run.steps(1000, 0.0, 0.0, 0.0, 0.0)
    finally:
        Always.guess = guess  # type: ignore[assignment, method-assign]
    assert run.spent <= 0.03 * sum(run.seconds)


def test_a_step_asks_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many requests whose guesses take long, a step asks a few, and the next step others."""
    run = Run(TILE, "a" * 128)
    asked: list[array[int]] = []

    def slow(self: Always, tokens: array[int], most: int) -> Guess:
        asked.append(tokens)
        run.spent += 1e-3
        return Guess(array("i", [1] * most), 0)

    monkeypatch.setattr(Always, "guess", slow)
    monkeypatch.setattr(module, "_CLEARLY", -1.0)  # all are known to pay
    run.drafter.draft(run.requests)
    first = len(asked)
    run.drafter.draft(run.requests)
    bound = max(0.05 * run.costs.estimate(DecodeRows(128, 0, 0, 0)), 1e-3)
    assert 1 <= first <= bound / 1e-3 + 1 < 128
    assert asked[first] is not asked[0]


def test_drafts_that_are_never_tried_are_no_longer_asked_for() -> None:
    """As where no block is free for them: nothing is judged, and yet they save nothing."""
    run = Run(TILE, "a")
    run.steps(20, 1.0)
    (state,) = run.drafter._states.values()
    before = state.saved
    for _ in range(100):
        run.drafter.draft(run.requests)
    assert state.saved < 0.1 * before


def test_an_ended_request_is_forgotten() -> None:
    run = Run(TILE, "ab")
    run.steps(3, 1.0, 0.0)
    run.drafter.draft(run.requests)
    assert run.drafter.drafted
    for request in run.requests:
        run.drafter.forget(request.key)
    assert not run.drafter._states
    assert not run.drafter.drafted
    assert not run.drafter._indexes._known


class Fits:
    """A grammar that the first `count` of any tokens fit."""

    def __init__(self, count: int) -> None:
        self._count = count

    def num_fitting(self, tokens: array[int]) -> int:
        return min(self._count, len(tokens))


@pytest.mark.parametrize(
    ("fitting", "mask_s", "most"),
    [(9, 1e-5, 9), (2, 1e-5, 2), (0, 1e-5, 0), (9, 2e-4, 2), (9, 1e-3, 0)],
)
def test_a_grammar_bounds_drafts_by_what_fits_and_by_the_time_of_masks(
    fitting: int, mask_s: float, most: int
) -> None:
    run = Run(TILE, "a")
    [request] = run.requests
    request.matcher = Fits(fitting)  # type: ignore[assignment]
    request.grammar_cost_s = mask_s
    run.steps(200, 1.0)
    assert max(drafts for (drafts,) in run.drafts) <= most
    assert any(drafts for (drafts,) in run.drafts) == bool(most)
