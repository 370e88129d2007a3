"""States of recurrent layers through all that can happen to a request, step by step, and how much
of its prompt a request finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import PreTrainedModel

from engine.api.offline import LoadedModel, from_model
from engine.contract.outputs import FinishReason
from engine.contract.types import RequestId
from tests.engine.core_steps import NEW_TOKENS, Steps
from tests.engine.mode_sweep import BLOCK
from tests.model_recipes import RECIPES
from tests.tiny_models import greedy_reference, make_model, make_prompts

FORMS = ("qwen3_next", "granitemoehybrid", "mamba2")
"""One whose recurrence our kernels compute, one by a stand-in, and one without attention."""


@pytest.fixture(scope="module", params=FORMS)
def both(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, LoadedModel]:
    model = make_model(
        RECIPES[request.param].config(eos_token_id=None, max_position_embeddings=2048)
    )
    return model, from_model(model)


Both = tuple[PreTrainedModel, LoadedModel]


@pytest.fixture
def made(both: Both) -> Iterator[Steps]:
    made = Steps(both)
    yield made
    assert not made.core.has_work
    made.kv_cache.check_integrity()
    assert made.core.stats().states_used == made.kv_cache.num_used_blocks == 0


PROMPTS = make_prompts((20, 33, 5))


def _add_all(made: Steps) -> None:
    for index, prompt in enumerate(PROMPTS):
        made.add(f"r{index}", prompt)


# ---- what happens to a request -------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 3, 9])
def test_who_is_held_goes_on_where_it_was(made: Steps, after: int) -> None:
    _add_all(made)
    made.steps(after)
    assert made.core.hold(RequestId("r1"))
    made.steps(4)
    said = len(made.ledger.text("r1"))
    made.steps(4)
    assert len(made.ledger.text("r1")) == said
    assert made.core.unhold(RequestId("r1"))
    made.finish()
    for index, prompt in enumerate(PROMPTS):
        made.check(f"r{index}", prompt)


@pytest.mark.parametrize("after", [1, 3, 9])
def test_who_is_cancelled_frees_its_state_within_a_step(made: Steps, after: int) -> None:
    _add_all(made)
    made.steps(after)
    key = made.request("r1").key
    assert made.kv_cache.tables(key)
    made.core.cancel(RequestId("r1"))
    made.steps(1)
    with pytest.raises(KeyError):
        made.kv_cache.tables(key)
    assert made.ledger.end("r1").reason is FinishReason.CANCELLED
    made.add("next", PROMPTS[1])
    made.finish()
    for name, index in (("r0", 0), ("next", 1), ("r2", 2)):
        made.check(name, PROMPTS[index])


@pytest.mark.parametrize("after", [1, 3, 10])
def test_a_failed_step_ends_its_requests_and_leaves_no_state_of_theirs(
    made: Steps, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step has written garbage over the states of its requests, and into what it was to keep.
    One that was held meanwhile is not among them.
    """
    _add_all(made)
    made.steps(after)
    made.core.hold(RequestId("r2"))
    made.steps(1)
    runner: Any = made.core.runner
    slots = [made.slot(name) for name in ("r0", "r1")]

    def failing(*_: Any, **__: Any) -> Any:
        for state in made.states:
            state[slots] = float("nan")
        raise RuntimeError("the device is out of order")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "launch", failing)
        made.steps(1)
    assert {made.ledger.end(name).reason for name in ("r0", "r1")} == {FinishReason.ERROR}
    made.core.unhold(RequestId("r2"))
    for name, index in (("again0", 0), ("again1", 1)):
        made.add(name, PROMPTS[index])
    made.finish()
    made.check("r2", PROMPTS[2])
    made.check("again0", PROMPTS[0])
    made.check("again1", PROMPTS[1])


def test_nan_in_a_state_reaches_no_other_request(made: Steps) -> None:
    """Neither who runs beside it, nor the next holder of its slot, nor who finds its blocks."""
    _add_all(made)
    made.steps(5)
    slot = made.slot("r1")
    for state in made.states:
        state[slot] = float("nan")
    made.finish()
    assert made.ledger.end("r1").reason is FinishReason.ERROR
    made.check("r0", PROMPTS[0])
    made.check("r2", PROMPTS[2])
    for name in ("a", "b", "c", "d"):
        made.add(name, PROMPTS[1])
    made.finish()
    for name in ("a", "b", "c", "d"):
        made.check(name, PROMPTS[1])


def test_a_request_of_one_token(made: Steps) -> None:
    assert made.serve("prompt", [5]) == 0
    assert made.serve("both", [5], 1) == 0
    assert made.serve("output", PROMPTS[0], 1) == 0


# ---- who finds what ------------------------------------------------------------------------------


def test_salts_and_bypass_part_states_as_they_part_blocks(made: Steps) -> None:
    prompt = PROMPTS[1]
    assert made.serve("a", prompt) == 0
    assert made.serve("salted", prompt, cache_salt=b"mine") == 0
    copies = made.core.stats().state_copies
    assert made.serve("bypassing", prompt, bypass_prefix_cache=True) == 0
    assert made.core.stats().state_copies == copies
    assert made.serve("salted again", prompt, cache_salt=b"mine") == 32
    assert made.serve("b", prompt) == 32


@pytest.mark.parametrize("after", [0, 2, 9])
def test_a_reset_forgets_states(made: Steps, after: int) -> None:
    """Also those that requests keep which began before it."""
    made.serve("before", PROMPTS[1])
    assert made.core.stats().states_kept > 0
    made.add("running", PROMPTS[0])
    made.steps(after)
    made.kv_cache.reset_prefix_cache()
    assert made.core.stats().states_kept == 0
    made.finish()
    made.check("running", PROMPTS[0])
    assert made.serve("after", PROMPTS[1]) == 0
    assert made.serve("once more", PROMPTS[0]) == (0 if after else 16)


def test_a_state_that_is_evicted_while_its_finder_waits_is_computed_again(both: Both) -> None:
    made = Steps(both, max_requests_per_batch=1, kept_states=1)
    assert made.serve("a", PROMPTS[1], 2) == 0
    made.add("b", PROMPTS[0])
    made.steps(1)
    made.add("c", PROMPTS[1])
    made.finish()
    made.check("b", PROMPTS[0])
    made.check("c", PROMPTS[1])
    assert made.core.stats().state_evictions > 0
    assert made.core.stats().states_used == 0


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_with_fewer_states_than_requests_may_run_they_wait(
    both: Both, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.loading.memory._state_slots", lambda *_: slots)
    made = Steps(both)
    prompts = make_prompts((5, 33, 9, 20, 7), seed=8)
    for index, prompt in enumerate(prompts):
        made.add(f"r{index}", prompt, n=1)
    most = 0
    while made.core.has_work:
        made.steps(1)
        most = max(most, made.core.stats().running)
    assert most == slots
    for index, prompt in enumerate(prompts):
        made.check(f"r{index}", prompt)
    made.add("choices", prompts[1], n=3)
    made.finish()
    expected = greedy_reference(made.model, prompts[1], NEW_TOKENS)
    assert [made.ledger.text("choices", choice) for choice in range(3)] == [expected] * 3


# ---- how much is found ---------------------------------------------------------------------------


@pytest.mark.parametrize("length", [100, 500, 1000])
def test_of_a_prompt_told_twice_all_but_the_last_block_is_found(made: Steps, length: int) -> None:
    (prompt,) = make_prompts((length,), seed=length)
    assert made.serve("first", prompt, 3) == 0
    assert made.serve("second", prompt, 3) == (length - 1) // BLOCK * BLOCK


def test_of_a_conversation_each_turn_computes_less_than_two_blocks_of_what_was_said(
    made: Steps,
) -> None:
    (history,) = make_prompts((600,), seed=3)
    said, shares = 0, []
    for turn, question in enumerate(make_prompts((13,) * 10, seed=4)):
        prompt = history + question
        found = made.serve(f"turn {turn}", prompt)
        if turn:
            assert said - found < 2 * BLOCK
            shares.append(found / len(prompt))
        history = prompt + made.ledger.text(f"turn {turn}")
        said = len(history)
    assert min(shares) >= 0.95


def test_of_many_prompts_with_a_common_beginning_it_is_found_from_the_third_on(
    made: Steps,
) -> None:
    (common,) = make_prompts((1024,), seed=5)
    tails = make_prompts((9,) * 16, seed=6)
    found = [made.serve(f"r{i}", common + tail, 3) for i, tail in enumerate(tails)]
    assert found == [0, 0] + [1024] * 14
    assert made.core.stats().prefix_tokens_without_state == 1024


def test_those_that_come_at_once_find_it_too(made: Steps) -> None:
    (common,) = make_prompts((1024,), seed=7)
    tails = make_prompts((9,) * 18, seed=8)
    for index, tail in enumerate(tails[:2]):
        made.serve(f"before {index}", common + tail, 3)
    before = made.core.stats().prefix_hits
    for index, tail in enumerate(tails[2:]):
        made.add(f"r{index}", common + tail, 3)
    made.finish()
    assert made.core.stats().prefix_hits - before == 16 * 1024
    for index, tail in enumerate(tails[2:]):
        made.check(f"r{index}", common + tail, 3)


def test_a_long_output_drives_out_no_other_state(both: Both) -> None:
    made = Steps(both, max_requests_per_batch=2, kept_states=4)
    assert made.serve("a", PROMPTS[1], 2) == 0
    made.serve("long", PROMPTS[0], 12 * BLOCK)
    assert made.serve("b", PROMPTS[1], 2) == 32
    assert made.core.stats().state_evictions == 0
