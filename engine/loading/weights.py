"""Reads a checkpoint's weights into the model that transformers creates for them.

    the type of the file ─▶ from_pretrained: parameters are slices of a mapping of the file
    another type         ─▶ each tensor is read, converted, and released before the next

transformers maps the files and closes them when everything is read. If it converts the weights, all
of a mapping has then been touched, and counts as this process's memory in addition to the converted
weights. For float32 from bfloat16, this is half as much again. So weights to be converted are read
instead of mapped.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from engine.loading.checkpoint import Checkpoint

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_GENERATION, _CONFIG = "generation_config.json", "config.json"


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
        OSError, ValueError, RuntimeError, ImportError: any other error of `from_pretrained`.
    """
    options = {
        "config": checkpoint.config,
        "dtype": dtype or "auto",
        "attn_implementation": None,  # the owner gets the usual attention, whatever the file says
        "use_safetensors": True,
        "trust_remote_code": False,
        "output_loading_info": True,
        **sharding,
    }
    files = None if sharding or dtype in (None, checkpoint.dtype) else _files(checkpoint)
    if files is None:
        model, info = AutoModelForCausalLM.from_pretrained(checkpoint.path, **options)
        return model, sorted(info["missing_keys"])
    with ExitStack() as opened:
        slices: dict[str, Any] = {}
        for file in files:
            tensors = opened.enter_context(safe_open(file, framework="pt", backend="pread"))
            slices |= {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        model_class, options["config"] = _class_and_config(checkpoint)
        model, info = model_class.from_pretrained(None, state_dict=slices, **options)
    # What it takes from the directory, if it is given one.
    model.config.name_or_path = str(checkpoint.path)
    if model.can_generate():
        model.generation_config = _generation_config(checkpoint.path)
    return model, sorted(info["missing_keys"])


def _class_and_config(checkpoint: Checkpoint) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Return the class that runs a model, and its config.

    For a model with towers, the config is that of its text model if the class is for the text
    model. AutoModelForCausalLM does the same, but requires a directory.
    """
    made, config = checkpoint.model_class, checkpoint.config
    text = config.sub_configs.get("text_config")
    if text is not None and made.config_class == text:
        config = config.get_text_config()
    return made, config


def _files(checkpoint: Checkpoint) -> list[Path] | None:
    """Return the files that transformers would read, or None if it would read others."""
    folder, config = checkpoint.path, checkpoint.config
    named = (getattr(config, name, None) for name in ("extra_files", "transformers_weights"))
    if any(named) or (folder / "adapter_config.json").exists():
        return None
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_bytes())
        places = index.get("weight_map") if isinstance(index, dict) else None
        if isinstance(places, dict):
            return [folder / name for name in sorted(set(places.values()))]
    return None


def _generation_config(folder: Path) -> GenerationConfig:
    """Read the generation config as transformers does.

    It comes from its own file or, for old models, from the model's config.
    """
    if (folder / _GENERATION).exists():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_pretrained(
        folder, config_file_name=_CONFIG, _from_model_config=True
    )
