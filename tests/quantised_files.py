"""Writes tiny quantised checkpoints, from the layouts alone: no code of the engine is used.

Every number is packed by itself, in plain Python integers. The dequantised model that is returned
has the formula's weights, computed in float64.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.quantised_recipes import Recipe

AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Quantised:
    """A weight: codes and zeros are numbers, scales float64; by output, then input or group."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    group_of: np.ndarray

    def weight(self) -> np.ndarray:
        """The formula, in float64: [N, K]."""
        groups = self.group_of
        made: np.ndarray = (self.codes - self.zeros[:, groups]) * self.scales[:, groups]
        return made


def quantised(weight: np.ndarray, recipe: Recipe, seed: int) -> Quantised:
    """Round a weight [N, K] to what a file of the recipe can hold."""
    outputs, inputs = weight.shape
    group = inputs if recipe.group == -1 else recipe.group
    count = -(-inputs // group)
    group_of = np.arange(inputs) // group
    if recipe.desc_act:
        group_of = group_of[np.random.default_rng(seed).permutation(inputs)]
    most = 2**recipe.bits - 1
    scales, zeros = np.zeros((outputs, count)), np.zeros((outputs, count), dtype=np.int64)
    for number in range(count):
        part = weight[:, group_of == number]
        if recipe.symmetric:
            scale, zero = np.abs(part).max(1) / (most // 2), 2 ** (recipe.bits - 1)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = (high - low) / most
            scale = np.where(scale == 0, 1, scale)
            zero = np.clip(np.round(-low / scale), 0, most).astype(np.int64)
        scale = np.where(scale == 0, 1, scale)
        scales[:, number] = torch.tensor(scale).to(getattr(torch, recipe.scales)).double().numpy()
        zeros[:, number] = zero
    codes = np.round(weight / scales[:, group_of]) + zeros[:, group_of]
    return Quantised(np.clip(codes, 0, most).astype(np.int64), zeros, scales, group_of)


def word(numbers: list[int], bits: int, places: tuple[int, ...] = ()) -> int:
    """Pack numbers into an int32. places: which of them stands where, from the lowest bits."""
    total = 0
    for place in range(32 // bits):
        total |= int(numbers[places[place] if places else place]) << (bits * place)
    return total - (1 << 32) if total >= 1 << 31 else total


def packed_rows(numbers: np.ndarray, bits: int, places: tuple[int, ...] = ()) -> torch.Tensor:
    """Pack each row of numbers: [R, C] → int32 [R, C / per word]."""
    count = 32 // bits
    return torch.tensor(
        [
            [word(list(row[at : at + count]), bits, places) for at in range(0, len(row), count)]
            for row in numbers
        ],
        dtype=torch.int32,
    )


def tensors_of(one: Quantised, recipe: Recipe) -> dict[str, torch.Tensor]:
    """The tensors of a layer, by the last part of their names."""
    scales = torch.tensor(one.scales.T).to(getattr(torch, recipe.scales)).contiguous()
    if recipe.method == "awq":
        return {
            "qweight": packed_rows(one.codes.T, recipe.bits, AWQ_PLACES),
            "qzeros": packed_rows(one.zeros.T, recipe.bits, AWQ_PLACES),
            "scales": scales,
        }
    stored = (one.zeros - recipe.stores_less_one()) % 2**recipe.bits
    made = {
        "qweight": packed_rows(one.codes, recipe.bits).T.contiguous(),
        "qzeros": packed_rows(stored.T, recipe.bits),
        "scales": scales,
    }
    if recipe.has_g_idx:
        made["g_idx"] = torch.tensor(one.group_of, dtype=torch.int32)
    return made


def quantise(model: PreTrainedModel, folder: Path, recipe: Recipe) -> PreTrainedModel:
    """Save a model as a quantised checkpoint, and return the dequantised one, float32.

    Other weights are rounded to the file's type: that of the model's config.
    """
    right = copy.deepcopy(model).float()
    kept: torch.dtype = getattr(torch, recipe.scales)
    tensors = {name: one.to(kept) for name, one in right.state_dict().items()}
    if right.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    linears = {
        name: one
        for name, one in right.named_modules()
        if isinstance(one, torch.nn.Linear) and (name != "lm_head" or recipe.lm_head)
    }
    with torch.no_grad():
        for one in right.state_dict().values():
            one.copy_(one.to(kept))
        for seed, (name, linear) in enumerate(linears.items()):
            found = quantised(linear.weight.double().numpy(), recipe, seed)
            tensors.pop(f"{name}.weight", None)
            tensors |= {f"{name}.{part}": one for part, one in tensors_of(found, recipe).items()}
            if recipe.biases and linear._parameters["bias"] is None:
                tensors[f"{name}.bias"] = torch.zeros(len(linear.weight), dtype=kept)
            linear.weight = torch.nn.Parameter(torch.tensor(found.weight(), dtype=torch.float32))
    model.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, lambda config: config.update(
        quantization_config=recipe.quantization_config(), dtype=recipe.scales
    ))  # fmt: skip
    right.eval()
    return right


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Write the file again, changed."""
    file = folder / "model.safetensors"
    tensors = {name: one.clone() for name, one in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
