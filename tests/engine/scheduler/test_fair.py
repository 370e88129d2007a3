"""What the policy `fair` promises, with the scripted runner."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.contract.request import Request
from engine.contract.types import RequestId
from engine.scheduler import fair
from engine.scheduler.fair import LEAD, FairScheduler
from engine.scheduler.token_counters import Share, TokenCounters
from tests.engine.fake_runner import make_request
from tests.engine.scheduler.sharing import Client, Sharing
from tests.engine.scheduler.watched import Watched

# ---- who comes first ---------------------------------------------------------------------------


def test_a_newcomer_s_prompt_comes_before_the_backlog_of_another() -> None:
    watched = Watched(policy="fair", max_batch_tokens=16, num_blocks=400)
    watched.add(*(make_request(f"a{i}", range(16), 4, caller="a") for i in range(50)))
    watched.step()
    watched.step()
    watched.add(make_request("b", range(50, 60), 3, caller="b"))
    assert watched.step()["b"] == 10
    assert watched.step()["b"] == 1  # and its output goes on
    watched.drain()


def test_a_newcomer_takes_the_place_of_one_who_has_many_and_costs_it_nothing() -> None:
    watched = Watched(policy="fair", max_requests=4, max_batch_tokens=32)
    watched.add(*(make_request(f"a{i}", [1, i], 9, caller="a") for i in range(6)))
    watched.step()
    watched.add(make_request("b", [5, 6], 2, caller="b"))
    assert watched.step() == {"a0": 1, "a1": 1, "a2": 1, "b": 2}
    watched.drain()
    assert watched.core.stats().preemptions == 0, "its KV was kept"
    assert sum(step.get("a3", 0) for step in watched.steps) == 2 + 8


def test_a_newcomer_s_place_is_found_while_a_step_is_pending() -> None:
    watched = Watched(policy="fair", max_requests=4, overlap=True, late=True)
    watched.add(*(make_request(f"a{i}", [1, i], 30, caller="a") for i in range(6)))
    for _ in range(4):
        watched.step()
    watched.add(make_request("b", [5, 6], 2, caller="b"))
    assert "b" in watched.step()
    watched.drain()


def test_a_newcomer_takes_blocks_of_one_who_has_many_requests() -> None:
    watched = Watched(policy="fair", num_blocks=8, block_size=4, max_batch_tokens=64)
    watched.add(*(make_request(f"a{i}", range(7), 9, caller="a") for i in range(4)))
    watched.step()
    watched.add(make_request("b", range(50, 57), 2, caller="b"))
    assert "b" in watched.step()
    watched.drain()
    assert watched.ledger.end("b").timings.preemptions == 0


def test_of_two_callers_and_one_place_each_gets_it_in_turn_but_not_at_each_step() -> None:
    watched = Watched(policy="fair", max_requests=1, num_blocks=400)
    watched.add(make_request("a", [1], 200, caller="a"), make_request("b", [2], 200, caller="b"))
    for _ in range(200):
        watched.step()
    order = [next(iter(step)) for step in watched.steps]
    changes = sum(one != other for one, other in itertools.pairwise(order))
    steps_each = LEAD // 2
    assert abs(order.count("a") - order.count("b")) <= steps_each + 1
    assert 4 <= changes <= 200 // steps_each
    assert watched.core.stats().preemptions == 0
    watched.drain()


def test_within_a_caller_by_priority_then_by_arrival_and_not_beyond_it() -> None:
    watched = Watched(policy="fair", max_requests=1)
    watched.add(make_request("a", [1], 1, caller="a"))
    watched.add(make_request("a-high", [1], 1, caller="a", priority=9))
    watched.add(make_request("a-low", [1], 1, caller="a", priority=-9))
    watched.add(make_request("b", [1], 1, caller="b", priority=-100))
    order = [next(iter(watched.step())) for _ in range(4)]
    assert [name for name in order if name != "b"] == ["a-high", "a", "a-low"]
    assert order.index("b") <= 1


def test_a_higher_priority_takes_the_place_of_a_lower_one_of_the_same_caller() -> None:
    watched = Watched(policy="fair", max_requests=2)
    watched.add(
        make_request("low", [1], 9, caller="a", priority=-1), make_request("b", [1], 9, caller="b")
    )
    watched.step()
    watched.add(make_request("high", [1, 2], 3, caller="a", priority=1))
    assert watched.step() == {"b": 1, "high": 2}
    watched.drain()


def test_decoding_goes_on_beside_another_s_prompts_where_the_budget_is_short() -> None:
    """Four decode, the budget is four: the one who comes is not kept out, nor keeps them out."""
    watched = Watched(policy="fair", max_batch_tokens=4, num_blocks=200)
    watched.add(*(make_request(f"a{i}", [1], 60, caller="a") for i in range(4)))
    for _ in range(5):
        watched.step()
    watched.add(*(make_request(f"b{i}", range(40), 1, caller="b") for i in range(9)))
    count = len(watched.steps)
    for _ in range(40):
        watched.step()
    seen = watched.steps[count:]
    prompts = sum(n for step in seen for name, n in step.items() if name.startswith("b"))
    outputs = sum(n for step in seen for name, n in step.items() if name.startswith("a"))
    assert abs(prompts - 2 * outputs) <= 16  # what a token of an output counts
    watched.drain()


def test_a_large_request_of_the_least_served_is_not_passed_by() -> None:
    watched = Watched(policy="fair", num_blocks=10, block_size=4, max_batch_tokens=64)
    watched.add(*(make_request(f"a{i}", range(7), 9, caller="a") for i in range(30)))
    watched.step()
    watched.add(make_request("b", range(36), 2, caller="b"))
    for _ in range(60):
        if "b" in watched.step():
            break
    assert "b" in watched.steps[-1]
    watched.drain()


def test_time_limits_that_cannot_be_met_are_told_at_once() -> None:
    watched = Watched(policy="fair", num_blocks=200, max_requests=1, max_batch_tokens=4)
    watched.seconds = 1.0
    watched.add(make_request("a", range(8), 3, caller="a"))
    watched.step()
    watched.step()
    watched.add(make_request("b", range(40), 3, caller="b", time_limit_s=9.5))
    watched.add(make_request("c", range(4), 3, caller="b"))
    watched.drain()
    assert all("b" not in step for step in watched.steps)
    assert watched.ledger.end("b").timings.first_scheduled is None


# ---- what everybody is given -------------------------------------------------------------------


def test_sixteen_callers_of_equal_weight_are_given_the_same() -> None:
    sharing = Sharing([Client(prompt=8 * (1 + i % 5), output=2 + 3 * (i % 4)) for i in range(16)])
    sharing.run(6000).check()
    assert max(sharing.service) <= 1.05 * min(sharing.service)


def test_weights_are_heeded() -> None:
    sharing = Sharing([Client(weight) for weight in (1.0, 2.0, 4.0)], max_requests=4)
    sharing.run(4000).check()
    each = [service / weight for service, weight in zip(sharing.service, (1, 2, 4), strict=True)]
    assert max(each) <= 1.05 * min(each)


def test_whom_a_gateway_names_share_its_weight() -> None:
    sharing = Sharing([Client(2.0), *(Client(2.0, group="gateway") for _ in range(3))])
    sharing.run(3000)
    alone, *named = sharing.service
    assert max(named) <= 1.05 * min(named)
    assert abs(alone - sum(named)) <= 0.05 * alone


def test_time_without_requests_is_no_credit() -> None:
    sharing = Sharing([Client(), Client(stays=((0, 20), (2000, 400)))])
    sharing.run(2000)
    before = list(sharing.service)
    sharing.run(400)
    grown = [now - then for now, then in zip(sharing.service, before, strict=True)]
    assert abs(grown[0] - grown[1]) <= 0.1 * sum(grown)


def test_one_that_is_held_gets_no_credit_for_it() -> None:
    watched = Watched(policy="fair", max_requests=2, num_blocks=400)
    watched.add(make_request("held", [1, 2], 50, caller="b"))
    watched.step()
    watched.core.hold(RequestId("held"))
    watched.add(*(make_request(f"a{i}", range(9), 9, caller="a") for i in range(40)))
    for _ in range(40):
        watched.step()
    watched.core.unhold(RequestId("held"))
    shares = shares_of(watched)
    assert shares["b"].counter >= shares["a"].counter - 32
    watched.drain()


def shares_of(watched: Watched) -> dict[str, Share]:
    scheduler = watched.core.scheduler
    assert isinstance(scheduler, FairScheduler)
    return {str(caller): share for caller, share in scheduler._shares._shares.items()}


def new_callers_keep_coming(steps: int = 600) -> int | None:
    """One whose counter is above theirs waits meanwhile. After how many steps it runs."""
    watched = Watched(policy="fair", max_requests=2, max_batch_tokens=8, num_blocks=400)
    watched.add(make_request("n", [1], 9, caller="n"))
    watched.add(*(make_request(f"old{i}", range(40), 3, caller="old") for i in range(3)))
    for _ in range(8):
        watched.step()
    count = 0
    for step in range(steps):
        while len(watched.core.scheduler.waiting) < 8:
            count += 1
            watched.add(make_request(f"n{count}", range(6), 4, caller=f"n{count}"))
        if "old2" in watched.step():
            return step
    return None


def test_new_callers_without_end_keep_no_old_one_out() -> None:
    assert new_callers_keep_coming() is not None


def test_callers_that_have_gone_are_forgotten() -> None:
    watched = Watched(policy="fair", max_requests=4, num_blocks=400)
    watched.add(*(make_request(f"b{i}", range(9), 9, caller="backlog") for i in range(5000)))
    for index in range(6000):
        watched.core.add(make_request(f"r{index}", [1], 1, caller=f"c{index}"), watched.clock())
        watched.core.step()
    scheduler = watched.core.scheduler
    assert isinstance(scheduler, FairScheduler)
    assert len(scheduler._shares) <= 2 * 1024 + 8
    assert len(scheduler._shares._first) <= 100


@pytest.mark.parametrize("num_callers", [1, 20_000])
def test_a_step_s_cost_does_not_grow_with_the_queue(
    num_callers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(policy="fair", max_requests=8, max_batch_tokens=64, num_blocks=400)
    for index in range(20_000):
        caller = f"c{index % num_callers}"
        watched.core.add(make_request(f"r{index}", [1, 2, 3], 9, caller=caller), 0.0)
    orders = 0
    order = TokenCounters.order

    def counted(self: TokenCounters, share: Share, given: float = 0.0) -> tuple[float, bool, int]:
        nonlocal orders
        orders += 1
        return order(self, share, given)

    monkeypatch.setattr(TokenCounters, "order", counted)
    for _ in range(50):
        watched.core.step()
    assert orders <= 50 * 8 * 16


# ---- whoever comes and goes --------------------------------------------------------------------

STAYS = st.lists(st.tuples(st.integers(0, 300), st.integers(20, 200)), min_size=1, max_size=3)
CLIENTS = st.lists(
    st.builds(
        Client,
        weight=st.sampled_from([1.0, 1.0, 2.0, 4.0]),
        stays=STAYS,
        prompt=st.integers(1, 40),
        output=st.integers(1, 6),
    ),
    min_size=2,
    max_size=4,
)


@settings(max_examples=40, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(
    clients=CLIENTS,
    seed=st.integers(0, 2**16),
    max_requests=st.sampled_from([8, 16]),
    overlap=st.booleans(),
)
def test_nobody_is_kept_out_whoever_comes_and_goes(
    clients: list[Client], seed: int, max_requests: int, overlap: bool
) -> None:
    sharing = Sharing(clients, seed, max_requests, overlap=overlap)
    sharing.run(500).check()
    sharing.drain()


def test_who_was_served_alone_owes_nothing_once_all_have_gone() -> None:
    """Nor is the time without requests a credit to the others."""
    stays = [(116, 178)]
    clients = [Client(stays=stays, prompt=1, output=1), Client(stays=[(1, 60), *stays], output=1)]
    Sharing(clients).run(300).check()


def run_by_chance(number: int) -> None:
    """So many courses, the same whatever else is tested: what Hypothesis draws depends on the
    modules that are loaded.
    """
    chance = random.Random(7)
    for seed in range(number):
        clients = [
            Client(
                weight=chance.choice([1.0, 1.0, 2.0, 4.0]),
                stays=[
                    (chance.randint(0, 300), chance.randint(20, 200))
                    for _ in range(chance.randint(1, 3))
                ],
                prompt=chance.randint(1, 40),
                output=chance.choice([1, 6, 40]),
            )
            for _ in range(chance.randint(2, 4))
        ]
        sharing = Sharing(clients, seed, chance.choice([8, 16]), overlap=chance.random() < 0.5)
        sharing.run(500).check()
        sharing.drain()


Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: dict[str, Plant] = {}

_served = TokenCounters.served


def plant(function: Plant) -> Plant:
    PLANTS[function.__name__] = function
    return function


@plant
def a_counter_is_never_lifted(patch: pytest.MonkeyPatch) -> None:
    """A caller that comes back goes on from what it was given before."""
    queued = TokenCounters.queued

    def unlifted(self: TokenCounters, request: Request, *, lifts: bool) -> None:
        queued(self, request, lifts=lifts and self.of(request).since == 0)

    patch.setattr(TokenCounters, "queued", unlifted)


@plant
def a_newcomer_has_no_floor(patch: pytest.MonkeyPatch) -> None:
    """A caller that comes for the first time was given nothing yet."""
    queued = TokenCounters.queued

    def unlifted(self: TokenCounters, request: Request, *, lifts: bool) -> None:
        share = self.of(request)
        if share.since == 0:
            share.counter = 0.0
        queued(self, request, lifts=lifts and share.since != 0)

    patch.setattr(TokenCounters, "queued", unlifted)


@plant
def a_weight_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TokenCounters, "weight", lambda self, share: 1.0)


@plant
def prompts_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    def served(self: TokenCounters, request: Request, service: int) -> None:
        if service == 2:
            _served(self, request, service)

    patch.setattr(TokenCounters, "served", served)


@plant
def a_newcomer_waits_for_an_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fair._FairStep, "_overserved", lambda *_: [])


@plant
def places_change_hands_at_every_step(patch: pytest.MonkeyPatch) -> None:
    def overserved(
        self: fair._FairStep, share: Share, head: Request, is_full: bool
    ) -> list[Request]:
        others = [ones for other, ones in self._places().items() if other is not share]
        return [ones[-1] for ones in others]

    patch.setattr(fair._FairStep, "_overserved", overserved)


FOUND_LATE = ("a_newcomer_waits_for_an_end", "places_change_hands_at_every_step")
"""Bugs that only seconds of examples find."""


@pytest.mark.slow
def test_without_a_planted_bug_all_is_well() -> None:
    """Much the same as above, in the form in which planted bugs are looked for."""
    run_by_chance(60)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in FOUND_LATE else ()) for name in PLANTS],
)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[name](monkeypatch)
    with pytest.raises(AssertionError):
        run_by_chance(60)


def test_a_floor_that_does_not_rise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def floor(self: TokenCounters) -> float:
        """Those that were given nothing yet make it too."""
        first = self.peek()
        return self._busiest() if first is None else first.counter

    monkeypatch.setattr(TokenCounters, "floor", floor)
    assert new_callers_keep_coming() is None


def test_the_order_is_that_of_the_counters_whatever_happens() -> None:
    """Against a plain list that is sorted each time."""
    chance = random.Random(3)
    watched = Watched(policy="fair", max_requests=6, max_batch_tokens=16, num_blocks=64)
    for step in range(400):
        for _ in range(chance.randint(0, 2)):
            name = chance.choice("abcdefgh")
            prompt = [1] * chance.randint(1, 20)
            spec = make_request(f"{name}{step}-{chance.random()}", prompt, 5, caller=name)
            watched.core.add(spec, watched.clock())
        live = list(watched.core._live.by_id)
        if live and chance.random() < 0.3:
            watched.core.cancel(chance.choice(live))
        watched.core.step()
        scheduler = watched.core.scheduler
        assert isinstance(scheduler, FairScheduler)
        waiting = [one for one in scheduler._shares._shares.values() if one.waiting]
        first = scheduler._shares.peek()
        assert first is (min(waiting, key=scheduler._shares.order) if waiting else None)
        assert sum(len(one.waiting) for one in waiting) == len(scheduler.waiting)
