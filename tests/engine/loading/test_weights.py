"""Weights that are converted while they are read: what transformers makes of them, held once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    Qwen3Config,
)

from engine.loading.checkpoint import read_checkpoint
from engine.loading.weights import read_weights
from tests.tiny_models import FAMILIES, make_model


def _save(folder: Path, family: str = "llama", **options: Any) -> PreTrainedModel:
    model: PreTrainedModel = make_model(FAMILIES[family]()).to(torch.bfloat16)
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("shards", ["one", "many"])
def test_it_is_the_model_that_transformers_makes(tmp_path: Path, family: str, shards: str) -> None:
    _save(tmp_path, family, max_shard_size="20KB" if shards == "many" else "1GB")
    files = len(list(tmp_path.glob("*.safetensors")))
    assert (files > 1) == (shards == "many")
    made, missing = read_weights(read_checkpoint(tmp_path), torch.float32)
    right = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert missing == []
    assert type(made) is type(right)
    assert made.config.to_dict() == right.config.to_dict()
    assert made.config.name_or_path == right.config.name_or_path == str(tmp_path)
    state = made.state_dict()
    assert {one.dtype for one in state.values()} == {torch.float32}
    assert all(torch.equal(state[name], one) for name, one in right.state_dict().items())
    buffers = dict(made.named_buffers())
    assert all(torch.equal(buffers[name], one) for name, one in right.named_buffers())


@pytest.mark.parametrize("has_file", [True, False])
def test_its_generation_config_is_the_directory_s(tmp_path: Path, has_file: bool) -> None:
    """Old models have theirs in config.json."""
    model = _save(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    if has_file:
        GenerationConfig(do_sample=True, top_k=7, eos_token_id=[2, 5]).save_pretrained(tmp_path)
    made, _ = read_weights(read_checkpoint(tmp_path), torch.float32)
    right = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.can_generate()
    assert made.generation_config.to_dict() == right.generation_config.to_dict()
    assert (made.generation_config.top_k == 7) == has_file


def test_an_index_says_which_files_are_read(tmp_path: Path) -> None:
    """Some directories have the weights twice, the second time in another form."""
    _save(tmp_path, max_shard_size="20KB")
    one = next(tmp_path.glob("*.safetensors"))
    (tmp_path / "consolidated.safetensors").write_bytes(one.read_bytes())
    _, missing = read_weights(read_checkpoint(tmp_path), torch.float32)
    assert missing == []


_PEAK = """
import re, sys
from pathlib import Path
from engine.contract.config import LoadConfig
from engine.loading.loader import load_model

def bytes_of(name):
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(name + r":\\s+(\\d+)", status)[1])

options = dict(word.split("=") for word in sys.argv[3:])
config = LoadConfig(threads=1, **options)
load_model(sys.argv[1], config, lambda line: None)  # what is imported by and by
before = bytes_of("VmRSS")
model = load_model(sys.argv[2], config, lambda line: None)
print(model.dtype, model.parameters, bytes_of("VmRSS") - before, bytes_of("VmHWM") - before)
"""


@pytest.mark.parametrize(
    ("options", "size"),
    [
        (("dtype=float32",), 4),
        (("dtype=float32", "decoder=transformers"), 4),
        (("dtype=bfloat16",), 2),
        (("dtype=bfloat16", "quantization=int8"), 1),
    ],
)
def test_no_weight_is_held_twice_at_any_time(
    tmp_path: Path, options: tuple[str, ...], size: int
) -> None:
    """What loading takes for a while is at most a few layers more than what is then held: less
    than half of the checkpoint's file, which a second copy would be.
    """

    def save(name: str, hidden: int, layers: int) -> Path:
        config = Qwen3Config(
            vocab_size=2048,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=hidden // 4,
            max_position_embeddings=256,
        )
        make_model(config, 0).to(torch.bfloat16).save_pretrained(tmp_path / name)
        return tmp_path / name

    folders = [str(save("small", 64, 1)), str(save("large", 1024, 8))]
    command = [sys.executable, "-c", _PEAK, *folders, *options]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    dtype, parameters, held, peak = result.stdout.split()
    assert dtype == f"torch.{options[0].split('=')[1]}"
    weights = int(parameters) * size
    assert weights > 100e6
    assert int(held) > 0.8 * weights, "it is there"
    assert int(peak) - int(held) < int(parameters), "half of the file"
