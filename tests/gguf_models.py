"""Tiny models of every architecture that is served from GGUF files, and such files of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from tokenizers import pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.gguf_files import Kinds, write_gguf
from tests.tiny_models import make_model

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<|end|>", *ALPHABET, "Ġt", "he"]
VOCABULARY = len(TOKENS)
METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] + [1] * (VOCABULARY - 1),
    "tokenizer.ggml.merges": ["Ġ t", "h e"],
    "tokenizer.ggml.eos_token_id": 0,
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "bos_token_id": None,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, head_dim=64, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=128, tie_word_embeddings=True),
    "phi3": Phi3Config(**SIZES),
    "gemma2": Gemma2Config(**SIZES, head_dim=64, sliding_window=32, query_pre_attn_scalar=64),
    "gemma3": Gemma3TextConfig(
        **SIZES, head_dim=64, sliding_window=32, query_pre_attn_scalar=64,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip
LONE = ("llama", "qwen2", "qwen3")


def architecture(name: str) -> str:
    return {"mistral": "llama"}.get(name, name)


def mixed(tensor: str) -> GGMLQuantizationType:
    """As in files called Q4_K_M: some matrices have more bits, and the tables are Q6_K."""
    if "norm" in tensor or tensor.endswith(".bias"):
        return GGMLQuantizationType.F32
    more = any(part in tensor for part in ("attn_v", "ffn_down", "token_embd", "output.weight"))
    return GGMLQuantizationType.Q6_K if more else GGMLQuantizationType.Q4_K


def write(
    folder: Path, name: str, kind: Kinds = mixed, **changes: Any
) -> tuple[Path, PreTrainedModel]:
    """A file, and the model with its weights in float32."""
    model = make_model(CONFIGS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases that are not all alike
                parameter += 0.1 * torch.randn_like(parameter)
    folder.mkdir(exist_ok=True)
    file = folder / "model.gguf"
    metadata = {key: one for key, one in {**METADATA, **changes}.items() if one is not None}
    weights = write_gguf(file, model, architecture(name), kind, metadata)
    model.load_state_dict(weights)
    if name not in LONE:
        config = model.config.to_dict()
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return file, model
