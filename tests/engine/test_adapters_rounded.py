"""Adapters on bases of bfloat16 and of integers: tokens are judged by the merged float32 model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedConfig, PreTrainedModel

from engine.api.offline import LoadedModel
from engine.contract.config import LoadConfig
from engine.loading.adapters.adapter_loading import load_adapters
from engine.loading.loader import verify_model
from engine.models.formats.grouped import Grouped
from engine.models.formats.int4 import Int4
from engine.models.formats.int8 import Int8
from engine.models.formats.native import Native
from engine.models.formats.registry import Format
from engine.models.low_rank import LowRankPart
from tests.adapter_files import PeftAdapter, linear_targets
from tests.engine.mode_sweep import NEW_TOKENS, load_family, run
from tests.model_recipes import RECIPES
from tests.near_ties import check_greedy
from tests.tiny_models import make_model, make_prompts

ENOUGH, NEAR = 0.94, 0.2
"""Of the tokens, and of the logits' deviation. Without an adapter these models have 0.95 to 0.99
and up to 0.03 by our kernels in bfloat16.
"""
FORMATS: tuple[Format, ...] = (Native, Int8, Int4)
OWN = ("llama", "qwen3", "gemma2", "gemma3", "phi3", "qwen2", "olmo2", "cohere")
"""Without mixtral: a near-tie of its random router takes another expert, with an adapter or not."""
LENGTHS = (33, 90, 3, 130, 64, 65, 17, 40, 12, 8, 25, 50, 77, 31, 29, 5)
MODES: dict[str, dict[str, Any]] = {
    "together": {"num_blocks": 128},
    "chunked": {"num_blocks": 128, "max_batch_tokens": 63},
    "preempted": {"num_blocks": 24, "max_batch_tokens": 63},
}


def with_adapter(
    config: PreTrainedConfig, weights: dict[str, torch.Tensor], adapter: PeftAdapter
) -> PeftModel:
    """A model with these weights, in float32, and the adapter, by peft."""
    base = make_model(config)
    base.load_state_dict(weights)
    with warnings.catch_warnings():  # peft calls what transformers has renamed
        warnings.simplefilter("ignore", FutureWarning)
        return PeftModel.from_pretrained(base, str(adapter.directory)).eval()


def weights_of(served: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What is served, in float32. A state dict has bfloat16 even of integers."""
    weights = {name: one.float() for name, one in served.state_dict().items()}
    for name, layer in served.named_modules():
        held = getattr(layer, "held", None)
        if isinstance(held, Grouped):
            found = held.codes(torch.arange(held.shape[0]))
            scales = found.scales.repeat_interleave(held.group, dim=1)[:, : held.shape[1]]
            weights[f"{name}.weight"] = (found.codes.float() - 2 ** (held.bits - 1)) * scales
    return weights


def check_rounded(family: str, how: Format, folder: Path) -> None:
    """In each mode the tokens of every adapter are the greedy ones of the model that it makes."""
    config = RECIPES[family].config(eos_token_id=None)
    served = make_model(config).to(torch.bfloat16)
    adapters = {
        f"a{i}": PeftAdapter(
            served.float(), folder / f"a{i}", seed=i, r=(8, 3)[i],
            dtype=(torch.bfloat16, torch.float32)[i], target_modules=linear_targets(served)[i:],
        )
        for i in range(2)
    }  # fmt: skip
    served.to(torch.bfloat16)
    verified = verify_model(served, Path(), lambda line: None, packing=how, own_decoder=True)
    assert verified.decoder is not None
    names = tuple(f"{name}={one.directory}" for name, one in adapters.items())
    load_adapters(verified, LoadConfig(adapters=names), lambda line: None)
    loaded, prompts = LoadedModel(verified), make_prompts(LENGTHS)
    for name, adapter in adapters.items():
        judge = with_adapter(config, weights_of(served), adapter).merge_and_unload()
        outputs = []
        for mode in MODES.values():
            tokens, _ = run(loaded, prompts, adapter=name, **mode)
            outputs += zip(prompts, tokens, strict=True)
        check_greedy(judge, outputs, enough=ENOUGH, near=NEAR)


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("family", OWN)
def test_tokens_are_those_of_the_merged_model(family: str, how: Format, tmp_path: Path) -> None:
    check_rounded(family, how, tmp_path)


@pytest.mark.parametrize("how", FORMATS)
def test_a_scale_that_is_ignored_is_met(
    how: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LowRankPart.for_kernels

    def faulty(part: LowRankPart, column: int = 0) -> Any:
        made = plain(part, column)
        made.scale = 1.0
        return made

    monkeypatch.setattr(LowRankPart, "for_kernels", faulty)
    with pytest.raises(AssertionError):
        check_rounded("llama", how, tmp_path)


@pytest.mark.slow
def test_two_hundred_at_a_time(tmp_path: Path) -> None:
    """One request of each, all at once: each gets what peft generates with its adapter alone."""
    _, loaded, _ = load_family("qwen3", "own")
    model = make_model(RECIPES["qwen3"].config(eos_token_id=None))
    targets = linear_targets(model)
    adapters = {
        f"a{i}": PeftAdapter(
            model, tmp_path / f"a{i}", seed=i, r=1 + i % 8, target_modules=targets[i % 4 :]
        )
        for i in range(200)
    }
    names = tuple(f"{name}={one.directory}" for name, one in adapters.items())
    load_adapters(loaded._verified, LoadConfig(adapters=names), lambda line: None)
    prompts = make_prompts(tuple(5 + i % 40 for i in range(200)))
    found = loaded.generate_batch(
        prompts, adapter=list(adapters), max_new_tokens=NEW_TOKENS, progress_bar=False
    )
    tokens = [list(one.generated_tokens) for one in found.values()]
    expected = [
        one.generate(prompt, NEW_TOKENS)
        for one, prompt in zip(adapters.values(), prompts, strict=True)
    ]
    assert tokens == expected
    assert len({tuple(one) for one in tokens}) > 190
