"""Steps in which requests decode take about as long as they may, on machines of known costs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.request import GenerationRequest
from engine.contract.types import RequestKey
from engine.runner.buckets import mixed_sizes
from engine.scheduler.pace import ChunkLimit, StepPace
from engine.scheduler.step_cost import StepCosts
from tests.engine.core_machine import POLICIES
from tests.engine.fake_runner import VOCAB, make_request
from tests.engine.scheduler.simulated import CPU, CUDA, Simulation, Step

BLOCK = 32
BUDGET = 1024
LONG = 4096
TARGET = 0.25
STREAMS = tuple(f"s{index}" for index in range(8))


def prompt(name: str, length: int, max_tokens: int = 4, **options: int) -> GenerationRequest:
    first = sum(map(ord, name))
    return make_request(
        name, [(first + 3 * i) % VOCAB for i in range(length)], max_tokens, **options
    )


def streaming(simulation: Simulation, max_tokens: int = 600) -> None:
    """Eight streams, each of which has had some tokens."""
    lengths = range(100, 156, 7)
    simulation.add(
        *(prompt(name, length, max_tokens) for name, length in zip(STREAMS, lengths, strict=True))
    )
    for name in STREAMS:
        simulation.run_until_begun(name)
    simulation.run(5)


def over(steps: list[Step], target: float, tolerance: float = 1.1) -> list[float]:
    """How long the steps with decodes took that took too long, in targets."""
    return [
        step.seconds / target
        for step in steps
        if step.decodes and step.seconds > tolerance * target
    ]


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("machine", "target"), [(CPU, TARGET), (CUDA, 0.05)], ids=["a CPU", "a GPU"]
)
def test_a_long_prompt_among_streams_keeps_steps_to_the_target(
    policy: str, overlap: bool, machine: StepCosts, target: float
) -> None:
    simulation = Simulation(machine, target, policy=policy, overlap=overlap, late=overlap)
    streaming(simulation)
    simulation.add(prompt("long", LONG))
    steps = simulation.run_until_begun("long", most=LONG // BLOCK + 4)
    assert not over(steps, target, 4), "not even while it learns"
    assert not over(steps[8:], target)
    used = sorted(step.seconds for step in steps if step.num_prompt_tokens)
    assert used[len(used) // 2] > 0.6 * target, "and the time is used"
    for step in steps[1:-1]:
        assert set(STREAMS) <= set(step.parts), "no stream waits meanwhile"
    simulation.drain()


@pytest.mark.parametrize("policy", POLICIES)
def test_many_prompts_among_streams_keep_steps_to_the_target(policy: str) -> None:
    simulation = Simulation(CPU, TARGET, policy=policy, max_requests=40)
    streaming(simulation)
    simulation.add(*(prompt(f"p{index}", 10 + 37 * index, 60) for index in range(24)))
    simulation.run(8)
    steps = simulation.run(120)
    assert not over(steps, TARGET)
    assert sum(len(step.parts) > 9 for step in steps) > 20
    simulation.drain()


def test_without_a_target_steps_are_as_large_as_the_budget() -> None:
    simulation = Simulation(CPU, 0.0)
    streaming(simulation)
    simulation.add(prompt("long", LONG))
    steps = simulation.run_until_begun("long")
    assert [step.num_prompt_tokens for step in steps] == [1016, 1016, 1016, 1016, 32]
    stats = simulation.core.stats()
    assert stats.steps_with_decodes > 0
    assert stats.steps_over_target == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_where_nobody_decodes_nothing_is_cut(policy: str) -> None:
    simulation = Simulation(CPU, 0.001, policy=policy)
    simulation.add(prompt("long", LONG), prompt("next", 500))
    steps = simulation.run(4)
    assert [step.num_prompt_tokens for step in steps] == [BUDGET] * 4
    simulation.drain()


def test_streams_that_are_held_or_wait_for_their_last_token_do_not_count() -> None:
    simulation = Simulation(CPU, 0.001)
    streaming(simulation)
    for name in STREAMS:
        simulation.core.hold(name)
    simulation.add(prompt("long", LONG))
    assert [step.num_prompt_tokens for step in simulation.run(2)] == [BUDGET] * 2
    simulation.core.unhold_all()
    simulation.drain()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chunk_that_is_cut_ends_at_a_block(policy: str) -> None:
    simulation = Simulation(CPU, TARGET, policy=policy, max_requests=40)
    streaming(simulation)
    simulation.add(prompt("a", 777), prompt("b", 500), prompt("c", 1033))
    for step in simulation.run(60):
        cut = [one for one in step.parts.values() if one.is_prompt_left]
        assert all((one.start + one.num_tokens) % BLOCK == 0 for one in cut)
    simulation.drain()


def test_a_chunk_that_is_cut_fills_a_step_of_a_captured_size() -> None:
    simulation = Simulation(CUDA, 0.05)
    sizes = mixed_sizes(0)
    simulation.core.scheduler.pace = StepPace(0.05, BLOCK, sizes.at_most)
    streaming(simulation)
    simulation.add(prompt("long", LONG))
    steps = simulation.run_until_begun("long")
    assert len(steps) > 5
    for step in steps[2:-1]:
        total = sum(part.num_tokens for part in step.parts.values())
        assert sizes.at_least(total) == total
    assert not over(steps[8:], 0.05)


@pytest.mark.parametrize("policy", POLICIES)
def test_where_decoding_alone_takes_too_long_a_block_is_computed(policy: str) -> None:
    simulation = Simulation(CPU, 0.001, policy=policy)
    streaming(simulation)
    simulation.add(prompt("long", LONG))
    steps = simulation.run_until_begun("long", most=LONG // BLOCK + 2)
    assert {step.num_prompt_tokens for step in steps[1:-1]} == {BLOCK}
    simulation.drain()


@pytest.mark.parametrize("policy", POLICIES)
def test_where_a_block_is_larger_than_the_budget_prompts_end_too(policy: str) -> None:
    simulation = Simulation(
        CPU, 0.001, policy=policy, max_batch_tokens=9, block_size=16, max_requests=9
    )
    simulation.add(*(prompt(name, 9, 400) for name in STREAMS))
    for name in STREAMS:
        simulation.run_until_begun(name)
    simulation.add(prompt("next", 50))
    steps = simulation.run_until_begun("next", most=60)
    assert all(step.decodes for step in steps)
    simulation.drain()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_prompt_of_a_stream_that_was_preempted_is_cut_too(policy: str) -> None:
    simulation = Simulation(
        CPU, TARGET, policy=policy, num_blocks=40, max_requests=12, safety_margin=0.0
    )
    simulation.add(*(prompt(f"r{index}", 90, 200) for index in range(12)))
    simulation.run(60)
    steps = simulation.run(300)
    assert simulation.core.stats().preemptions > 0
    assert not over(steps, TARGET)
    simulation.drain()


def test_one_delay_changes_nothing_and_a_slower_machine_is_learned() -> None:
    simulation = Simulation(CPU, 2 * TARGET, num_blocks=4000)
    streaming(simulation, max_tokens=2000)
    simulation.add(prompt("long", 20_000))
    simulation.run(20)
    late = len(simulation.steps) + 3
    simulation.delay = lambda number: 12.0 if number == late else 1.0
    steps = simulation.run(10)
    assert len(over(steps, 2 * TARGET)) == 1
    assert min(step.num_prompt_tokens for step in steps) >= steps[0].num_prompt_tokens - BLOCK
    simulation.delay = lambda number: 2.0
    assert len(over(simulation.run(40), 2 * TARGET)) <= 10
    assert not over(simulation.run(20), 2 * TARGET)
    simulation.delay = lambda number: 0.5
    simulation.run(30)
    faster = simulation.run(10)
    assert not over(faster, 2 * TARGET)
    assert min(step.seconds for step in faster) > TARGET, "and the time is used again"


def test_who_was_told_of_delays_alone_does_not_stay_with_the_least() -> None:
    simulation = Simulation(CPU, TARGET)
    simulation.delay = lambda number: 100.0
    streaming(simulation)
    simulation.delay = lambda number: 1.0
    simulation.run(20)
    simulation.add(prompt("long", LONG))
    steps = simulation.run_until_begun("long")
    assert max(step.num_prompt_tokens for step in steps[:20]) > BLOCK
    assert not over(steps, TARGET)


def test_who_has_seen_small_prompts_alone_does_not_believe_in_large_ones() -> None:
    """All prompts are alike: that tokens cost something cannot be told from what a step costs."""
    simulation = Simulation(CPU, 4 * TARGET)
    streaming(simulation)
    for index in range(40):
        simulation.add(prompt(f"p{index}", 20, 1))
        simulation.run(1)
    simulation.add(prompt("long", LONG))
    steps = simulation.run_until_begun("long")
    sizes = [step.num_prompt_tokens for step in steps]
    assert all(
        after <= max(2 * before, BLOCK) for before, after in itertools.pairwise([20, *sizes])
    )
    assert not over(steps, 4 * TARGET, 1.3)
    assert max(sizes) > 300


def test_a_short_prompt_whose_beginning_is_cached_joins_beside_a_long_one() -> None:
    """One token of it is left: it costs what a stream does."""
    simulation = Simulation(CPU, 0.001, share_blocks=True)
    streaming(simulation)
    ids = range(BLOCK + 1)
    simulation.add(make_request("first", ids, 2))
    simulation.run_until_begun("first")
    simulation.add(prompt("long", LONG))
    simulation.run(2)
    simulation.add(make_request("again", ids, 2))
    [step] = simulation.run(1)
    assert step.parts["again"].num_tokens == 1
    simulation.drain()


def test_nobody_is_preempted_for_a_prompt_for_which_there_is_no_time() -> None:
    simulation = Simulation(CPU, 0.001, policy="priority", max_requests=9)
    simulation.add(*(prompt(name, 100, 300, priority=-1) for name in STREAMS))
    for name in STREAMS:
        simulation.run_until_begun(name)
    simulation.add(prompt("long", LONG, priority=2))
    simulation.run(2)
    simulation.add(prompt("high", 300, priority=1))
    simulation.run(20)
    assert simulation.core.stats().preemptions == 0
    simulation.drain()


def test_steps_over_the_target_are_counted() -> None:
    simulation = Simulation(CPU, TARGET)
    streaming(simulation)
    before = simulation.core.stats()
    late = len(simulation.steps) + 3
    simulation.delay = lambda number: 20.0 if number == late else 1.0
    simulation.run(10)
    stats = simulation.core.stats()
    assert stats.steps_with_decodes - before.steps_with_decodes == 10
    assert stats.steps_over_target - before.steps_over_target == 1


COSTS = st.none() | st.builds(
    StepCosts,
    *(st.floats(0.0, 0.1) for _ in range(2)),
    *(st.floats(0.0, 0.01) for _ in range(2)),
    *(st.floats(0.0, 0.1) for _ in range(2)),
)


@settings(max_examples=300, deadline=None)
@given(
    costs=COSTS,
    seconds=st.floats(-1.0, 1.0),
    tokens=st.integers(0, 5000),
    num_decoding=st.integers(1, 64),
    block_size=st.sampled_from([1, 16, 32, 256]),
    is_padded=st.booleans(),
    start=st.integers(0, 9000),
    wanted=st.integers(2, 9000),
    budget=st.integers(1, 8192),
    num_taken=st.integers(0, 100),
)
def test_the_first_prompt_always_gets_something_and_none_more_than_there_is(
    costs: StepCosts | None,
    seconds: float,
    tokens: int,
    num_decoding: int,
    block_size: int,
    is_padded: bool,
    start: int,
    wanted: int,
    budget: int,
    num_taken: int,
) -> None:
    limit = ChunkLimit(
        costs,
        seconds=seconds,
        tokens=tokens,
        decoding={RequestKey(key) for key in range(num_decoding)},
        block_size=block_size,
        fit_tokens=mixed_sizes(0).at_most if is_padded else None,
    )
    most = min(wanted, budget - num_decoding if budget > num_decoding else budget)
    least = min(most, block_size - start % block_size)
    chunk = limit.chunk(start, wanted, budget, num_taken)
    assert 1 <= chunk <= most
    if costs is None:
        assert chunk == least
    elif chunk != least:
        assert chunk <= tokens
        assert costs.of_chunk(start, chunk) <= seconds * (1 + 1e-9)
