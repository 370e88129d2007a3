"""What following forms costs one step, and one request. Costs are scripted: nothing is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from engine.contract.outputs import Finish, FinishReason
from engine.contract.request import GenerationRequest, Request
from engine.contract.sampling_params import GrammarKind, GrammarParams
from engine.contract.types import RequestId, RequestKey, TokenId
from engine.core.engine_core import EngineCore
from engine.core.grammar_budget import (
    BURST_S,
    CHEAP_S,
    STEP_S,
    TOKEN_S,
    begin,
    charge,
    choose_resting,
)
from tests.engine.fake_runner import expected_tokens, make_core, make_request

MS = 0.001
POLICIES = ["fifo", "prefill_first", "priority"]


class Costly:
    """Allows every token, at a scripted cost; tells each cost to whoever counts a step's."""

    is_free = False
    is_complete = False

    def __init__(
        self,
        cost: Callable[[int], float],
        spent: list[float],
        fails_after: int | None = None,
        expected_s: float = 0.0,
    ) -> None:
        self.expected_s = expected_s
        self.spent_s = 0.0
        self.failure: str | None = None
        self.num_tokens = 0
        self._cost = cost
        self._spent = spent
        self._fails_after = fails_after

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        row[:] = -1 if self.failure is None else 0

    def accept(self, token: TokenId) -> bool:
        cost = self._cost(self.num_tokens)
        self.spent_s += cost
        self._spent.append(cost)
        self.num_tokens += 1
        if self.num_tokens == self._fails_after:
            self.failure = "became too complex"
        return self.failure is None


def row(key: int, costs: float) -> Request:
    """A choice whose tokens cost so much, as far as is known."""
    request = Request(make_request(f"r{key}", [1]), 0.0, 100, RequestKey(key))
    request.matcher = Costly(lambda _: costs, [])
    return request


def go_on(requests: list[Request]) -> list[bool]:
    for request in requests:
        assert request.matcher is not None
        request.matcher.accept(TokenId(1))
    return [charge(request, [request]) for request in requests]


def test_ordinary_forms_are_in_every_step() -> None:
    requests = [row(key, 0.9 * CHEAP_S) for key in range(1, 400)]
    for _ in range(50):
        assert choose_resting(requests) == frozenset()
        assert all(go_on(requests))


def test_costly_ones_share_a_step_and_take_turns() -> None:
    cost = STEP_S / 2.5
    costly, cheap = (
        [row(key, cost) for key in range(1, 11)],
        [row(key, 0.0) for key in range(11, 31)],
    )
    everybody = costly + cheap
    for _ in range(20):  # until the costs are known
        go_on(everybody)
    turns = dict.fromkeys(everybody, 0)
    for _ in range(50):
        resting = choose_resting(everybody)
        present = [one for one in everybody if one.key not in resting]
        assert {one.key for one in cheap}.isdisjoint(resting)
        assert sum(one.grammar_cost_s for one in present) <= STEP_S
        for one in present:
            turns[one] += 1
    assert {turns[one] for one in cheap} == {50}
    assert all(turns[one] >= 7 for one in costly)  # 2 of 10 a step: 10 turns each if all are even


def test_one_that_costs_more_than_a_step_may_has_its_turn_too() -> None:
    giant, others = row(1, 20 * STEP_S), [row(key, STEP_S / 2) for key in range(2, 8)]
    everybody = [giant, *others]
    go_on(everybody)
    seen = [giant.key not in choose_resting(everybody) for _ in range(200)]
    assert any(seen)
    assert not all(seen)


def test_one_slow_mask_ends_nobody_and_is_forgotten() -> None:
    request = row(1, 0.0)
    request.matcher = Costly(lambda token: 0.9 * BURST_S if token % 200 == 100 else 0.0, [])
    for _ in range(1000):
        assert go_on([request]) == [True]


def test_what_costs_too_much_for_too_long_ends() -> None:
    request = row(1, TOKEN_S + 5 * MS)
    ends = [go_on([request])[0] for _ in range(60)]
    assert abs(ends.index(False) - BURST_S / (5 * MS)) <= 1
    begin(request)
    assert request.grammar_cost_s == 0  # what is expected, again
    at_the_limit = row(2, TOKEN_S)
    assert all(go_on([at_the_limit])[0] for _ in range(1000))


def test_the_choices_of_a_request_are_counted_together() -> None:
    choices = [row(key, TOKEN_S + 5 * MS) for key in range(1, 17)]
    for step in range(60):
        for choice in choices:
            assert choice.matcher is not None
            choice.matcher.accept(TokenId(1))
            if not charge(choice, choices):
                assert step in (2, 3)  # 16 × 5 ms a step
                return
    pytest.fail("it never ended")


FORM = GrammarParams(kind=GrammarKind.LARK, text="start: x")


def drain(
    core: EngineCore, spent: list[float], limit: int
) -> tuple[dict[str, list[int]], dict[str, Finish], list[float]]:
    """Tokens and ends by request (and choice, where it is not 0), and what each step spent."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, Finish] = {}
    steps: list[float] = []
    for _ in range(limit):
        if not core.has_work:
            break
        spent.clear()
        for output in core.step().outputs:
            name = output.request_id + (f"/{output.choice}" if output.choice else "")
            tokens.setdefault(name, []).extend(output.token_ids)
            if output.finish is not None:
                ends[name] = output.finish
        steps.append(sum(spent))
    assert not core.has_work
    return tokens, ends, steps


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("overlap", [False, True])
def test_neighbours_do_not_wait_for_costly_forms(policy: str, overlap: bool) -> None:
    """Three requests of 16 choices each, at 3 ms a token, beside eight without a form."""
    core, _, kv_cache = make_core(
        policy=policy, overlap=overlap, late=overlap, num_blocks=2000, max_requests=64,
        max_batch_tokens=128,
    )  # fmt: skip
    spent: list[float] = []
    for name in range(8):
        core.add(make_request(f"plain{name}", [name + 1, 2], 60), 100.0)
    for name in range(3):
        spec = make_request(f"costly{name}", [name + 1, 3], 12, n=16)
        core.add(spec, 100.0, lambda: Costly(lambda _: 3 * MS, spent, expected_s=2 * MS))
    tokens, ends, steps = drain(core, spent, 1000)
    for name in range(8):
        assert tokens[f"plain{name}"] == expected_tokens([name + 1, 2], 60)
    assert max(steps[:3]) <= 3 * 3 * MS  # the first token of each request
    assert max(steps[3:]) <= 2 * 3 * MS  # two of the 2 ms that are expected; then one of 3 ms
    assert all(end.reason in (FinishReason.LENGTH, FinishReason.ERROR) for end in ends.values())
    assert kv_cache.num_used_blocks == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_those_who_rest_do_not_starve_when_blocks_are_short(policy: str) -> None:
    core, _, kv_cache = make_core(policy=policy, num_blocks=12, block_size=2, max_requests=8)
    spent: list[float] = []
    for name in range(5):
        spec = make_request(f"r{name}", [name + 1, 3], 14)
        core.add(spec, 100.0, lambda: Costly(lambda _: 2 * STEP_S / 10, spent))
    tokens, ends, _ = drain(core, spent, 2000)
    assert {end.reason for end in ends.values()} == {FinishReason.LENGTH}
    for name in range(5):
        assert tokens[f"r{name}"] == expected_tokens([name + 1, 3], 14)
    assert kv_cache.num_used_blocks == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_held_request_that_rested_goes_on(overlap: bool) -> None:
    core, _, _ = make_core(overlap=overlap, late=overlap, num_blocks=64)
    spent: list[float] = []
    for name in ("a", "b"):
        spec = make_request(name, [1, 2], 20)
        core.add(spec, 100.0, lambda: Costly(lambda _: STEP_S, spent))
    for _ in range(6):
        core.step()
    core.hold(RequestId("a"))
    core.hold(RequestId("b"))
    core.step()
    core.unhold_all()
    _, ends, _ = drain(core, spent, 200)
    assert {end.reason for end in ends.values()} == {FinishReason.LENGTH}


def test_a_form_that_takes_too_long_is_its_requests_error_alone() -> None:
    core, runner, kv_cache = make_core(num_blocks=200, max_requests=16)
    spent: list[float] = []
    spec = make_request("costly", [1, 3], 500, n=4)
    core.add(with_form(spec), 100.0, lambda: Costly(lambda _: 20 * MS, spent))
    core.add(make_request("plain", [4, 5], 40), 100.0)
    tokens, ends, _ = drain(core, spent, 700)
    failure = ends["costly"].failure
    assert failure is not None
    assert failure.field == "grammar.grammar"
    assert failure.message.startswith("grammar.grammar: takes too long to follow")
    assert "fewer choices" in failure.message
    assert not failure.retryable
    assert tokens["plain"] == expected_tokens([4, 5], 40)
    assert kv_cache.num_used_blocks == 0
    assert len(runner.released) == 5


def test_a_form_that_becomes_too_complex_says_so() -> None:
    core, _, _ = make_core()
    core.add(with_form(make_request("a", [1, 3], 9)), 100.0, lambda: Costly(lambda _: 0.0, [], 3))
    _, ends, _ = drain(core, [], 50)
    failure = ends["a"].failure
    assert failure is not None
    assert failure.message == "grammar.grammar: became too complex"
    assert failure.field == "grammar.grammar"


def with_form(spec: GenerationRequest) -> GenerationRequest:
    return replace(spec, grammar=FORM)
