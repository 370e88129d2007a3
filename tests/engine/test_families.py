"""Families of models against `model.generate`: every line of docs/models.md is proved here.

A family's tiny model generates alone, eagerly; then the engine serves the same prompts in each of
MODES, and every token must be the same; so must those of our own decoder, if it knows the family.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.api.manager import ContinuousBatchingManager
from engine.api.offline import LoadedModel, from_model
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.errors import ModelRefusedError
from engine.contract.request import RequestStatus
from engine.contract.stats import EngineStats
from engine.kv_cache.group_kinds import SlidingAttention
from engine.loading.loader import verify_model
from engine.models.formats.native import Native
from engine.models.table import FAMILIES as DESCRIBED
from tests.families import EVERY_FAMILY
from tests.model_recipes import MODES, RECIPES, REFUSALS, WINDOW, Recipe
from tests.tiny_models import greedy_reference, make_model, make_prompts

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 8
BUDGET = 48
LENGTHS = (33, 90, 3, 130)
NEW_TOKENS = 12
Tokens = list[list[int]]


def _sharing_prompts() -> Tokens:
    """A prefix of five blocks and a half in common; one that ends with it, one that is the same."""
    (prefix,) = make_prompts((5 * BLOCK + 4,), seed=5)
    tails = make_prompts((7, 30), seed=6)
    return [prefix + tails[0], prefix + tails[1], list(prefix), prefix + tails[1]]


@contextmanager
def _manager(loaded: LoadedModel, **options: Any) -> Iterator[ContinuousBatchingManager]:
    config = ContinuousBatchingConfig(**{"block_size": BLOCK, **options})
    manager = loaded.init_continuous_batching(continuous_batching_config=config)
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(hard_stop=True)
    kv_cache = manager._loop._core.scheduler.kv_cache
    kv_cache.check_integrity()
    assert kv_cache.num_used_blocks == 0


def _run(
    loaded: LoadedModel,
    prompts: Tokens,
    *,
    one_by_one: bool = False,
    sampling: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Tokens, EngineStats]:
    """The generated tokens of each prompt. `sampling`: of the requests; None: greedy."""
    results: dict[str, list[int]] = {}
    names: list[str] = []
    with _manager(loaded, **options) as manager:

        def take() -> None:
            output = manager.get_result(timeout=60)
            assert output is not None
            assert output.status is RequestStatus.FINISHED, output.error
            results[output.request_id] = list(output.generated_tokens)

        # All at once: added one after the other, the first may be over before the last comes.
        for group in [[prompt] for prompt in prompts] if one_by_one else [prompts]:
            names += manager.add_requests(group, max_new_tokens=NEW_TOKENS, **(sampling or {}))
            if one_by_one:
                take()
        while len(results) < len(prompts):
            take()
        stats = manager.stats()
    return [results[name] for name in names], stats


def _with_our_decoder(model: PreTrainedModel) -> LoadedModel:
    """Packs the model's linear layers."""
    verified = verify_model(model, Path(), lambda line: None, packing=Native, own_decoder=True)
    assert verified.decoder is not None
    return LoadedModel(verified)


def _few_blocks(loaded: LoadedModel) -> int:
    """As many as the longest prompt needs alone."""
    windows = [shape.window for shape in loaded._verified.probe.shapes]
    sliding = [window for window in windows if window is not None]
    if len(sliding) == len(windows):
        return max(SlidingAttention(one).most_blocks(10**9, BUDGET, BLOCK) for one in sliding)
    return -(-(max(LENGTHS) + NEW_TOKENS) // BLOCK)


def _check_attention(loaded: LoadedModel, recipe: Recipe) -> None:
    windows = {shape.window for shape in loaded._verified.probe.shapes}
    seen = "full" if windows == {None} else "sliding and full" if None in windows else "sliding"
    assert seen == recipe.attention
    assert windows <= {None, WINDOW}


def _check_paced(loaded: LoadedModel, prompts: Tokens, expected: Tokens) -> None:
    """With a target that hardly any step meets, and one that none does: what stands beside a
    decode is cut, mostly to a block.
    """
    plain: dict[str, Any] = {"num_blocks": 128, "max_batch_tokens": BUDGET}
    tokens, _ = _run(loaded, prompts, target_step_time=0.001, **plain)
    assert tokens == expected
    plain |= {"sampling": {"temperature": 1.0, "seed": 7}, "per_request_processors": True}
    paced, stats = _run(loaded, prompts, target_step_time=0.0001, **plain)
    tokens, off = _run(loaded, prompts, **plain)
    assert paced == tokens
    assert paced != expected, "they are not drawn"
    assert stats.steps >= off.steps + 10
    assert stats.steps_over_target == stats.steps_with_decodes


@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize("decoder", ["transformers", "own"])
def test_every_mode_equals_generate(family: str, decoder: str) -> None:
    recipe = RECIPES[family]
    if not recipe.is_known:
        pytest.skip(f"this version of transformers has no {family} that is served")
    if decoder == "own" and recipe.config().model_type not in DESCRIBED:
        pytest.skip("our decoder does not know it")
    model = make_model(recipe.config(eos_token_id=None))
    prompts, sharing = make_prompts(LENGTHS), _sharing_prompts()
    expected = [greedy_reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    shared = [greedy_reference(model, prompt, NEW_TOKENS) for prompt in sharing]
    assert len({token for tokens in expected + shared for token in tokens}) >= 5, "it says nothing"
    loaded = from_model(model) if decoder == "transformers" else _with_our_decoder(model)
    _check_attention(loaded, recipe)
    few = _few_blocks(loaded)

    for mode in MODES:
        if mode == "together":
            tokens, _ = _run(loaded, prompts, num_blocks=128, max_batch_tokens=1024)
            assert tokens == expected, mode
        elif mode == "chunked":
            tokens, _ = _run(loaded, prompts, num_blocks=128, max_batch_tokens=BUDGET)
            assert tokens == expected, mode
        elif mode == "paced":
            _check_paced(loaded, prompts, expected)
        elif mode == "preempted":
            tokens, stats = _run(
                loaded, prompts, num_blocks=few, max_batch_tokens=BUDGET, allow_block_sharing=False
            )
            assert tokens == expected, mode
            assert stats.preemptions > 0
        elif mode == "prefix shared":
            tokens, stats = _run(
                loaded, sharing, one_by_one=True, num_blocks=128, max_batch_tokens=BUDGET
            )
            assert tokens == shared, mode
            assert stats.prefix_hits >= 3 * BLOCK
        elif mode == "offloaded":
            tokens, stats = _run(
                loaded, prompts, num_blocks=few, max_batch_tokens=BUDGET, cpu_offload_space=0.01
            )
            assert tokens == expected, mode
            assert stats.offloads > 0
            assert stats.restores > 0
        elif mode == "overlapped":
            tokens, _ = _run(
                loaded, prompts, num_blocks=few, max_batch_tokens=BUDGET, use_async_batching=True
            )
            assert tokens == expected, mode
        else:
            pytest.fail(f"no such mode: {mode}")


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
    with _manager(
        loaded, num_blocks=64, max_batch_tokens=BUDGET, allow_block_sharing=False
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
    actual, _ = _run(from_model(half), prompts, num_blocks=128, max_batch_tokens=BUDGET)
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
