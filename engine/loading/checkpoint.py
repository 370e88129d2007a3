"""Reads a checkpoint's config and the headers of its safetensors files, before any weights.

A model that these rule out is refused here, both when it is served and when it is only planned.

A safetensors file consists of the length of its header (8 bytes), the header (JSON with the type,
shape and offset of each tensor), and the tensors. An incompletely copied file is therefore detected
by its length.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.contract.errors import DownloadError, ModelRefusedError
from engine.loading.gate import check_config

_GGUF = (
    "GGUF files are not read here: give the directory of the model that they were made from, with "
    "config.json and *.safetensors"
)
_SAFETENSORS = (
    "only *.safetensors are read, because loading others can run code: get the model in that form, "
    "or load it once with transformers and save it with save_pretrained"
)
_NAME = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating-point types by their names in a header."""
_MAX_HEAD = 100 << 20
"""The maximum header size. safetensors itself refuses longer ones."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's directory, without its weights.

    Attributes:
        path: the directory.
        config: the model's config.
        model_class: the class that runs the model.
        files: the safetensors files; empty if they are not on this machine.
        file_bytes: the total size of these files.
        dtype: the type of the weights, from the config or else from the first tensor. None if it is
            unknown.
    """

    path: Path
    config: PreTrainedConfig
    model_class: type[PreTrainedModel]
    files: tuple[Path, ...]
    file_bytes: int
    dtype: torch.dtype | None


def resolve_path(
    model: str, progress: Callable[[str], None], *, needs_weights: bool = True
) -> Path:
    """Return the local directory of a model.

    This is the path itself, or for a hub id, a directory in the hub's cache. The model is
    downloaded if it is not there.

    Args:
        model: a path or a hub id, which may have a revision (`engine.hub.cache.HubId`).
        progress: receives one line for each stage of a download.
        needs_weights: if False, only the config and other small files of a hub id are needed.

    Raises:
        ModelRefusedError: there is no such directory, or the model is not supported.
        DownloadError: the hub does not provide such a model.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or path.is_absolute() or model.startswith((".", "~")):
        hint = _GGUF if path.suffix == ".gguf" else "give a model's directory or hub id"
        raise ModelRefusedError(f"{model} is not a directory; {hint}")
    from engine.hub.cache import HubId, find, find_unmarked

    hub_id = HubId.parse(model)
    here = find(hub_id, needs_weights=needs_weights)
    if here is not None:
        return here
    from engine.hub.fetching import fetch
    from engine.hub.repository import NOT_ASKED

    try:
        return fetch(hub_id, progress, needs_weights=needs_weights, check=check_before_weights)
    except DownloadError as error:
        there = find_unmarked(hub_id, needs_weights=needs_weights)
        if there is None or error.cause not in NOT_ASKED:
            raise
        progress(f"what another program has left of {model} here is used, because {error}")
        return there


def check_before_weights(path: Path) -> None:
    """Refuse an unsupported model before its weights are downloaded.

    Raises:
        ModelRefusedError: the model is not supported.
    """
    read_checkpoint(path, needs_weights=False)


def read_checkpoint(path: Path, *, needs_weights: bool = True) -> Checkpoint:
    """Read a checkpoint's config and headers.

    Args:
        path: a model's directory.
        needs_weights: whether to refuse a model without safetensors files.

    Raises:
        ModelRefusedError: the model is not supported, or its files are incomplete.
    """
    files = tuple(sorted(path.glob("*.safetensors")))
    if any(path.glob("*.gguf")) and not files:
        raise ModelRefusedError(f"{path} has no *.safetensors; {_GGUF}")
    if not (path / "config.json").is_file():
        raise ModelRefusedError(
            f"{path} is not a model's directory: it has no config.json; give the directory with "
            "config.json and *.safetensors"
        )
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelRefusedError(
            f"{path}: no model config that this version of transformers knows: {error}"
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelRefusedError(
            f"{path}: model type {config.model_type!r} has no causal language model in transformers"
        )
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    check_config(config, model_class)
    _check_generation_config(path / "generation_config.json")
    if needs_weights and not files:
        raise ModelRefusedError(f"{path} has no weights that can be read: {_SAFETENSORS}")
    first: torch.dtype | None = None
    for file in files:
        found = _check_file(file)
        first = first or found
    return Checkpoint(
        path=path,
        config=config,
        model_class=model_class,
        files=files,
        file_bytes=sum(file.stat().st_size for file in files),
        dtype=config.dtype if isinstance(config.dtype, torch.dtype) else first,
    )


def _check_generation_config(file: Path) -> None:
    """Check that the generation config, if there is one, can be read.

    Otherwise transformers would use its defaults, which sample and stop differently.
    """
    try:
        if file.exists() and not isinstance(json.loads(file.read_bytes()), dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise ModelRefusedError(
            f"{file} cannot be read ({error}): it is damaged, or was not copied to its end; "
            "download it again"
        ) from error


def _check_file(file: Path) -> torch.dtype | None:
    """Check that a safetensors file is complete, and return the type of its first
    floating-point tensor.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as content:
            [length] = struct.unpack("<Q", content.read(8))
            if length > min(_MAX_HEAD, size - 8):
                raise ValueError(f"its head says that it has {length} bytes")
            head = json.loads(content.read(length))
        tensors = [entry for name, entry in head.items() if name != "__metadata__"]
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelRefusedError(
            f"{file}: this is not a whole safetensors file ({error}): it is damaged, or was not "
            "copied to its end; download it again"
        ) from error
    if size < end:
        raise ModelRefusedError(
            f"{file}: the file ends after {size:,} of {end:,} bytes: it was not copied to its end; "
            "download it again"
        )
    kinds = (_NAME.get(entry.get("dtype")) for entry in tensors)
    return next((kind for kind in kinds if kind is not None), None)
