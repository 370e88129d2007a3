"""The model of what steps cost, on simulated machines."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.step_cost import StepCost, StepCosts, StepShape, pairs

MACHINES = st.builds(
    StepCosts,
    step=st.floats(1e-3, 0.05),
    prefill=st.sampled_from([0.0, 0.005, 0.02]),
    prompt_token=st.floats(2e-5, 3e-3),
    prompt_pair=st.sampled_from([0.0, 1e-9, 1e-7, 1e-6]),
    decode=st.floats(1e-5, 2e-3),
    decode_token=st.sampled_from([0.0, 3e-9, 3e-6]),
)


def a_step(draw: random.Random) -> StepShape:
    """Some streams, and mostly a chunk from somewhere in a long prompt."""
    num_tokens = draw.choice([0, draw.randint(16, 400)])
    num_decodes = draw.randint(0 if num_tokens else 1, 16)
    return StepShape(
        num_tokens,
        pairs(draw.randint(0, 4096), num_tokens),
        num_decodes,
        sum(draw.randint(1, 2000) for _ in range(num_decodes)),
    )


@settings(max_examples=60, deadline=None)
@given(machine=MACHINES, seed=st.integers(0, 2**32))
def test_a_machine_without_noise_is_known_after_some_steps(machine: StepCosts, seed: int) -> None:
    draw, cost = random.Random(seed), StepCost()
    for _ in range(60):
        shape = a_step(draw)
        cost.add(shape, machine.of_step(shape))
    found = cost.costs()
    assert found is not None
    for _ in range(20):
        shape = a_step(draw)
        assert found.of_step(shape) == pytest.approx(machine.of_step(shape), rel=0.03)


@settings(max_examples=60, deadline=None)
@given(machine=MACHINES, seed=st.integers(0, 2**32))
def test_noise_and_delays_by_others_hardly_count(machine: StepCosts, seed: int) -> None:
    draw, cost = random.Random(seed), StepCost()
    for index in range(96):
        shape = a_step(draw)
        delay = draw.uniform(2, 20) if index % 12 == 5 else 1.0
        cost.add(shape, machine.of_step(shape) * draw.lognormvariate(0, 0.03) * delay)
    found = cost.costs()
    assert found is not None
    errors = []
    for _ in range(50):
        shape = a_step(draw)
        errors.append(abs(math.log(found.of_step(shape) / machine.of_step(shape))))
    # A few steps that are unlike all that were remembered may be off by more.
    assert sorted(errors)[25] < 0.1
    assert sorted(errors)[45] < 0.5


@settings(max_examples=60, deadline=None)
@given(
    seconds=st.lists(st.floats(1e-5, 100.0), min_size=1, max_size=80),
    seed=st.integers(0, 2**32),
)
def test_whatever_was_measured_more_never_costs_less(seconds: list[float], seed: int) -> None:
    draw, cost = random.Random(seed), StepCost()
    cost.add(StepShape(7, 28, 0, 0), 0.1)
    for measured in seconds:
        cost.add(a_step(draw), measured)
    found = cost.costs()
    assert found is not None
    assert all(math.isfinite(one) and one >= 0 for one in found)


@settings(max_examples=200, deadline=None)
@given(machine=MACHINES, start=st.integers(0, 100_000), seconds=st.floats(0, 10))
def test_the_most_tokens_are_those_that_the_time_lets(
    machine: StepCosts, start: int, seconds: float
) -> None:
    most = int(machine.most_tokens(start, seconds))
    assert machine.of_chunk(start, most) <= seconds * (1 + 1e-9)
    assert machine.of_chunk(start, most + 1) >= seconds * (1 - 1e-9)


def test_tokens_that_cost_nothing_are_not_limited() -> None:
    free = StepCosts(0.1, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert free.most_tokens(0, 0.1) == math.inf
    assert free.most_tokens(0, 0.0) == 0.0
    assert free.most_tokens(0, -1.0) == 0.0


def test_before_a_prompt_was_measured_nothing_is_known() -> None:
    cost = StepCost()
    assert cost.costs() is None
    cost.add(StepShape(0, 0, 4, 100), 0.05)
    cost.add(StepShape(64, pairs(0, 64), 4, 100), 0.0)  # a clock that did not move
    assert cost.costs() is None
    assert cost.most_measured == 0
    cost.add(StepShape(64, pairs(0, 64), 4, 104), 0.2)
    assert cost.costs() is not None
    assert cost.most_measured == 64


def test_what_prompts_cost_is_not_forgotten_while_nobody_brings_any() -> None:
    machine, cost = StepCosts(0.03, 0.0, 0.002, 1e-7, 0.001, 1e-6), StepCost()
    draw = random.Random(1)
    for _ in range(40):
        shape = a_step(draw)
        cost.add(shape, machine.of_step(shape))
    for step in range(5000):
        shape = StepShape(0, 0, 8, 8 * (100 + step))
        cost.add(shape, machine.of_step(shape))
    found = cost.costs()
    assert found is not None
    assert found.of_chunk(0, 200) == pytest.approx(machine.of_chunk(0, 200), rel=0.1)
    assert len(cost._decodes) <= 64, "and memory is bounded"


def test_a_machine_that_has_become_slower_is_believed_soon_and_one_delay_is_not() -> None:
    machine, cost, draw = (
        StepCosts(0.03, 0.0, 0.002, 1e-7, 0.001, 1e-6),
        StepCost(),
        random.Random(3),
    )
    for _ in range(60):
        shape = a_step(draw)
        cost.add(shape, machine.of_step(shape))
    wanted = StepShape(100, pairs(500, 100), 8, 4000)
    cost.add(wanted, 10 * machine.of_step(wanted))
    found = cost.costs()
    assert found is not None
    assert found.of_step(wanted) == pytest.approx(machine.of_step(wanted), rel=0.1)
    for _ in range(20):
        shape = a_step(draw)
        cost.add(shape, 3 * machine.of_step(shape))
    found = cost.costs()
    assert found is not None
    assert found.of_step(wanted) == pytest.approx(3 * machine.of_step(wanted), rel=0.15)
