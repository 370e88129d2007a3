"""Reads a checkpoint's config and the headers of its safetensors or GGUF files, before any weights.

A model that these rule out is refused here, both when it is served and when it is only planned. Of
quantised weights, everything but the codes is read and checked, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from engine.contract.errors import DownloadError, ModelRefusedError
from engine.loading.gate import check_config
from engine.loading.gguf.container import find_files
from engine.loading.gguf.folder import gguf_directory, is_gguf
from engine.loading.gguf.stored import read_gguf
from engine.loading.quantised.registry import (
    StoredWeights,
    read_format,
    read_layers,
    refuse_unnamed,
)
from engine.loading.quantised.stored_format import StoredFormat
from engine.loading.tensor_heads import TensorHead, read_heads
from engine.loading.text_part import TextPart, find_text_part, left_out

if TYPE_CHECKING:
    from engine.hub.cache import HubId

_SAFETENSORS = (
    "only *.safetensors are read, because loading others can run code: get the model in that form, "
    "or load it once with transformers and save it with save_pretrained"
)
_NAME = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating-point types by their names in a header."""
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_QUANTIZED = "quantization_config"
_UNREADABLE = (OSError, ValueError, RecursionError)
"""What reading a JSON file raises, also of one that is nested very deeply."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's directory, without its weights.

    Attributes:
        path: the directory.
        config: the config that the model is made with.
        model_class: the class that runs the model, or its text part.
        files: the safetensors or GGUF files; empty if they are not on this machine.
        file_bytes: the total size of these files, without what is left out.
        heads: the tensors of the safetensors files that are read, by name.
        left_out: the bytes of the towers' weights, which are not read, by place.
        names: see TextPart.
        dtype: the type of the weights, from the config or else from the first tensor. None if it is
            unknown.
        stored: the weights that are quantised in the files, if any are. It has no layers if the
            files are not on this machine.
    """

    path: Path
    config: PreTrainedConfig
    model_class: type[PreTrainedModel]
    files: tuple[Path, ...]
    file_bytes: int
    heads: dict[str, TensorHead]
    left_out: Mapping[str, int]
    names: Mapping[str, str]
    dtype: torch.dtype | None
    stored: StoredWeights | None


def resolve_path(
    model: str, progress: Callable[[str], None], *, needs_weights: bool = True
) -> Path:
    """Return the local directory of a model.

    This is the path itself; for a GGUF file, a directory that is made around it; or for a hub id, a
    directory in the hub's cache. The model is downloaded if it is not there.

    Args:
        model: a path or a hub id, which may have a revision and name a GGUF file
            (`engine.hub.cache.HubId`).
        progress: receives one line for each stage of a download.
        needs_weights: if False, only the config and other small files of a hub id are needed.

    Raises:
        ModelRefusedError: there is no such directory, or the model is not supported.
        DownloadError: the hub does not provide such a model.
    """
    path = Path(model).expanduser()
    if is_gguf(path):
        return gguf_directory(path)
    if path.is_dir():
        return path
    if path.exists() or path.is_absolute() or model.startswith((".", "~")):
        raise ModelRefusedError(
            f"{model} is not a directory or a GGUF file; give a model's directory or hub id"
        )
    from engine.hub.cache import HubId

    hub_id = HubId.parse(model)
    found = _from_hub(hub_id, progress, needs_weights)
    return gguf_directory(found) if hub_id.file else found


def _from_hub(hub_id: HubId, progress: Callable[[str], None], needs_weights: bool) -> Path:
    """Return the directory of a hub's model, or its GGUF file."""
    from engine.hub.cache import find, find_unmarked

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
        progress(f"what another program has left of {hub_id} here is used, because {error}")
        return there


def check_before_weights(path: Path) -> None:
    """Refuse an unsupported model before its weights are downloaded, or a GGUF file.

    Raises:
        ModelRefusedError: the model is not supported.
    """
    if is_gguf(path):
        read_checkpoint(gguf_directory(path))
    else:
        _read_config(path)


def _read_config(path: Path) -> tuple[PreTrainedConfig, TextPart, StoredFormat | None]:
    """Read a directory's config: as it is, of what is served, and of weights that it quantises."""
    if not (path / "config.json").is_file():
        raise ModelRefusedError(
            f"{path} is not a model's directory: it has no config.json; give the directory with "
            "config.json and *.safetensors, or a GGUF file"
        )
    form = _read_form(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (*_UNREADABLE, KeyError, TypeError, ZeroDivisionError) as error:
        if code := _code_of_its_own(path / "config.json"):
            raise ModelRefusedError(f"{path}: {code}") from error
        raise ModelRefusedError(
            f"{path}: no model config that this version of transformers knows: {error}"
        ) from error
    try:
        part = find_text_part(config)
    except ModelRefusedError as error:
        raise ModelRefusedError(f"{path}: {error}") from error
    check_config(config, part.model_class)
    _check_generation_config(path / "generation_config.json")
    return config, part, form


def read_checkpoint(path: Path, *, needs_weights: bool = True) -> Checkpoint:
    """Read a checkpoint's config and headers.

    Args:
        path: a model's directory.
        needs_weights: whether to refuse a model without safetensors files.

    Raises:
        ModelRefusedError: the model is not supported, or its files are incomplete.
    """
    config, part, form = _read_config(path)
    if is_gguf(path):
        return _of_gguf(path, part)
    files = tuple(sorted(path.glob("*.safetensors")))
    if needs_weights and not files:
        raise ModelRefusedError(f"{path} has no weights that can be read: {_SAFETENSORS}")
    read = {file: read_heads(file) for file in files}
    named = weight_files(path, config)
    heads = {name: one for file in named or files for name, one in read.get(file, {}).items()}
    kinds = (_NAME.get(one.dtype) for one in heads.values())
    first = next((kind for kind in kinds if kind is not None), None)
    stored = None
    if form is not None:
        for one in (config, config.get_text_config()):  # transformers is not to act on it
            vars(one).pop(_QUANTIZED, None)
        _check_places(path, named or files)
        stored = read_layers(form, heads) if heads else StoredWeights(form, {})
    else:
        refuse_unnamed(heads)
    towers = left_out(part, {name: one.nbytes for name, one in heads.items()})
    return Checkpoint(
        path=path,
        config=part.config,
        model_class=part.model_class,
        files=files,
        file_bytes=sum(file.stat().st_size for file in files) - sum(towers.values()),
        heads=heads,
        left_out=towers,
        names=part.names,
        dtype=config.dtype if isinstance(config.dtype, torch.dtype) else first,
        stored=stored,
    )


def _of_gguf(path: Path, part: TextPart) -> Checkpoint:
    stored, files = read_gguf(path, part.config), find_files(path)
    dtype = part.config.dtype
    return Checkpoint(
        path=path,
        config=part.config,
        model_class=part.model_class,
        files=files,
        file_bytes=sum(file.stat().st_size for file in files),
        heads={},
        left_out={},
        names=part.names,
        dtype=dtype if isinstance(dtype, torch.dtype) else torch.bfloat16,
        stored=stored,
    )


def _read_form(path: Path) -> StoredFormat | None:
    """Return the form of weights that config.json says are quantised."""
    try:
        config = json.loads((path / "config.json").read_bytes())
    except _UNREADABLE:
        return None  # AutoConfig says what is wrong
    for one in (config, config.get("text_config") if isinstance(config, dict) else None):
        if isinstance(one, dict) and one.get(_QUANTIZED) is not None:
            return read_format(path, one[_QUANTIZED])
    return None


def _check_places(folder: Path, files: Sequence[Path]) -> None:
    """Refuse quantised files outside of the model's directory, which are read before the loader
    does. Those of a hub's cache are links into it.
    """
    home = folder.parents[1] if folder.parent.name == "snapshots" else folder
    for file in files:
        if not file.resolve().is_relative_to(home.resolve()):
            raise ModelRefusedError(
                f"{file} is outside of the model's directory: put the file itself there"
            )


def weight_files(folder: Path, config: PreTrainedConfig) -> list[Path] | None:
    """Return the files that transformers would read, or None if it would read others.

    Raises:
        ModelRefusedError: the index cannot be read.
    """
    named = (getattr(config, name, None) for name in ("extra_files", "transformers_weights"))
    if any(named) or (folder / "adapter_config.json").exists():
        return None
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    if (folder / _INDEX).is_file():
        try:
            places = json.loads((folder / _INDEX).read_bytes())["weight_map"]
            return [folder / name for name in sorted(set(places.values()))]
        except (*_UNREADABLE, KeyError, TypeError, AttributeError) as error:
            raise ModelRefusedError(
                f"{folder / _INDEX} cannot be read ({error}): it is damaged, or was not copied to "
                "its end; download it again"
            ) from error
    return None


def _code_of_its_own(file: Path) -> str | None:
    """Say which code of its repository a model needs, if its config names any."""
    try:
        config = json.loads(file.read_bytes())
        classes = ", ".join(map(str, config["auto_map"].values()))
    except (*_UNREADABLE, KeyError, TypeError, AttributeError):
        return None
    return (
        f"model type {config.get('model_type')!r} is not one of transformers, but of code in its "
        f"repository (auto_map: {classes}), and such code is not run here: use a version of "
        "transformers that has the model, or a checkpoint that was converted for it"
    )


def _check_generation_config(file: Path) -> None:
    """Check that the generation config, if there is one, can be read.

    Otherwise transformers would use its defaults, which sample and stop differently.
    """
    try:
        if file.exists() and not isinstance(json.loads(file.read_bytes()), dict):
            raise ValueError("no JSON object")
    except _UNREADABLE as error:
        raise ModelRefusedError(
            f"{file} cannot be read ({error}): it is damaged, or was not copied to its end; "
            "download it again"
        ) from error
