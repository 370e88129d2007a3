"""LoRA adapters with random weights, in peft's form, for a checkpoint of any shape.

Also runs in the interpreters of peers that have torch and safetensors.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.floors import tensor_shapes

RANK = 16
_LAYER = re.compile(r"(?:.*\.)?layers\.\d+\..*?(\w+_proj)\.weight")


def adapter_folders(model: Path, cache: Path | str, count: int) -> dict[str, Path]:
    """Return the folders of adapters of rank `RANK` on all projections of a checkpoint's layers, by
    name. Those that do not exist are made.
    """
    folders = {f"a{i}": Path(cache) / "adapters" / model.name / str(i) for i in range(count)}
    for seed, folder in enumerate(folders.values()):
        if not (folder / "adapter_model.safetensors").is_file():
            _write(model, folder, seed)
    return folders


def _write(model: Path, folder: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(seed)
    tensors, targets = {}, set()
    for name, shape in tensor_shapes(model).items():
        found = _LAYER.fullmatch(name)
        if found is None:
            continue
        targets.add(found[1])
        outputs, inputs = shape
        base = f"base_model.model.{name.removesuffix('.weight')}"
        a = torch.randn(RANK, inputs, generator=draw) * inputs**-0.5
        b = torch.randn(outputs, RANK, generator=draw) * 0.02
        tensors[f"{base}.lora_A.weight"] = a.bfloat16()
        tensors[f"{base}.lora_B.weight"] = b.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": sorted(targets),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
