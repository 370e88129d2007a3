"""What drafts may take of a step, and what they cost."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.contract.outputs import FinishReason
from engine.contract.request import GenerationRequest, Request
from engine.contract.rope import RopeLengths
from engine.contract.types import RequestId, TokenId
from engine.core.engine_core import EngineCore
from engine.drafts.drafter import Drafter
from engine.drafts.row_costs import RowTimes
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.scheduler.pace import shape_of
from engine.scheduler.runner_protocol import INVALID_TOKEN
from engine.scheduler.scheduled_batch import ScheduledBatch, ScheduledRequest
from engine.scheduler.step_cost import StepCosts, StepShape
from tests.engine.core_machine import POLICIES
from tests.engine.fake_runner import expected_tokens, make_core, make_request
from tests.engine.ledger import drain
from tests.engine.scheduler.simulated import CPU, Simulation
from tests.engine.scheduler.watched import CoreRig
from tests.engine.traffic import traffic

WRONG = TokenId(3)


def decoding(
    names: str, *, length: int = 2, **options: object
) -> tuple[CoreRig, list[ScheduledBatch]]:
    """A core whose requests decode, and the batches of its steps from now on."""
    rig = CoreRig(**options)
    batches: list[ScheduledBatch] = []
    for name in names:
        spec = make_request(name, range(length), 30, caller=name)
        rig.ledger.add(spec)
        rig.core.add(spec, rig.clock())
    while not all(one.num_output_tokens for one in rig.core.scheduler.running.values()):
        rig.ledger.take(rig.core.step())
    rig.ledger.take(rig.core.step())
    rig.runner.hook = batches.append
    return rig, batches


def draft(core: EngineCore, name: str, count: int, *, right: bool = False) -> None:
    live = core._live.by_id[name].choices[0]  # type: ignore[index]
    known = live.num_output_tokens
    tokens = expected_tokens(live.spec.prompt, known + count)[known:]
    wrong = TokenId(WRONG + 1) if tokens[0] == WRONG else WRONG
    live.drafts = tuple(map(TokenId, tokens)) if right else (wrong,) * count


def parts(batch: ScheduledBatch) -> dict[str, ScheduledRequest]:
    return {part.request.request_id: part for part in batch.requests}


@pytest.mark.parametrize(
    ("policy", "has_prompt"),
    [
        *((policy, False) for policy in POLICIES),
        *((policy, True) for policy in POLICIES if policy != "prefill_first"),  # it takes all
    ],
)
def test_drafts_leave_a_token_for_everybody(policy: str, has_prompt: bool) -> None:
    """Also where the rest of a prompt does not fit, so that requests enter one by one."""
    rig, batches = decoding("abc", policy=policy, max_batch_tokens=5, num_blocks=60)
    if has_prompt:
        spec = make_request("d", range(60), 5, caller="d")
        rig.ledger.add(spec)
        rig.core.add(spec, rig.clock())
        rig.ledger.take(rig.core.step())
    draft(rig.core, "a", 9)
    rig.ledger.take(rig.core.step())
    found = parts(batches[-1])
    assert set("abc") <= set(found)
    assert has_prompt or len(found["a"].drafts) == 2
    drain(rig.core, rig.ledger)


def test_a_row_without_a_token_behind_right_drafts_is_computed_again() -> None:
    """As if a grammar's mask could not be computed ahead. Only a request's first row tells that
    nothing is left.
    """
    rig, batches = decoding("a")
    [request] = rig.core.scheduler.running.values()
    draft(rig.core, "a", 4, right=True)
    sample, failing = rig.runner._sample, [request.num_tokens + 2]

    def failing_once(part: Any, at: int, mask: Any) -> TokenId:
        if at in failing:
            failing.remove(at)
            return INVALID_TOKEN
        return sample(part, at, mask)

    rig.runner._sample = failing_once  # type: ignore[method-assign]
    before = request.num_output_tokens
    rig.ledger.take(rig.core.step())
    assert len(batches[0].requests[0].drafts) == 4
    assert not failing
    assert request.num_output_tokens == before + 2
    assert not request.status.is_terminal
    drain(rig.core, rig.ledger)


def test_drafts_take_no_block_of_a_held_request() -> None:
    rig, batches = decoding("ab", num_blocks=4, block_size=4, max_batch_tokens=16)
    rig.core.hold(RequestId("b"))
    pool = rig.kv_cache.pools[0]
    taken = pool.allocate(pool.num_free)
    draft(rig.core, "a", 9)
    rig.ledger.take(rig.core.step())
    assert rig.core.scheduler.num_preemptions == 0
    assert batches[0].requests[0].start + batches[0].requests[0].num_rows <= 4
    pool.free(taken)
    rig.core.unhold_all()
    drain(rig.core, rig.ledger)


@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "priority"])  # fair charges for rows
@pytest.mark.parametrize("num_blocks", [4, 6, 9, 20])
def test_wrong_drafts_leave_blocks_as_they_would_be(policy: str, num_blocks: int) -> None:
    """A neighbour's next token finds its block, also where requests enter the step one by one."""

    def steps(count: int) -> list[tuple[int, int]]:
        rig, batches = decoding(
            "abc", policy=policy, num_blocks=num_blocks, block_size=4, max_batch_tokens=12
        )
        found = []
        while rig.core.has_work:
            for name in "abc" if count else "":
                if name in rig.core._live.by_id:
                    draft(rig.core, name, count)
            rig.core.step()
            found.append((rig.kv_cache.pools[0].num_free, rig.core.scheduler.num_preemptions))
            rig.kv_cache.check_integrity()
        assert any(part.drafts for batch in batches for part in batch.requests) == bool(count)
        return found

    assert steps(5) == steps(0)


@pytest.mark.parametrize("right", [False, True])
def test_a_request_may_be_cancelled_while_its_drafts_are_computed(right: bool) -> None:
    """None of that step's tokens comes, and all its blocks are free again."""
    rig, batches = decoding("ab", num_blocks=40, overlap=True)
    rig.core.settle()
    draft(rig.core, "a", 4, right=right)
    while not any(part.drafts for batch in batches for part in batch.requests):
        rig.ledger.take(rig.core.step())
    known = rig.ledger.text("a")
    rig.core.cancel(RequestId("a"))
    rig.ledger.take(rig.core.step())
    assert rig.ledger.text("a") == known
    drain(rig.core, rig.ledger)
    rig.ledger.check(rig.core.max_context_tokens)
    rig.kv_cache.check_integrity()
    assert rig.kv_cache.num_used_blocks == 0


def test_a_caller_pays_for_every_row_and_for_no_token_twice() -> None:
    def service(drafts: int, *, right: bool) -> tuple[int, int]:
        rig, _ = decoding("ab", num_blocks=40)
        if drafts:
            draft(rig.core, "a", drafts, right=right)
        rig.ledger.take(rig.core.step())
        tokens = len(rig.ledger.text("a"))
        rig.core.forget_computed()  # what is computed again for others' sake costs nothing
        drain(rig.core, rig.ledger)
        (found,) = [one.service for one in rig.core.stats().callers if one.caller == "a"]
        return found, tokens

    plain, one_token = service(0, right=False)
    right, tokens = service(4, right=True)
    assert tokens == one_token + 4
    assert right == plain, "kept drafts cost what the tokens would have cost"
    wrong, tokens = service(4, right=False)
    assert tokens == one_token
    assert wrong > plain, "rejected rows are charged"
    assert wrong - plain == 2 * (service(2, right=False)[0] - plain)


def test_rows_of_drafts_count_as_decodes() -> None:
    rig, batches = decoding("a", num_blocks=40)
    draft(rig.core, "a", 3)
    rig.ledger.take(rig.core.step())
    (part,) = batches[0].requests
    shape = shape_of(batches[0])
    assert (shape.num_prompt_tokens, shape.num_decodes) == (0, 4)
    assert shape.decode_context == sum(part.start + row + 1 for row in range(4))


def test_drafts_stop_at_the_original_length() -> None:
    """Behind it a request is computed again, with other frequencies."""
    original = 12
    rig, batches = decoding("a", num_blocks=40)
    rig.core.rope = RopeLengths(original, 100, is_graded=False, restarts=True)
    (live,) = rig.core._live.by_id["a"].choices.values()  # type: ignore[index]
    rig.core._bound_drafts(live)
    draft(rig.core, "a", 20, right=True)
    rig.ledger.take(rig.core.step())
    assert live.num_tokens == original
    assert max(part.start + part.num_rows for part in batches[0].requests) < original


# ---- whatever happens --------------------------------------------------------------------------


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("wanted", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_steps_with_drafts_keep_every_law(
    wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of all kinds, right and wrong drafts, cancels, holds, failing steps, any cache."""
    monkeypatch.setattr(logging.getLogger("engine.core.engine_core"), "disabled", True)
    chance, steps, kept = random.Random(5), 0, 0
    while steps < wanted:
        overlap = chance.random() < 0.4
        core, runner, kv_cache = make_core(
            policy=chance.choice(POLICIES),
            windows=chance.choice([(None,), (6,), (None, 5), (9, 3)]),
            num_blocks=chance.choice((40, 60, 200)),
            block_size=chance.choice((1, 2, 4)),
            max_batch_tokens=chance.choice((8, 32, 64)),
            max_requests=chance.choice((3, 12, 24)),
            overlap=overlap,
            late=overlap and chance.random() < 0.5,
            share_blocks=chance.random() < 0.6,
            host_blocks=chance.choice((None, 2, 12)),
            target_step_time=chance.choice((0.0, 0.0001)),
        )

        def check(batch: ScheduledBatch, kv_cache: KVCacheManager = kv_cache) -> None:
            kv_cache.check_integrity()

        runner.hook = check
        ledger = traffic(core, runner, 200, chance, most_drafts=chance.choice((1, 4, 9)))
        ledger.check(core.max_context_tokens)
        ledger.check_drafts(core.stats())
        kv_cache.check_integrity()
        assert kv_cache.num_used_blocks == kv_cache.num_used_host_blocks == 0
        steps += runner.steps
        kept += core.stats().accepted_draft_tokens
    assert kept > wanted / 10


def test_a_cancel_between_a_launch_and_its_collection_drops_the_drafts() -> None:
    rig, batches = decoding("ab", num_blocks=40, overlap=True, late=True)
    draft(rig.core, "a", 4, right=True)
    rig.ledger.take(rig.core.step())
    assert any(part.drafts for part in batches[-1].requests)
    had = len(rig.ledger.text("a"))
    before = rig.core.stats()
    assert rig.core.cancel(RequestId("a"))
    rig.ledger.take(rig.core.step())
    end = rig.ledger.end("a")
    assert end.reason is FinishReason.CANCELLED
    assert (end.usage.completion_tokens, end.usage.draft_tokens) == (had, 0)
    assert len(rig.ledger.text("a")) == had
    assert rig.core.stats().draft_tokens == before.draft_tokens
    drain(rig.core, rig.ledger)
    rig.ledger.check_drafts(rig.core.stats())
    assert rig.kv_cache.num_used_blocks == 0


def test_a_hold_while_drafts_are_computed_delivers_them_once() -> None:
    rig, batches = decoding("ab", num_blocks=40, overlap=True, late=True)
    draft(rig.core, "a", 4, right=True)
    rig.ledger.take(rig.core.step())
    assert any(part.drafts for part in batches[-1].requests)
    had = len(rig.ledger.text("a"))
    rig.core.hold(RequestId("a"))
    for _ in range(5):
        rig.ledger.take(rig.core.step())
    assert len(rig.ledger.text("a")) == had + 5
    rig.core.unhold(RequestId("a"))
    drain(rig.core, rig.ledger)
    rig.ledger.check(rig.core.max_context_tokens)
    rig.ledger.check_drafts(rig.core.stats())


# ---- with what the drafter decides -------------------------------------------------------------

TILE = 6
"""So many rows cost as much as one."""
ROW_COUNTS = (1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 1, 3 * TILE, 3 * TILE + 1, 64)


class Tiled(StepCosts):
    """A machine that computes rows a tile at a time."""

    def of_step(self, shape: StepShape) -> float:
        tiles = -(-shape.num_decodes // TILE)
        return StepCosts.of_step(self, shape._replace(num_decodes=tiles))


MACHINE = Tiled(*CPU._replace(decode=0.3 * CPU.step, decode_token=0.0))


def seconds_of(num_rows: int) -> float:
    return MACHINE.of_step(StepShape(0, 0, num_rows, 0))


def drafting(simulation: Simulation, *, is_as_measured: bool = True) -> Drafter:
    """is_as_measured: or else all rows were thought to cost as much as one."""
    seconds = [seconds_of(count if is_as_measured else 1) for count in ROW_COUNTS]
    times = RowTimes(ROW_COUNTS, tuple(seconds), 0.0, 0.0)
    found = Drafter(times, sources=("history", "prediction"), clock=simulation.clock)
    simulation.core.scheduler.drafter = found
    return found


def predicted(spec: GenerationRequest, tokens: Sequence[int] | None = None) -> GenerationRequest:
    """With what it will say as prediction, or with something else."""
    right = expected_tokens(spec.prompt, spec.stop.max_tokens)
    return replace(spec, prediction=right if tokens is None else tokens)


@pytest.mark.parametrize("others", [1, 3, 7, 15])
@pytest.mark.parametrize("is_as_measured", [True, False])
def test_a_neighbour_without_drafts_waits_a_twentieth_longer_at_most(
    others: int, is_as_measured: bool
) -> None:
    """Each step, where rows cost what was measured; of what is learned later, all but a few."""
    simulation = Simulation(MACHINE, 0.0)
    drafting(simulation, is_as_measured=is_as_measured)
    simulation.add(predicted(make_request("a", [1, 2, 3], 300, caller="a")))
    for index in range(others):
        simulation.add(make_request(f"b{index}", [5 + index], 300, caller=f"b{index}"))
    simulation.run(5)
    before = simulation.core.stats()
    steps = simulation.run(100)
    rows = [sum(step.num_rows.values()) for step in steps]
    longer = [step.seconds / seconds_of(len(step.parts)) for step in steps]
    if is_as_measured:
        assert max(longer) <= 1.05
    else:
        assert sorted(longer)[-10] <= 1.05
    room = -(others + 1) % TILE
    drafted = simulation.core.stats().draft_tokens - before.draft_tokens
    assert not room or not is_as_measured or drafted > 0
    assert not is_as_measured or max(rows) <= others + 1 + room
    simulation.drain()


def test_128_choices_that_diverge_share_what_is_known_of_the_prompt() -> None:
    simulation = Simulation(
        MACHINE, 0.0, max_requests=128, num_blocks=3000, max_batch_tokens=2048, share_blocks=True
    )
    drafter = drafting(simulation)
    spec = predicted(make_request("a", range(90), 40, n=128))
    simulation.add(spec, make_request("b", [4], 30, caller="b"))
    indexes = 0
    while simulation.core.has_work:
        simulation.run(1)
        indexes = max(indexes, len(drafter._indexes._known))
        assert len(drafter._states) <= 129
    simulation.drain()
    assert indexes <= 3  # both prompts and the prediction
    assert not drafter._states
    assert not drafter._indexes._known
    simulation.ledger.check_drafts(simulation.core.stats())
    assert sum(drafter.num_drafted.values()) == simulation.core.stats().draft_tokens > 0
    for one, other in itertools.pairwise(range(128)):
        assert simulation.ledger.text("a", one) != simulation.ledger.text("a", other)


@pytest.mark.parametrize(
    "expected", [[7] * 1_000_000, list(range(1, 101)) * 10_000], ids=["one token", "periodic"]
)
def test_a_prediction_of_a_million_tokens_holds_nobody_up(
    expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody refuses it here; a step reads a part of it."""
    simulation = Simulation(MACHINE, 0.0)
    drafter = drafting(simulation)
    took: list[float] = []
    ask = drafter.draft

    def timed(requests: Sequence[Request]) -> None:
        began = time.thread_time()
        ask(requests)
        took.append(time.thread_time() - began)

    monkeypatch.setattr(drafter, "draft", timed)
    simulation.add(predicted(make_request("a", [1, 2, 3], 200), expected))
    simulation.drain()
    assert sum(drafter.num_drafted.values()) > 0
    assert max(took) < 0.25
    assert not drafter._indexes._known
