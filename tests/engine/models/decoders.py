"""Tiny models for our decoder, the load gate before it, and a judge of what it yields."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.api.offline import LoadedModel
from engine.contract.errors import ModelRefusedError
from engine.loading.loader import verify_model
from engine.loading.verified import VerifiedModel
from engine.models.formats.native import Native
from engine.models.formats.registry import Format
from engine.models.table import FAMILIES as DESCRIBED
from tests.model_recipes import RECIPES
from tests.tiny_models import FAMILIES, make_model, make_prompts

OURS = [
    name
    for name, recipe in RECIPES.items()
    if recipe.is_known and recipe.config().model_type in DESCRIBED
]
"""The recipes of families that our decoder knows."""
ATTENDING = [
    name for name in OURS if DESCRIBED[RECIPES[name].config().model_type].recurrence is None
]
"""Those without recurrent layers, which it also computes in torch."""


_GAPS = {"gpt_oss": 0.22}
"""Where an expert is chosen by a hair: the model's own code in bfloat16 is as far from float32."""


def most_gap(family: str) -> float:
    """How far a token of a family's tiny model in bfloat16 may be below the most likely one."""
    return _GAPS.get(family, 0.15)


PROMPTS = make_prompts((1, 37, 3, 40))
NEW = 9


def make(name: str = "qwen3", seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A tiny model in bfloat16 whose norms and biases are not all alike."""
    model = make_model(FAMILIES[name](**settings), seed).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * (0.3 if "norm" in parameter_name else 0.1))
    return model


def verify(
    model: PreTrainedModel, packing: Format | None = Native, lines: list[str] | None = None
) -> VerifiedModel:
    """Through the load gate, with our decoder if it can be."""
    told = [] if lines is None else lines
    return verify_model(model, Path(), told.append, packing=packing, own_decoder=True)


def generate(verified: VerifiedModel, **options: Any) -> list[list[int]]:
    """The tokens of PROMPTS."""
    outputs = LoadedModel(verified).generate_batch(
        PROMPTS, max_new_tokens=NEW, eos_token_id=-1, progress_bar=False, **options
    )
    found = [outputs[f"req_{index}"] for index in range(len(PROMPTS))]
    assert not any(one.error for one in found)
    return [list(one.generated_tokens) for one in found]


def difference(model: PreTrainedModel, verify: Callable[..., VerifiedModel] = verify) -> str:
    """What the comparison says. It ends the load if weights are not what they were; otherwise the
    model's own modules run, if the gate lets them.
    """
    lines: list[str] = []
    begins = f"our decoder does not compute this {model.config.model_type} as the model does: "
    text = ""
    try:
        assert verify(model, lines=lines).decoder is None
    except ModelRefusedError as error:
        text = str(error)
    said = [line for line in lines if line.startswith("decoder: ")]
    if said:
        text = said[0].removeprefix("decoder: transformers', because ")
    assert text.startswith(begins)
    of_weights = r"embedding|[\w. ,]*(projection|output|inner|down|lm_head)[ ,]"
    assert bool(said) != bool(re.match(of_weights, text.removeprefix(begins)))
    return text


def _gaps(judge: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """How far each token is from the judge's most likely one, in deviations of the logits."""
    with torch.inference_mode():
        logits = judge(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    gaps: torch.Tensor = (logits.max(dim=-1).values - chosen) / logits.std(dim=-1)
    return gaps
