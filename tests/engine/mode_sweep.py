"""A sweep through the modes of tests/model_recipes.py: in each, the engine must serve what a tiny
model generates alone, eagerly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from engine.api.manager import ContinuousBatchingManager
from engine.api.offline import LoadedModel, from_model
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.request import RequestStatus
from engine.contract.stats import EngineStats
from engine.kv_cache.group_kinds import SlidingAttention
from engine.loading.loader import verify_model
from engine.models.formats.native import Native
from engine.models.table import FAMILIES as DESCRIBED
from tests.model_recipes import MODES, RECIPES, WINDOW, Attention
from tests.tiny_models import greedy_reference, make_model, make_prompts

BLOCK = 8
BUDGET = 48
LENGTHS = (33, 90, 3, 130)
NEW_TOKENS = 12
Tokens = list[list[int]]


def sharing_prompts() -> Tokens:
    """A prefix of five blocks and a half in common; one that ends with it, one that is the same."""
    (prefix,) = make_prompts((5 * BLOCK + 4,), seed=5)
    tails = make_prompts((7, 30), seed=6)
    return [prefix + tails[0], prefix + tails[1], list(prefix), prefix + tails[1]]


@contextmanager
def managed(loaded: LoadedModel, **options: Any) -> Iterator[ContinuousBatchingManager]:
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
    assert kv_cache.state_figures()["states_used"] == 0


def run(
    loaded: LoadedModel,
    prompts: Tokens,
    *,
    one_by_one: bool = False,
    sampling: dict[str, Any] | None = None,
    adapter: str | None = None,
    **options: Any,
) -> tuple[Tokens, EngineStats]:
    """The generated tokens of each prompt. `sampling`: of the requests; None: greedy.
    `adapter`: what they name.
    """
    results: dict[str, list[int]] = {}
    names: list[str] = []
    with managed(loaded, **options) as manager:

        def take() -> None:
            output = manager.get_result(timeout=60)
            assert output is not None
            assert output.status is RequestStatus.FINISHED, output.error
            results[output.request_id] = list(output.generated_tokens)

        # All at once: added one after the other, the first may be over before the last comes.
        for group in [[prompt] for prompt in prompts] if one_by_one else [prompts]:
            given = {"adapter": adapter, **(sampling or {})}
            names += manager.add_requests(group, max_new_tokens=NEW_TOKENS, **given)
            if one_by_one:
                take()
        while len(results) < len(prompts):
            take()
        stats = manager.stats()
    return [results[name] for name in names], stats


def _few_blocks(loaded: LoadedModel) -> int:
    """As many as the longest prompt needs alone."""
    windows = [shape.window for shape in loaded._verified.probe.shapes.values()]
    sliding = [window for window in windows if window is not None]
    if len(sliding) == len(windows) and sliding:
        return max(SlidingAttention(one).most_blocks(10**9, BUDGET, BLOCK) for one in sliding)
    return -(-(max(LENGTHS) + NEW_TOKENS) // BLOCK)


def _check_attention(loaded: LoadedModel, attention: Attention) -> None:
    windows = {shape.window for shape in loaded._verified.probe.shapes.values()}
    seen = "full" if windows == {None} else "sliding and full" if None in windows else "sliding"
    seen = seen if windows else "none"
    assert seen == attention
    assert windows <= {None, WINDOW}


def _check_paced(
    loaded: LoadedModel, prompts: Tokens, expected: Tokens, more: dict[str, Any]
) -> None:
    """With a target that hardly any step meets, and one that none does: what stands beside a
    decode is cut, mostly to a block.
    """
    plain: dict[str, Any] = {"num_blocks": 128, "max_batch_tokens": BUDGET, **more}
    tokens, _ = run(loaded, prompts, target_step_time=0.001, **plain)
    assert tokens == expected
    plain |= {"sampling": {"temperature": 1.0, "seed": 7}, "per_request_processors": True}
    paced, stats = run(loaded, prompts, target_step_time=0.0001, **plain)
    tokens, off = run(loaded, prompts, **plain)
    assert paced == tokens
    assert paced != expected, "they are not drawn"
    assert stats.steps >= off.steps + 10
    assert stats.steps_over_target == stats.steps_with_decodes


def load_family(family: str, decoder: str) -> tuple[PreTrainedModel, LoadedModel, Attention]:
    """A family's tiny model, itself and loaded, and its attention. Skips what does not exist.

    decoder: "own" packs the model's linear layers and runs our decoder.
    """
    recipe = RECIPES[family]
    if not recipe.is_known:
        pytest.skip(f"this version of transformers has no {family} that is served")
    if decoder == "own" and recipe.config().model_type not in DESCRIBED:
        pytest.skip("our decoder does not know it")
    model = make_model(recipe.config(eos_token_id=None))
    if decoder == "transformers":
        return model, from_model(model), recipe.attention
    verified = verify_model(model, Path(), lambda line: None, packing=Native, own_decoder=True)
    assert verified.decoder is not None
    return model, LoadedModel(verified), recipe.attention


def check_every_mode(
    model: PreTrainedModel,
    loaded: LoadedModel,
    attention: Attention,
    adapter: str | None = None,
    **more: Any,
) -> None:
    """Serve prompts in each mode.

    Args:
        model: what `generate` is asked of.
        loaded: what the engine runs.
        attention: what its layers do.
        adapter: what the requests name.
        more: options of all modes, with which requests may end before blocks run out.
    """
    prompts, sharing = make_prompts(LENGTHS), sharing_prompts()
    expected = [greedy_reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    shared = [greedy_reference(model, prompt, NEW_TOKENS) for prompt in sharing]
    assert len({token for tokens in expected + shared for token in tokens}) >= 5, "it says nothing"
    _check_attention(loaded, attention)
    few = _few_blocks(loaded)
    own = {"adapter": adapter, **more}
    is_roomy = bool(more) or attention == "none"  # blocks may not run out

    for mode in MODES:
        if mode == "together":
            tokens, _ = run(loaded, prompts, num_blocks=128, max_batch_tokens=1024, **own)
            assert tokens == expected, mode
        elif mode == "chunked":
            tokens, _ = run(loaded, prompts, num_blocks=128, max_batch_tokens=BUDGET, **own)
            assert tokens == expected, mode
        elif mode == "paced":
            _check_paced(loaded, prompts, expected, own)
        elif mode == "preempted":
            tokens, stats = run(
                loaded,
                prompts,
                num_blocks=few,
                max_batch_tokens=BUDGET,
                allow_block_sharing=False,
                **own,
            )
            assert tokens == expected, mode
            assert stats.preemptions > 0 or is_roomy
        elif mode == "prefix shared":
            tokens, stats = run(
                loaded, sharing, one_by_one=True, num_blocks=128, max_batch_tokens=BUDGET, **own
            )
            assert tokens == shared, mode
            assert stats.prefix_hits >= 3 * BLOCK
        elif mode == "offloaded":
            tokens, stats = run(
                loaded,
                prompts,
                num_blocks=few,
                max_batch_tokens=BUDGET,
                cpu_offload_space=0.01,
                **own,
            )
            assert tokens == expected, mode
            assert (stats.offloads > 0 and stats.restores > 0) or is_roomy
        elif mode == "overlapped":
            tokens, _ = run(
                loaded,
                prompts,
                num_blocks=few,
                max_batch_tokens=BUDGET,
                use_async_batching=True,
                **own,
            )
            assert tokens == expected, mode
        else:
            pytest.fail(f"no such mode: {mode}")
