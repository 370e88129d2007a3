"""Fuzz targets: the heads of files of weights, which whoever makes a model chooses."""

from __future__ import annotations

import copy
import json
import random
import resource
import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from huggingface_hub import constants
from transformers import PreTrainedModel

from engine.contract.errors import ModelRefusedError
from engine.loading.checkpoint import read_checkpoint
from engine.loading.gguf.container import open_container
from engine.loading.gguf.folder import gguf_directory
from engine.loading.weights import model_without_weights
from tests.campaign.bytes.mutating import mutate_bytes, mutate_text
from tests.campaign.bytes.target import Target, Test, demand
from tests.gguf_files import all_of, write_gguf
from tests.quantised_files import quantise
from tests.quantised_recipes import RECIPES
from tests.tiny_models import FAMILIES, make_model

MOST_MEMORY = 256 << 20
"""The memory in bytes that reading a head may take."""
MOST_MESSAGE = 4096
_RECIPES = ("gptq-4-32-asym", "gptq-4-order", "gptq-8-64-sym", "awq-32", "awq-lm-head")
_SAFETENSORS, _GGUF = "model.safetensors", "model.gguf"
_ALIGNED = 32
_VALUES: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 4, 8, 24, 32, 64, 96, 128, 10**9, 2**31, 2**63, 10**30, 0.5, 1e400, "4", None,
    True, False, [], {}, [0, 0], [64], [8, 64], "I32", "F16", "BF16", "F32", "I64", "U8", "gptq",
    "gptq_v2", "marlin", "awq", "gemv", "auto-round", "fp8", {"+:.*": {"bits": 8}},
)  # fmt: skip
_NAMES = (
    *("qweight", "qzeros", "scales", "g_idx", "bias", "weight", "act.scales", "experts.0"),
    *("bits", "group_size", "sym", "zero_point", "version", "checkpoint_format", "desc_act"),
    *("dynamic", "quant_method", "packing_format", "w_bit", "lm_head", "__metadata__", "shape"),
)
_text = mutate_text(('"', "{", "[", "[" * 3000, "null", "NaN", "1e400", "\\ud800", "\n"), head=1)


def _model() -> PreTrainedModel:
    return make_model(FAMILIES["llama"](num_hidden_layers=1, eos_token_id=None))


def _reads(files: Mapping[str, bytes]) -> None:
    """Read a head: a model comes of it, or a refusal that names the file, in bounded memory."""
    with TemporaryDirectory(prefix="headrace-fuzz-") as place:
        for name, content in files.items():
            (Path(place) / name).write_bytes(content)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            path = Path(place)
            with patch.object(constants, "HF_HOME", place):
                path = gguf_directory(path) if _GGUF in files else path
            model_without_weights(read_checkpoint(path), torch.bfloat16)
        except ModelRefusedError as error:
            demand(place in str(error), f"a refusal that names no file: {error}")
            demand(len(str(error)) < MOST_MESSAGE, f"a refusal of {len(str(error))} characters")
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        demand(grown < MOST_MEMORY, f"{grown >> 20} MB of memory")


# ---- GPTQ and AWQ: a quantization_config, and the head of a safetensors file ---------------------


@cache
def _quantised() -> tuple[tuple[bytes, bytes, dict[str, object]], ...]:
    """For each recipe an input, what follows the head in its file, and its config.json."""
    found = []
    for number, name in enumerate(_RECIPES):
        with TemporaryDirectory() as place:
            folder = Path(place)
            quantise(_model(), folder, RECIPES[name])
            config = json.loads((folder / "config.json").read_bytes())
            raw = (folder / _SAFETENSORS).read_bytes()
        [length] = struct.unpack("<Q", raw[:8])
        own = json.dumps(config.pop("quantization_config"))
        data = bytes([number]) + own.encode() + b"\n" + raw[8 : 8 + length].rstrip()
        found.append((data, raw[8 + length :], config))
    return tuple(found)


def _mutate_heads(data: bytes, source: random.Random, most: int) -> bytes:
    """Change a value or a name of the config or the head, or else their text."""
    try:
        parts = [json.loads(part) for part in data[1:].split(b"\n", 1)]
    except (ValueError, RecursionError):
        return _text(data, source, most)
    if source.random() < 0.2:
        return _text(data, source, most)
    for _ in range(source.choice((1, 1, 2))):
        _change(source.choice(parts), source)
    changed = data[:1] + b"\n".join(json.dumps(part).encode() for part in parts)
    return changed if len(changed) <= most else _text(data, source, most)


def _change(value: Any, source: random.Random) -> None:
    if not isinstance(value, dict | list) or not value:
        return
    key = source.choice(list(value)) if isinstance(value, dict) else source.randrange(len(value))
    child = value[key]
    if isinstance(child, dict | list) and source.random() < 0.7:
        _change(child, source)
    elif isinstance(value, dict) and source.random() < 0.4:
        path, _, _ = str(key).rpartition(".")
        del value[key]
        value[f"{path}.{source.choice(_NAMES)}" if path else source.choice(_NAMES)] = child
    else:
        value[key] = copy.deepcopy(source.choice(_VALUES))


def _quantised_heads() -> Test:
    made = _quantised()

    def test(data: bytes) -> None:
        _, rest, config = made[(data[:1] or b"\0")[0] % len(made)]
        own, _, head = data[1:].partition(b"\n")
        text = json.dumps(config)[:-1].encode() + b', "quantization_config": ' + own + b"}"
        whole = struct.pack("<Q", len(head)) + head + rest
        _reads({"config.json": text, _SAFETENSORS: whole})

    return test


# ---- GGUF ----------------------------------------------------------------------------------------


@cache
def _gguf() -> tuple[bytes, bytes]:
    """The head of a file, and what follows it."""
    model = _model()
    tokens = [chr(0x100 + i) for i in range(model.config.vocab_size)]
    tokens[5] = tokens[3] + tokens[4]
    tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, *[1] * (len(tokens) - 1)],
        "tokenizer.ggml.merges": [f"{tokens[3]} {tokens[4]}"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    with TemporaryDirectory() as place:
        file = Path(place) / _GGUF
        write_gguf(file, model, "llama", all_of("Q4_0"), tokenizer)
        raw = file.read_bytes()
        sizes = [one.data.nbytes for one in open_container(file).tensors.values()]
    first = len(raw) - sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes)
    return raw[:first], raw[first:]


def _gguf_heads() -> Test:
    _, rest = _gguf()

    def test(data: bytes) -> None:
        _reads({_GGUF: data + bytes(-len(data) % _ALIGNED) + rest})

    return test


WEIGHTS = {
    one.name: one
    for one in (
        Target(
            name="quantised-heads",
            what="configs and heads of GPTQ and AWQ files, read as far as a model without weights",
            promises=(8, 9),
            prepare=_quantised_heads,
            mutate=_mutate_heads,
            seeds=lambda: [data for data, _, _ in _quantised()],
        ),
        Target(
            name="gguf-heads",
            what="heads of GGUF files, read as far as a model without weights",
            promises=(8, 9),
            prepare=_gguf_heads,
            mutate=mutate_bytes,
            seeds=lambda: [_gguf()[0]],
        ),
    )
}
