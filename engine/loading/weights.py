"""Reads a checkpoint's weights into the model that transformers creates for them.

    the type of the file ─▶ from_pretrained: parameters are slices of a mapping of the file
    another type         ─▶ each tensor is read and converted, some rows at a time
    quantised weights    ─▶ stay slices of the mapping; other tensors are read as above
    a GGUF file          ─▶ all tensors are slices of its mapping

transformers maps the files and closes them when everything is read. If it converts the weights, all
of a mapping has then been touched, and counts as this process's memory in addition to the converted
weights. For float32 from bfloat16, this is half as much again. So weights are converted here, and
the pages of what was read are given back.
"""

from __future__ import annotations

import copy
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import GenerationConfig, PreTrainedModel

from engine.contract.errors import ModelRefusedError
from engine.loading.checkpoint import Checkpoint, weight_files
from engine.loading.pages import Pages
from engine.loading.quantised.stored_linear import place_stored, quantization_config

_SLICE_BYTES = 16 << 20
"""The approximate size of the slices in which elements are converted."""
_GENERATION, _CONFIG = "generation_config.json", "config.json"

logger = logging.getLogger(__name__)


class _Converted:
    """A tensor of a file, in the place of safetensors' slice of it.

    Some rows at a time are converted, and their pages given back, so that it is never in memory in
    both types.
    """

    def __init__(self, held: Any) -> None:
        self._held = held

    def __getitem__(self, _: object) -> _Converted:
        """Return itself: transformers asks for all elements, and then for their type."""
        return self

    def get_dtype(self) -> str:
        """Return its name in the file."""
        name: str = self._held.get_dtype()
        return name

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the elements."""
        shape = self._held.get_shape()
        if dtype is None or not shape:
            whole: torch.Tensor = self._held[...]
            return whole.to(device=device, dtype=dtype)
        made = torch.empty(shape, dtype=dtype, device=device)
        count = max(1, _SLICE_BYTES * shape[0] // max(1, made.nbytes))
        for first in range(0, shape[0], count):
            part = self._held[first : min(first + count, shape[0])]
            made[first : first + count] = part
            Pages((part,)).give_back(part)
        return made


def read_weights(
    checkpoint: Checkpoint, dtype: torch.dtype | None, **sharding: Any
) -> tuple[PreTrainedModel, list[str]]:
    """Create a checkpoint's model.

    Args:
        checkpoint: the checkpoint, with weights.
        dtype: the type to convert the weights to. None keeps their own type.
        sharding: options of `from_pretrained` for a split model. Each process reads its shards.

    Returns:
        The model, and the names of weights that are not in the checkpoint.

    Raises:
        SafetensorError: a file is damaged.
        ModelRefusedError: a GGUF file has other weights than the model.
        OSError, ValueError, RuntimeError, ImportError: any other error of `from_pretrained`.
    """
    options = {
        "config": checkpoint.config,
        "dtype": dtype or "auto",
        "attn_implementation": None,  # the owner gets the usual attention, whatever the file says
        "use_safetensors": True,
        "trust_remote_code": False,
        "output_loading_info": True,
        "key_mapping": dict(checkpoint.names),
        **sharding,
    }
    stored = checkpoint.stored
    files = None
    if stored is not None:
        files = sorted({head.file for head in checkpoint.heads.values()})
    elif not sharding and dtype not in (None, checkpoint.dtype):
        files = weight_files(checkpoint.path, checkpoint.config)
    if files is None:
        model, info = checkpoint.model_class.from_pretrained(checkpoint.path, **options)
        return model, sorted(info["missing_keys"])
    if stored is not None:
        config = copy.copy(checkpoint.config)
        config.quantization_config = quantization_config(stored)
        options["config"] = config
    with ExitStack() as opened:
        slices: dict[str, Any] = dict((stored and stored.tensors) or {})
        for file in files:
            opened_file = opened.enter_context(safe_open(file, framework="pt"))
            for name in opened_file.keys():  # noqa: SIM118
                own = opened_file.get_slice(name)
                is_kept = stored is not None and stored.has(name)
                slices[name] = own if is_kept else _Converted(own)
        model, info = checkpoint.model_class.from_pretrained(None, state_dict=slices, **options)
    if stored is not None and info["unexpected_keys"]:
        names = sorted(info["unexpected_keys"])
        if stored.tensors is not None:
            raise ModelRefusedError(
                f"{checkpoint.path}: the file has {names[0]}, and the model of config.json has no "
                "such weight: put the config.json of this file's model beside it"
            )
        logger.info("ignored: %d tensors that the model does not have (%s)", len(names), names)
    # What it takes from the directory, if it is given one.
    model.config.name_or_path = str(checkpoint.path)
    if model.can_generate():
        model.generation_config = _generation_config(checkpoint.path)
    return model, sorted(info["missing_keys"])


def model_without_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """Return a checkpoint's model on the meta device.

    Raises:
        ModelRefusedError: its quantised weights are not those of the config.
    """
    with torch.device("meta"):
        model = checkpoint.model_class._from_config(checkpoint.config, dtype=dtype)
        if checkpoint.stored is not None:
            place_stored(model, checkpoint.stored)
    return model.eval()


def _generation_config(folder: Path) -> GenerationConfig:
    """Read the generation config as transformers does.

    It comes from its own file or, for old models, from the model's config.
    """
    if (folder / _GENERATION).exists():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_pretrained(
        folder, config_file_name=_CONFIG, _from_model_config=True
    )
