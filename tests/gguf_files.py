"""GGUF files of tiny models, written by the `gguf` package, and what it reads back from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from transformers import PreTrainedModel

TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PLAIN = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
Kinds = Callable[[str], GGMLQuantizationType]
"""Chooses the type of a tensor by its name in the file."""


def all_of(name: str) -> Kinds:
    """Matrices of one type, and vectors as they are."""

    def kind(tensor: str) -> GGMLQuantizationType:
        is_matrix = "norm" not in tensor and tensor.endswith(".weight")
        return GGMLQuantizationType[name if is_matrix else "F32"]

    return kind


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    architecture: str,
    kind: Kinds,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Write a model with random weights, and return the weights that the file has in float32, by
    their names in the model. Types that the package cannot quantise to get random blocks.
    """
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_array(key, value)
    read = {}
    parts = PLAIN | (FOUR_NORMS if architecture.startswith("gemma") else {})
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = gguf_name(name, parts)
        weight = parameter.float().numpy()
        if architecture.startswith("gemma") and "norm" in name:
            weight = weight + 1
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(
            stored.split(".")[-2] if architecture == "llama" else ""
        )
        if heads:
            weight = into_pairs(weight, heads)
        blocks = quantize(weight, kind(stored))
        writer.add_tensor(stored, blocks, raw_dtype=kind(stored))
        values = gguf.quants.dequantize(blocks, kind(stored)).reshape(weight.shape)
        if heads:
            values = out_of_pairs(values, heads)
        if architecture.startswith("gemma") and "norm" in name:
            values = values - 1
        read[name] = torch.from_numpy(np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if config.tie_word_embeddings:
        read["lm_head.weight"] = read["model.embed_tokens.weight"]
    return read


def split_gguf(file: Path, folder: Path, stem: str, count: int) -> list[Path]:
    """Write a model's file again as several parts, the metadata in the first."""
    reader = gguf.GGUFReader(file)
    folder.mkdir()
    parts = []
    for part in range(count):
        parts.append(folder / f"{stem}-{part + 1:05}-of-{count:05}.gguf")
        writer = gguf.GGUFWriter(parts[-1], str(reader.fields["general.architecture"].contents()))
        for key, field in reader.fields.items():
            if part == 0 and not key.startswith("GGUF.") and key != "general.architecture":
                kind = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(key, field.contents(), field.types[0], kind)
        for tensor in reader.tensors[part::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


def gguf_name(name: str, parts: Mapping[str, str] = PLAIN) -> str:
    """The name in a file of a parameter."""
    module, _, kind = name.rpartition(".")
    if module in TOP:
        return f"{TOP[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{parts[part]}.{kind}"


def into_pairs(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """The rows of llama's queries or keys in the order in which files have them."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def out_of_pairs(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """The opposite of `into_pairs`."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def quantize(weight: npt.NDArray[Any], kind: GGMLQuantizationType) -> npt.NDArray[Any]:
    """Blocks of a weight, or random ones of about its size."""
    try:
        blocks: npt.NDArray[Any] = gguf.quants.quantize(weight, kind)
    except NotImplementedError:
        return random_blocks(weight.shape, kind, float(np.abs(weight).max()))
    return blocks


HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
          "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}  # fmt: skip
"""Where blocks have float16 scales and minima."""


def random_blocks(
    shape: tuple[int, ...], kind: GGMLQuantizationType, size: float = 1.0, seed: int = 0
) -> npt.NDArray[Any]:
    """Blocks of any bytes but for their scales, which are finite: uint8 [..., bytes of a row]."""
    elements, count = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // elements, count), np.uint8)
    largest = {"Q6_K": 128 * 32, "Q4_K": 63 * 15, "Q5_K": 63 * 31}.get(kind.name, 16)
    for at in HALVES[kind.name]:
        scales = generator.standard_normal((*blocks.shape[:-1], 1)) * size / largest
        blocks[..., at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
