"""Writes a checkpoint as a GPTQ file of 4 bits: symmetric, groups of 128, the output layer in 16.

    python -m benchmarks.gptq $(python -m benchmarks model qwen3-0.6b | tail -n 1) DIRECTORY

Weights are rounded to the nearest: the speed of such a file does not depend on how it was made.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BITS, GROUP = 4, 128
_PER_WORD = 32 // BITS
_ZERO = 1 << (BITS - 1)


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """Pack numbers, the first of a column in the lowest bits: [R, C] → int32 [R / 8, C]."""
    words = numbers.reshape(-1, _PER_WORD, numbers.shape[1]).long()
    total = sum(words[:, place] << (BITS * place) for place in range(_PER_WORD))
    assert isinstance(total, torch.Tensor)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def layer(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer, by the last part of their names. weight: [N, K]."""
    outputs, inputs = weight.shape
    grouped = weight.float().reshape(outputs, -1, GROUP)  # [N, G, 128]
    scales = (grouped.abs().amax(-1, keepdim=True) / (_ZERO - 1)).half()
    scales.clamp_(min=2**-24)
    codes = (grouped / scales.float()).round().add(_ZERO).clamp(0, 2 * _ZERO - 1)
    zeros = torch.full((outputs, inputs // GROUP), _ZERO - 1)  # the format stores one less
    return {
        "qweight": packed(codes.reshape(outputs, inputs).T.contiguous()),
        "qzeros": packed(zeros).T.contiguous(),
        "scales": scales.squeeze(-1).T.contiguous(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }


def write(model: Path, folder: Path) -> None:
    """Write a checkpoint's layers so, and the rest as it is, in float16."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            place, _, kind = name.rpartition(".")
            if kind == "weight" and place.endswith("_proj"):
                tensors |= {f"{place}.{part}": one for part, one in layer(tensor).items()}
            else:
                tensors[name] = tensor.half()
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(model, partial, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((partial / "config.json").read_text())
    config["dtype"] = "float16"
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": BITS,
        "group_size": GROUP,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    partial.rename(folder)


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:]))
