"""Models with random weights and true shapes, because speed does not depend on the weights' values.

`make_model` writes a checkpoint to a cache folder outside the repository, with a byte-level
tokenizer of the vocabulary's size. Prompts are given as token ids, but servers need a tokenizer.
`random_model` makes a model in memory, directly on the device, where 16 GB take only seconds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import PreTrainedConfig, PreTrainedModel

_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size", "max_position_embeddings"),
)


def _shape(*sizes: int, theta: float = 1e6, tied: bool = True, **more: Any) -> dict[str, Any]:
    """Return the settings of a shape. sizes: those of `_SIZES`."""
    named = dict(zip(_SIZES, sizes, strict=True))
    return {**more, **named, "rope_theta": theta, "tie_word_embeddings": tied}


SHAPES = {
    "qwen3-0.6b": _shape(1024, 28, 16, 8, 128, 3072, 151_936, 40_960),
    "qwen3-4b": _shape(2560, 36, 32, 8, 128, 9728, 151_936, 40_960),
    "qwen3-8b": _shape(4096, 36, 32, 8, 128, 12_288, 151_936, 40_960, tied=False),
    "qwen3-moe-13b": _shape(
        *(2048, 20, 32, 4, 128, 6144, 151_936, 40_960),
        tied=False,
        model_type="qwen3_moe",
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "qwen3.5-0.8b": _shape(
        *(1024, 24, 8, 2, 256, 3584, 248_320, 40_960),
        theta=1e7,
        model_type="qwen3_5_text",
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
    "smollm2-135m": _shape(576, 30, 9, 3, 64, 1536, 49_152, 8192, theta=1e5, model_type="llama"),
    "tiny": _shape(256, 4, 8, 4, 32, 768, 4096, 8192),
    "long": _shape(64, 2, 4, 1, 16, 128, 150_000, 131_072, tied=False),
    "demo-old": _shape(256, 4, 8, 4, 32, 704, 3072, 2048, theta=1e4, model_type="llama"),
}
"""All shapes are Qwen3 except those that name another type: SmolLM2's, and the shape that the demo
model had when most of its records were made. The mixture has 20 of the 48 layers of Qwen3-30B-A3B,
so that a device also holds the judge, in float32.
"""

_ROOT = Path(__file__).resolve().parent.parent
DEMO = _ROOT / "models" / "demo"
CACHE = Path.home() / ".cache" / "headrace-bench"
WEIGHT_SPREAD = 2.0
"""A factor for the library's initial weights of the layers' matrices. With smaller weights, outputs
repeat few tokens. With larger ones, bfloat16's rounding errors grow from layer to layer until the
tokens mean nothing.
"""
WIDTH = 1024
"""The largest hidden size to which the factor applies unchanged."""


def find_model(name: str, cache: Path | None) -> Path:
    """Return the folder of a model: demo, a shape's name, or a directory. cache: see `checkpoint`.
    Raises ValueError if there is none.
    """
    if name in SHAPES:
        return checkpoint(name, cache or CACHE)
    folder = DEMO if name == "demo" else Path(name).resolve()
    if not (folder / "config.json").is_file():
        raise ValueError(f"--model {name}: no name of --list, and no model's directory")
    return folder


def checkpoint(name: str, cache: Path) -> Path:
    """Return the folder of a named checkpoint, which is made if it does not exist. A separate
    process makes it, because torch takes much memory.
    """
    return made_once(cache / "models" / name, "make_model(sys.argv[2], folder)", name)


def made_once(folder: Path, code: str, *words: str, seconds: float | None = None) -> Path:
    """Return a folder, which a separate process makes if it has no checkpoint.

    Args:
        folder: where to.
        code: makes it in `folder`, by this module's names.
        words: the code's `sys.argv[2:]`.
        seconds: the longest that it may take; None for no limit.

    Raises:
        CalledProcessError, TimeoutExpired: of the process.
    """
    if not (folder / "config.json").is_file():
        print(f"making {folder}", flush=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = folder.with_name(f"{folder.name}.partial")
        for path in (folder, partial):
            shutil.rmtree(path, ignore_errors=True)
        program = "import json, pathlib, sys; from benchmarks.models import *; "
        program += f"folder = pathlib.Path(sys.argv[1]); {code}"
        command = [sys.executable, "-c", program, str(partial), *words]
        subprocess.run(command, cwd=_ROOT, check=True, timeout=seconds)
        partial.rename(folder)
    return folder


def make_random(folder: Path, model_type: str, settings: Mapping[str, Any]) -> Path:
    """Return a folder with a checkpoint of a type of transformers, with random weights in bfloat16,
    which is made if it does not exist. settings: of its config.
    """
    code = "write_random(sys.argv[2], json.loads(sys.argv[3]), folder)"
    return made_once(folder, code, model_type, json.dumps(settings))


def write_random(model_type: str, settings: Mapping[str, Any], folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **settings)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def make_model(name: str, folder: Path, seed: int = 0, device: str = "cpu") -> None:
    """Write a checkpoint of a named shape in bfloat16. The result is the same for the same seed and
    device.

    On a CPU the weights are drawn in float32 and rounded; on other devices they are drawn in
    bfloat16.
    """
    import torch

    on_cpu = device == "cpu"
    model = random_model(
        name, device=device, dtype=torch.float32 if on_cpu else torch.bfloat16, seed=seed
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    _write_tokenizer(folder, SHAPES[name]["vocab_size"])


def random_model(name: str, *, device: str, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """Make a model of a named shape in memory, on its device. The result is the same for the same
    seed, device and type.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(model_config(name), dtype=dtype)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in parameter_name:
                parameter.mul_(_spread(name))
    return model.eval()


def built_model(order: Mapping[str, Any]) -> PreTrainedModel | None:
    """Return the model of an adapter's order: that of the shape which "build" names, made on the
    order's device, where every system has the same weights. None without: "model" is a directory.
    """
    import torch

    if order.get("build") is None:
        return None
    dtype = getattr(torch, order["dtype"])
    return random_model(order["build"], device=order.get("device", "cpu"), dtype=dtype)


def _spread(name: str) -> float:
    """Return the factor for the weights, which is smaller for wider models. A product of the layers
    then has the same gain as in the 0.6B shape, and rounding errors grow no faster.
    """
    return WEIGHT_SPREAD * min(1.0, (WIDTH / SHAPES[name]["hidden_size"]) ** 0.5)


def model_config(name: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    shape = {"model_type": "qwen3", **SHAPES[name]}
    theta = shape.pop("rope_theta")
    return AutoConfig.for_model(
        **shape,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="bfloat16",
    )


def byte_level(vocab_size: int) -> Tokenizer:
    """Return a byte-level tokenizer without merges. Ids beyond the bytes get names that occur in no
    text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = _SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [f"<{number}>" for number in range(len(names), vocab_size)]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL)
    return tokenizer


_SPECIAL = ["<pad>", "<s>", "</s>"]


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    byte_level(vocab_size).save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad_token", "bos_token", "eos_token"), _SPECIAL, strict=True))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
