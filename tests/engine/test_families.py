"""Families of models against `model.generate`: every line of docs/models.md is proved here.

A family's tiny model generates alone, eagerly; then the engine serves the same prompts in each of
MODES, and every token must be the same; so must those of our own decoder, if it knows the family.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.api.offline import from_model
from engine.contract.errors import ModelRefusedError
from engine.kv_cache.group_kinds import SlidingAttention
from tests.engine.mode_sweep import (
    BLOCK,
    BUDGET,
    LENGTHS,
    NEW_TOKENS,
    check_every_mode,
    load_family,
    managed,
    run,
)
from tests.families import EVERY_FAMILY
from tests.model_recipes import RECIPES, REFUSALS, WINDOW
from tests.tiny_models import greedy_reference, make_model, make_prompts

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize("decoder", ["transformers", "own"])
def test_every_mode_equals_generate(family: str, decoder: str) -> None:
    check_every_mode(*load_family(family, decoder))


@pytest.mark.parametrize("name", REFUSALS)
def test_a_model_that_would_be_run_wrongly_is_refused(name: str) -> None:
    refusal = REFUSALS[name]
    if not refusal.is_known:
        pytest.skip(f"this version of transformers has no {name} that is refused")
    model = make_model(refusal.recipe.config())
    with pytest.raises(ModelRefusedError) as caught:
        from_model(model)
    reasons = [refusal.reason, refusal.older_reason or refusal.reason]
    assert any(reason in str(caught.value) for reason in reasons)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_a_window_bounds_the_memory_of_a_long_generation(family: str) -> None:
    """Twenty windows long: sliding layers hold their window, full layers all of it."""
    model = make_model(RECIPES[family].config(eos_token_id=None))
    (prompt,) = make_prompts((10,))
    new_tokens = 20 * WINDOW
    expected = greedy_reference(model, prompt, new_tokens)
    assert len(expected) == new_tokens
    loaded = from_model(model)
    held: list[list[int]] = []
    with managed(
        loaded,
        num_blocks=64,
        max_batch_tokens=BUDGET,
        allow_block_sharing=False,
        speculation="off",  # so that each token is a step
    ) as manager:
        kv_cache, runner = manager._loop._core.scheduler.kv_cache, manager._loop._core.runner
        launch = runner.launch

        def watch(batch: Any) -> Any:
            held.append([pool.num_used for pool in kv_cache.pools])
            return launch(batch)

        runner.launch = watch  # type: ignore[method-assign]
        manager.add_request(prompt, request_id="long", max_new_tokens=new_tokens)
        output = manager.get_result(timeout=60)
    assert output is not None
    assert output.generated_tokens == expected
    assert len(held) >= new_tokens - 1, "every step was watched"
    for index, group in enumerate(kv_cache.groups):
        most = max(used[index] for used in held)
        if group.window is None:
            assert most == -(-(len(prompt) + new_tokens - 1) // BLOCK)
        else:
            assert most <= SlidingAttention(WINDOW).most_blocks(10**9, 1, BLOCK) + 1
            assert held[-1][index] >= WINDOW // BLOCK


def _gaps(judge: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """How far each token is from the judge's most likely one, in deviations of the logits."""
    with torch.inference_mode():
        logits = judge(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    gaps: torch.Tensor = (logits.max(dim=-1).values - chosen) / logits.std(dim=-1)
    return gaps


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_bfloat16_tokens_are_within_a_near_tie_of_the_best(family: str) -> None:
    """The second half of the criterion in docs/promises.md: all tokens within 0.1 deviations. And
    where `generate` in bfloat16 chose another token first, either is such a near-tie.

    The first half, 98 % most likely tokens, is not asked of random models: their logits lie so
    close that `generate` itself does not always reach it (97.7 % of 256 tokens, for both of
    these). It is tested with trained weights, in test_bfloat16.py.
    """
    judge = make_model(RECIPES[family].config(eos_token_id=None)).to(torch.bfloat16).float()
    half = make_model(RECIPES[family].config(eos_token_id=None)).to(torch.bfloat16)
    prompts = make_prompts(LENGTHS)
    expected = [greedy_reference(half, prompt, NEW_TOKENS) for prompt in prompts]
    judge.set_attn_implementation("eager")
    actual, _ = run(from_model(half), prompts, num_blocks=128, max_batch_tokens=BUDGET)
    for prompt, ours, theirs in zip(prompts, actual, expected, strict=True):
        assert len(ours) == NEW_TOKENS
        assert _gaps(judge, prompt, ours).max() <= 0.1
        parted = [step for step in range(NEW_TOKENS) if ours[step] != theirs[step]]
        if parted:
            assert _gaps(judge, prompt, theirs[: parted[0] + 1])[-1] <= 0.1


def test_the_table_is_what_the_script_writes() -> None:
    script = runpy.run_path(str(ROOT / "tests" / "model_table.py"))
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert script["with_table"](page) == page, "docs/models.md is old; run `make model-table`"
