"""Tiny models whose rotary frequencies depend on the length."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedModel

from tests.model_recipes import RECIPES
from tests.tiny_models import greedy_reference, make_model

ORIGINAL = 64
"""Up to this many tokens they do not."""

_DYNAMIC: dict[str, Any] = {
    "max_position_embeddings": ORIGINAL,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
}
_LONG: dict[str, Any] = {
    "max_position_embeddings": 4 * ORIGINAL,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0 + 0.02 * step for step in range(8)],
        "long_factor": [1.0 + 0.7 * step for step in range(8)],
    },
}
_MSCALE = {"short_mscale": 1.1, "long_mscale": 1.3}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, dynamic": ("llama", _DYNAMIC),
    "llama, longrope": ("llama", _LONG),
    "qwen3, dynamic": ("qwen3", _DYNAMIC),
    "phi3, longrope": ("phi3", {**_LONG, "original_max_position_embeddings": ORIGINAL}),
    "phimoe, longrope": (
        "phimoe",
        {
            **_LONG,
            "original_max_position_embeddings": ORIGINAL,
            "rope_parameters": {**_LONG["rope_parameters"], **_MSCALE},
        },
    ),
    "gemma2, dynamic": ("gemma2", _DYNAMIC),
    "gemma3, dynamic for full layers": (
        "gemma3",
        {
            "max_position_embeddings": ORIGINAL,
            "rope_parameters": {
                "full_attention": _DYNAMIC["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}
"""By name: a recipe, and the settings of its config that are changed."""
_WHOLE = "next_sequence_length"
"""What Phi-3 resets where it computes all of a request again."""


def make_lengthened(name: str) -> PreTrainedModel:
    """One of MODELS, in float32, without an end of sequence."""
    family, settings = MODELS[name]
    return make_model(RECIPES[family].config(eos_token_id=None, **settings))


def alone(model: Any, prompt: list[int], count: int) -> list[int]:
    """What `generate` gives on a fresh model: it remembers the frequencies of the last request."""
    model = copy.deepcopy(model)
    prepare = model.prepare_inputs_for_generation.__func__.__code__
    if type(model).__name__.startswith("Phi") and _WHOLE not in prepare.co_consts:
        # Older versions of transformers drop the cache and then compute the last token alone.
        model.generation_config.use_cache = False
    return greedy_reference(model, prompt, count)
