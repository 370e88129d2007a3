"""Shapes of families: few layers, each as wide as a released model's (`benchmarks.decoder`).

The vocabulary is reduced, too, so that the layers have about the same share of the weights as in
the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.models import make_random

_COMMON: dict[str, Any] = {
    "vocab_size": 16384,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A family's shape.

    Attributes:
        like: the released model.
        model_type: transformers' name of the family.
        sizes: the hidden size, the MLP's size, and the numbers of layers, heads, and KV heads; or
            the first of these.
        settings: other settings of its config.
        aim: the target speed of decoding, relative to the baseline.
    """

    like: str
    model_type: str
    sizes: tuple[int, ...]
    settings: dict[str, Any]
    aim: float = 0.97

    @property
    def about(self) -> str:
        """Describe the shape for the table."""
        hidden, _, layers, *_ = self.sizes
        return f"{self.like}, {layers} layer{'s' if layers > 1 else ''} of {hidden:,}"

    def config(self) -> dict[str, Any]:
        """The settings of its config."""
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        sizes = dict(zip((*names, "num_key_value_heads"), self.sizes, strict=False))
        return {**_COMMON, **sizes, **self.settings}

    def checkpoint(self, folder: Path) -> Path:
        """Return a folder with a checkpoint of this shape, which is made if it does not exist."""
        return make_random(folder, self.model_type, self.config())


_TIED = {"tie_word_embeddings": True}
_OWN_OUTPUT = {"tie_word_embeddings": False}
_WINDOW = {"sliding_window": 4096}
_ATTENDING = (2, 5, 8, 10, 12, 14)
"""The layers of LFM2 that attend."""
_BY_TURNS = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, dict[str, Family]] = {
    "families": {
        "gemma2": Family(
            "2B", "gemma2", (2304, 9216, 4, 8, 4), {"head_dim": 256, **_WINDOW, **_TIED}, 1.2
        ),
        "gemma3": Family(
            "1B",
            "gemma3_text",
            (1152, 6912, 6, 4, 1),
            {"head_dim": 256, "sliding_window": 512, **_TIED},
            1.2,
        ),
        "olmo2": Family("1B", "olmo2", (2048, 8192, 4, 16, 16), _OWN_OUTPUT, 1.2),
        "granite": Family(
            "3.3 2B",
            "granite",
            (2048, 8192, 4, 32, 8),
            {
                "embedding_multiplier": 12.0,
                "attention_multiplier": 0.015625,
                "residual_multiplier": 0.22,
                "logits_scaling": 8.0,
                **_TIED,
            },
            1.2,
        ),
        "llama": Family("3.2 1B", "llama", (2048, 8192, 4, 32, 8), {"head_dim": 64, **_TIED}),
        "qwen3": Family("1.7B", "qwen3", (2048, 6144, 4, 16, 8), {"head_dim": 128, **_TIED}),
        "phi3": Family("mini", "phi3", (3072, 8192, 3, 32, 32), _OWN_OUTPUT),
        "cohere2": Family(
            "command-r7b", "cohere2", (4096, 14336, 2, 32, 8), {**_BY_TURNS, **_TIED}
        ),
        "starcoder2": Family("3B", "starcoder2", (3072, 12288, 3, 24, 2), {**_WINDOW, **_TIED}),
        "glm4": Family("9B", "glm4", (4096, 13696, 2, 32, 2), {"head_dim": 128, **_OWN_OUTPUT}),
    },
    "experts": {
        "mixtral": Family(
            "8x7B with experts of a quarter", "mixtral", (4096, 3584, 2, 32, 8), _OWN_OUTPUT
        ),
        "qwen3_moe": Family(
            "30B-A3B",
            "qwen3_moe",
            (2048, 6144, 2, 32, 4),
            {
                "head_dim": 128,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "norm_topk_prob": True,
                **_OWN_OUTPUT,
            },
        ),
        "olmoe": Family(
            "1B-7B",
            "olmoe",
            (2048, 1024, 2, 16, 16),
            {"num_experts": 64, "num_experts_per_tok": 8, **_OWN_OUTPUT},
        ),
    },
    "more": {
        "gemma": Family("2B", "gemma", (2048, 16384, 3, 8, 1), {"head_dim": 256, **_TIED}),
        "mistral": Family("7B", "mistral", (4096, 14336, 2, 32, 8), {"sliding_window": None}),
        "qwen2": Family("1.5B", "qwen2", (1536, 8960, 4, 12, 2), _TIED),
        "olmo3": Family("7B", "olmo3", (4096, 11008, 2, 32, 32), {**_BY_TURNS, **_OWN_OUTPUT}, 1.0),
        "smollm3": Family("3B", "smollm3", (2048, 11008, 4, 16, 4), _TIED),
        "cohere": Family("c4ai-command-r", "cohere", (8192, 22528, 1, 64, 64), _TIED),
        "glm": Family("4 9B", "glm", (4096, 13696, 2, 32, 2), {"head_dim": 128, **_OWN_OUTPUT}),
        "helium": Family("1 2B", "helium", (2560, 7040, 4, 20, 20), {"head_dim": 128}),
        "exaone4": Family(
            "1.2B",
            "exaone4",
            (2048, 4096, 4, 32, 8),
            {"sliding_window": None, "layer_types": ["full_attention"] * 4, **_TIED},
        ),
    },
    "recurrent": {
        "qwen3_5": Family(
            "0.8B, whole",
            "qwen3_5_text",
            (1024, 3584, 24, 8, 2),
            {
                "vocab_size": 248320,
                "head_dim": 256,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 16,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                **_TIED,
            },
            1.0,
        ),
        "lfm2": Family(
            "700M, whole",
            "lfm2",
            (1536, 6912, 16, 24, 8),
            {
                "vocab_size": 65536,
                "layer_types": [
                    "full_attention" if layer in _ATTENDING else "conv" for layer in range(16)
                ],
                **_TIED,
            },
            1.0,
        ),
    },
}
"""The families, by the part of the record."""
