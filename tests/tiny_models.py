"""Tiny random models, float32, one recipe a family: what `model.generate` is compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.model_recipes import CONTEXT, RECIPES, VOCAB, WINDOW

__all__ = [
    "CONTEXT",
    "FAMILIES",
    "VOCAB",
    "WINDOW",
    "greedy_reference",
    "make_model",
    "make_prompts",
]

FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {
    name: recipe.config for name, recipe in RECIPES.items()
}


def make_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with random float32 weights, large enough that outputs differ between prompts."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    return enlarged(model)


def enlarged(model: torch.nn.Module) -> PreTrainedModel:
    """A model with its weights four times as large."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in name:
                parameter.mul_(4.0)
    model.eval()
    assert isinstance(model, PreTrainedModel)
    return model


def make_prompts(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    """Random prompts without special ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def greedy_reference(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """What `model.generate` gives, with its eager attention, alone."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    finally:
        model.set_attn_implementation(before)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
