"""Reads what a checkpoint says before any weight is read: its config, and the headers of its
safetensors files. A model that these rule out is refused here, for a server as for a plan.

A safetensors file has the length of its header (8 bytes), the header (JSON with the type, shape and
place of each tensor), and the tensors. So a file that was not copied to its end is found by its
length.
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
"""Floating-point types by their names in a head."""
_MAX_HEAD = 100 << 20
"""Longer heads are refused by safetensors itself."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's directory, without its weights.

    Attributes:
        path: the directory.
        config: its config.
        model_class: the class that runs it.
        files: its safetensors files; empty if they are not on this machine.
        file_bytes: their size.
        dtype: the type of its weights: the config's, else that of the first tensor; None: unknown.
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
    """The local directory of a model: the path itself, or the hub's cache for a hub id, downloaded
    if it is not there.

    Args:
        model: a path or a hub id, which may have a revision (`engine.hub.cache.HubId`).
        progress: gets a line for each stage of a download.
        needs_weights: False: of a hub id only the config and what else is small.

    Raises:
        ModelRefusedError: there is no such directory, or the model is not one that we run.
        DownloadError: the hub does not give us such a model.
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
    """Refuse a model by what is read before its weights, so that those need not come.

    Raises:
        ModelRefusedError: it is not one that we run.
    """
    read_checkpoint(path, needs_weights=False)


def read_checkpoint(path: Path, *, needs_weights: bool = True) -> Checkpoint:
    """Read a checkpoint's config and heads.

    Args:
        path: a model's directory.
        needs_weights: whether it is refused without safetensors.

    Raises:
        ModelRefusedError: it is not a model that we run, or its files are not whole.
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
    """Check that a generation config can be read, if there is one: transformers would take the
    defaults instead, by which outputs are drawn otherwise and end elsewhere.
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
    """Check that a safetensors file is whole. Returns the type of its first floating-point
    tensor.
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
