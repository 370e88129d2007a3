"""What a model's config.json and generation_config.json would say, from a GGUF file's metadata.

Keys that are not known here may change what the model computes, so they are refused.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
from transformers import PreTrainedConfig

from engine.contract.errors import ModelRefusedError
from engine.loading.gguf.container import Container
from engine.loading.gguf.naming import architecture_of

_NUMBERS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Keys that every file has, after the architecture's name, and where they are in a config."""
_OTHERS = frozenset(
    {
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "vocab_size",
    }
)
_WHOLE = frozenset({"llama", "qwen2", "qwen3"})
"""Types of models whose configs have nothing that metadata lack."""
_REMEDY = "put the config.json of the model that it was made from beside it"


def config_of(container: Container) -> dict[str, Any]:
    """Return a file's config.

    Raises:
        ModelRefusedError: it cannot be told from the metadata.
    """
    return _Description(container).config()


def generation_config_of(container: Container) -> dict[str, Any]:
    """Return a file's generation config: the tokens at which it ends."""
    ends = [container.metadata.get(f"tokenizer.ggml.{one}_token_id") for one in ("eos", "eot")]
    ids = sorted({one for one in ends if isinstance(one, int)})
    return {"eos_token_id": ids} if ids else {}


def check_config(container: Container, config: PreTrainedConfig) -> None:
    """Refuse a text config beside a file that contradicts its metadata where shapes do not show it.

    Raises:
        ModelRefusedError: it is of another model.
    """
    name, file = container.metadata["general.architecture"], container.files[0]
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    told = {
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope.get("rope_theta"),
    }
    for key, value in told.items():
        found = container.metadata.get(f"{name}.{key}")
        if value is None or not isinstance(found, int | float):
            continue
        if not math.isclose(found, value, rel_tol=1e-6):
            raise ModelRefusedError(
                f"{file}: {name}.{key} is {found}, and config.json beside it says {value}: put the "
                "config.json of this file's model there, or take it away"
            )
    if "rope_freqs.weight" in container.tensors and rope.get("rope_type", "default") == "default":
        raise ModelRefusedError(
            f"{file}: rope_freqs.weight scales rotary positions, and config.json beside it does "
            f"not: {_REMEDY}"
        )


class _Description:
    """A file's metadata, with errors that name the file and the key."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._name = str(container.metadata.get("general.architecture"))

    def config(self) -> dict[str, Any]:
        tensors, metadata = self._container.tensors, self._container.metadata
        model_type = architecture_of(self._container).model_types[0]
        if model_type not in _WHOLE:
            self._refuse(f"metadata of {model_type} lack a part of its config")
        if "rope_freqs.weight" in tensors:
            self._refuse("rope_freqs.weight has factors of frequencies, but not what made them")
        for key in metadata:
            name = key.removeprefix(f"{self._name}.")
            if name != key and name not in _NUMBERS and name not in _OTHERS:
                self._refuse(f"{key} is not read here, and may change what the model computes")
        found = {field: self._number(key) for key, field in _NUMBERS.items()}
        layers = len({name.split(".")[1] for name in tensors if name.startswith("blk.")})
        if layers != found["num_hidden_layers"]:
            self._refuse(f"block_count is {found['num_hidden_layers']}, and it has {layers} layers")
        heads, width = found["num_attention_heads"], found["hidden_size"]
        head_dim = self._number("attention.key_length", width // max(1, int(heads)))
        if self._number("attention.value_length", head_dim) != head_dim:
            self._refuse("keys and values have different sizes")
        if self._number("rope.dimension_count", head_dim) != head_dim:
            self._refuse("only a part of a head is rotated")
        if "token_embd.weight" not in tensors:
            self._refuse("token_embd.weight is missing")
        rope = self._rope(found["max_position_embeddings"])
        return found | {
            "model_type": model_type,
            "architectures": [f"{model_type.capitalize()}ForCausalLM"],
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "tie_word_embeddings": "output.weight" not in tensors,
            **({} if model_type == "qwen2" else {"attention_bias": "blk.0.attn_q.bias" in tensors}),
            "rope_parameters": rope,
            "dtype": "bfloat16",
            "hidden_act": "silu",
            **{f"{one}_token_id": metadata.get(f"tokenizer.ggml.{one}_token_id")
               for one in ("bos", "eos")},
        }  # fmt: skip

    def _rope(self, context_length: float) -> dict[str, Any]:
        rope: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": self._number("rope.freq_base", 10_000.0),
        }
        if self._number("rope.scaling.attn_factor", 1.0) != 1:
            self._refuse("rope.scaling.attn_factor scales attention, which is not read here")
        kind = self._container.metadata.get(f"{self._name}.rope.scaling.type", "none")
        if kind == "none":
            return rope
        if kind not in ("linear", "yarn"):
            self._refuse(f"rotary positions are scaled by {kind!r}")
        rope |= {"rope_type": kind, "factor": self._number("rope.scaling.factor")}
        if kind == "yarn":
            original = self._number("rope.scaling.original_context_length", context_length)
            rope["original_max_position_embeddings"] = original
        return rope

    def _number(self, key: str, default: float | None = None) -> float:
        found = self._container.metadata.get(f"{self._name}.{key}", default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            self._refuse(f"{self._name}.{key} is {'missing' if found is None else 'no number'}")
        if not 0 < found < 1 << 31:  # nor is NaN
            self._refuse(f"{self._name}.{key} is {found}")
        # Numbers of files are float32: 1e-5 is not 9.999999747378752e-06.
        return found if isinstance(found, int) else float(str(np.float32(found)))

    def _refuse(self, why: str) -> NoReturn:
        raise ModelRefusedError(f"{self._container.files[0]}: {why}: {_REMEDY}")
