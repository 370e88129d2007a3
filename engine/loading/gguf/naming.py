"""Which weight of transformers' model each tensor of a GGUF file is, and how its rows lie.

Two things are stored otherwise: llama's queries and keys have the rows of a head in pairs, as the
rotary embedding of its authors takes them, and gemma's norms are stored plus 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.contract.errors import ModelRefusedError
from engine.loading.gguf.container import Container, Tensor

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PLAIN = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_JOINED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors whose contents the config has, too."""
_OF_MODEL = re.compile(r"(\w+)\.(weight|bias)")
_OF_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the names of an architecture mean.

    Attributes:
        model_types: the types of transformers' configs that it stands for; the first is written.
        layer: the names of a layer's tensors and modules.
        has_pairs: whether rows of queries and keys are in pairs.
        norms_from_one: whether norms are stored plus 1.
    """

    model_types: tuple[str, ...]
    layer: Mapping[str, str]
    has_pairs: bool = False
    norms_from_one: bool = False


ARCHITECTURES = {
    "llama": Architecture(("llama", "mistral"), _PLAIN, has_pairs=True),
    "qwen2": Architecture(("qwen2",), _PLAIN),
    "qwen3": Architecture(("qwen3",), _PLAIN | _HEAD_NORMS),
    "phi3": Architecture(("phi3",), _PLAIN | _JOINED),
    "gemma2": Architecture(("gemma2",), _PLAIN | _FOUR_NORMS, norms_from_one=True),
    "gemma3": Architecture(
        ("gemma3_text",), _PLAIN | _FOUR_NORMS | _HEAD_NORMS, norms_from_one=True
    ),
}


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor as a parameter of transformers' model.

    Attributes:
        name: the parameter's name.
        tensor: the tensor.
        order: int64 [N], the row of the tensor that is each output. None if they are the same.
        is_from_one: whether 1 has been added to the elements.
    """

    name: str
    tensor: Tensor
    order: torch.Tensor | None = None
    is_from_one: bool = False

    def elements(self) -> torch.Tensor:
        """Return the elements of a tensor that is not quantised, in the mapping if they are there
        as they are.
        """
        kind, data = self.tensor.kind, self.tensor.data
        if kind.dtype is None:
            raise TypeError(f"{self.tensor.name} is quantised")
        elements = data.view(kind.dtype).view(self.tensor.shape)
        if self.is_from_one:
            elements = elements.float() - 1
        return elements if self.order is None else elements[self.order]


def architecture_of(container: Container) -> Architecture:
    """Return what a file's names mean.

    Raises:
        ModelRefusedError: the architecture is not served from GGUF files.
    """
    name = container.metadata.get("general.architecture")
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        raise ModelRefusedError(
            f"{container.files[0]}: the architecture is {name!r}, and from GGUF files "
            f"{', '.join(ARCHITECTURES)} are served: give the directory of the model that it was "
            "made from, with config.json and *.safetensors"
        )
    return found


def weights_of(container: Container, num_heads: int, num_kv_heads: int) -> dict[str, Weight]:
    """Return the weights of a file, by the names that transformers has for them.

    Args:
        container: the file.
        num_heads, num_kv_heads: of the model's config.

    Raises:
        ModelRefusedError: the file has other tensors.
    """
    architecture = architecture_of(container)
    found = {}
    for tensor in container.tensors.values():
        if tensor.name in _IGNORED:
            continue
        name, part = _name(tensor, architecture)
        order = None
        if architecture.has_pairs and part in ("attn_q", "attn_k"):
            order = _out_of_pairs(tensor, num_heads if part == "attn_q" else num_kv_heads)
        is_from_one = architecture.norms_from_one and part.endswith("_norm")
        found[name] = Weight(name, tensor, order, is_from_one)
    return found


def _name(tensor: Tensor, architecture: Architecture) -> tuple[str, str]:
    """Return a parameter's name, and the part of the tensor's name that says what it is."""
    if (found := _OF_MODEL.fullmatch(tensor.name)) and found[1] in _TOP:
        return f"{_TOP[found[1]]}.{found[2]}", found[1]
    if (found := _OF_LAYER.fullmatch(tensor.name)) and found[2] in architecture.layer:
        return f"model.layers.{found[1]}.{architecture.layer[found[2]]}.{found[3]}", found[2]
    raise ModelRefusedError(
        f"{tensor.file}: {tensor.name[:80]!r} is no tensor of {architecture.model_types[0]} that "
        "is read here: give the directory of the model that the file was made from, with "
        "config.json and *.safetensors"
    )


def _out_of_pairs(tensor: Tensor, heads: int) -> torch.Tensor:
    rows = tensor.shape[0]
    if heads < 1 or rows % (2 * heads):
        raise ModelRefusedError(
            f"{tensor.file}: {tensor.name!r} has {rows} rows, which are not {heads} heads; put the "
            "config.json of this file's model beside it"
        )
    pairs = torch.arange(rows).view(heads, -1, 2)
    return pairs.transpose(1, 2).reshape(-1)
