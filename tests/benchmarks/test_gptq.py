"""The GPTQ file that is measured: its numbers are those of the tests' own packer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from benchmarks.gptq import layer, write
from benchmarks.models import make_model
from engine.api.offline import load
from tests.quantised_files import quantised, tensors_of
from tests.quantised_recipes import Recipe


def test_a_layer_is_packed_as_the_layout_says() -> None:
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    recipe = Recipe()
    right = tensors_of(quantised(weight.double().numpy(), recipe, 0), recipe)
    found = layer(weight)
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert found[name].dtype == tensor.dtype
        assert np.array_equal(found[name].numpy(), tensor.numpy()), name


def test_the_file_is_served(tmp_path: Path) -> None:
    make_model("tiny", tmp_path / "model")
    write(tmp_path / "model", tmp_path / "gptq")
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())
    assert config["quantization_config"]["group_size"] == 128
    model = load(str(tmp_path / "gptq"), dtype="bfloat16", threads=1)
    [output] = model.generate_batch([[5, 6, 7]], max_new_tokens=3).values()
    assert len(output.generated_tokens) == 3
