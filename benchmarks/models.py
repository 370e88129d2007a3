"""Checkpoints with random weights and true shapes: speed does not depend on what weights say.

They are made into a cache folder outside the repository, with a byte-level tokenizer of the
vocabulary's size: prompts are given as token ids, but servers want a tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
    },
    "tiny": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 768,
        "vocab_size": 4096,
        "max_position_embeddings": 8192,
        "rope_theta": 1e6,
    },
}
"""All are Qwen3 with tied embeddings."""

DEMO = Path(__file__).resolve().parent.parent / "models" / "demo"
WEIGHT_SPREAD = 2.0
"""Times the library's initial weights, of the layers' matrices: with those, outputs are few tokens,
repeated; with more, bfloat16's rounding grows from layer to layer until the tokens say nothing.
"""


def make_model(name: str, folder: Path, seed: int = 0) -> None:
    """Write a checkpoint of a named shape, bfloat16; the same for the same seed."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape = dict(SHAPES[name])
    config = Qwen3Config(
        **{key: value for key, value in shape.items() if key != "rope_theta"},
        rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="bfloat16",
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in parameter_name:
                parameter.mul_(WEIGHT_SPREAD)
    partial = folder.with_name(folder.name + ".partial")
    model.to(torch.bfloat16).save_pretrained(partial)
    _write_tokenizer(partial, shape["vocab_size"])
    partial.rename(folder)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer; ids that no byte has are names that no text has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>"]
    names = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [f"<{number}>" for number in range(len(names), vocab_size)]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "pad_token": "<pad>",
                "bos_token": "<s>",
                "eos_token": "</s>",
            },
            indent=2,
        )
    )
