"""Which formats of quantised checkpoints are served, and what else there is.

    quantization_config ─▶ its format ─▶ the layers that the heads of the files show
                        ─▶ their tensors, checked: shapes, types, groups, zeros, scales

Which layers are quantised is read from the tensors: lists of modules in configs are often missing,
or in another naming.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.contract.errors import ModelRefusedError
from engine.loading.quantised.awq import Awq
from engine.loading.quantised.gptq import Gptq
from engine.loading.quantised.stored_format import (
    StoredError,
    StoredForm,
    StoredFormat,
    StoredLayer,
    scale_type,
)
from engine.loading.tensor_heads import TensorHead

_MADE: dict[str, Callable[[Mapping[str, Any]], StoredFormat]] = {
    "gptq": Gptq,
    "awq": Awq,
    "auto-round": lambda config: _auto_round(config),
}
_AUTO_ROUND: dict[object, type[StoredFormat]] = {
    "auto_gptq": Gptq,
    "auto_round:auto_gptq": Gptq,
    "auto_awq": Awq,
    "auto_round:auto_awq": Awq,
}
_SERVED = "GPTQ (4 or 8 bits) and AWQ (4 bits, version gemm)"
_OTHERS = {
    "fp8": "floats of 8 bits with a scale for each block",
    "fbgemm_fp8": "floats of 8 bits",
    "compressed-tensors": "a form of llm-compressor's",
    "bitsandbytes": "a form of bitsandbytes'",
    "mxfp4": "floats of 4 bits with a scale for each 32",
    "modelopt": "a form of NVIDIA's Model Optimizer",
    "nvfp4": "floats of 4 bits with a scale for each 16",
    "hqq": "half-quadratic quantization",
    "aqlm": "codes of a codebook",
    "torchao": "tensors of torchao's",
}
"""Other methods, and what their files have."""
_WORDS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv", "_blocks")
"""Ends of names that only quantised checkpoints have."""


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The quantised layers of a checkpoint.

    Attributes:
        form: their format.
        layers: the layers, by their names in the files. Empty if these are not on this machine.
        tensors: all tensors, by the names of the model's parameters and buffers, if they are not
            in safetensors files.
    """

    form: StoredForm
    layers: dict[str, StoredLayer]
    tensors: dict[str, torch.Tensor] | None = None

    def has(self, name: str) -> bool:
        """Return whether a tensor of the files is part of a quantised weight."""
        path, _, part = name.rpartition(".")
        layer = self.layers.get(path)
        return layer is not None and part in layer.heads and part != "bias"

    def __deepcopy__(self, memo: object) -> StoredWeights:
        """Return itself: configs that hold it are copied often."""
        return self


def read_format(path: Path, config: object) -> StoredFormat:
    """Return the format that a `quantization_config` names.

    Raises:
        ModelRefusedError: it is not served.
    """
    file = path / "config.json"
    if not isinstance(config, dict):
        raise ModelRefusedError(
            f"{file}: quantization_config is {config!r}, not an object; get a whole config.json"
        )
    method = config.get("quant_method")
    made = _MADE.get(method) if isinstance(method, str) else None
    if made is None:
        what = f" ({_OTHERS[method]})" if isinstance(method, str) and method in _OTHERS else ""
        raise ModelRefusedError(
            f"{file}: the weights are quantized already, by {method!r}{what}, which is not served; "
            f"look for {_SERVED}, or give the model that they were made from, and --quantization "
            "int8 or int4 to quantize it at load"
        )
    try:
        return made(config)
    except StoredError as error:
        raise ModelRefusedError(f"{file}: quantization_config {error}") from error


def _auto_round(config: Mapping[str, Any]) -> StoredFormat:
    packing = config.get("packing_format")
    if not isinstance(packing, str) or packing not in _AUTO_ROUND:
        raise StoredError(
            f"has packing_format {packing!r}; get it with auto_round:auto_gptq or "
            "auto_round:auto_awq"
        )
    return _AUTO_ROUND[packing](config)


def refuse_unnamed(heads: Mapping[str, TensorHead]) -> None:
    """Refuse quantised tensors of a checkpoint whose config does not say how to read them.

    Raises:
        ModelRefusedError: there are some.
    """
    found = next((name for name in heads if name.endswith(_WORDS)), None)
    if found is not None:
        raise ModelRefusedError(
            f"{heads[found].file}: {found} is quantized, but config.json has no "
            "quantization_config that says how; put it there (older files have it in "
            "quantize_config.json or quant_config.json), or get a model that has it"
        )


def read_layers(form: StoredFormat, heads: Mapping[str, TensorHead]) -> StoredWeights:
    """Find the quantised layers of a checkpoint, and check all of their tensors but the codes.

    heads: all tensors of the checkpoint.

    Raises:
        ModelRefusedError: tensors are missing, or are not what quantisation gives.
    """
    found: dict[str, dict[str, TensorHead]] = {}
    for name, head in heads.items():
        path, _, part = name.rpartition(".")
        if part in form.parts:
            found.setdefault(path, {})[part] = head
    if not any("qweight" in parts for parts in found.values()):
        file = next((head.file.parent for head in heads.values()), Path())
        raise ModelRefusedError(
            f"{file}: config.json says that the weights are {form.name}, but no tensor is: take "
            "quantization_config out if they are 16-bit weights, or download the right files"
        )
    layers = {}
    with ExitStack() as opened:
        files: dict[Path, Any] = {}
        for path, parts in found.items():
            name = f"{path}.{next(iter(parts))}"
            try:
                name = _check_parts(form, path, parts, heads)
                layers[path] = _read_layer(form, path, parts, files, opened)
            except StoredError as error:
                file = next(iter(parts.values())).file
                raise ModelRefusedError(f"{file}: {name} {error}") from error
            except (SafetensorError, OSError) as error:
                file = next(iter(parts.values())).file
                raise ModelRefusedError(
                    f"{file}: {name} cannot be read ({error}): a file is damaged; download it again"
                ) from error
            if (bias := heads.get(f"{path}.bias")) is not None:
                layers[path].heads["bias"] = bias
    return StoredWeights(form, layers)


def _check_parts(
    form: StoredFormat, path: str, parts: dict[str, TensorHead], heads: Mapping[str, TensorHead]
) -> str:
    """Check the heads of a layer's tensors, and return the name of its codes."""
    first = next(iter(parts))
    if "qweight" not in parts:
        raise StoredError(form.why_stray(f"{path}.{first}"))
    if ".experts." in f".{path}.":
        raise StoredError(
            "belongs to an expert, and quantized experts are not served; give the model that it "
            "was made from, or a dense one"
        )
    if f"{path}.weight" in heads:
        raise StoredError("has a weight beside it that is not quantized: which is right, is not "
                          "known; download the right files")  # fmt: skip
    missing = sorted(form.parts - form.optional - parts.keys())
    if missing:
        raise StoredError(f"has no {missing[0]} beside it: the file is incomplete; get a whole one")
    words = parts["qweight"].shape
    if len(words) != 2 or 0 in words:
        raise StoredError(f"has shape {list(words)}, not two dimensions; download it again")
    outputs, inputs = form.size(words)
    wrong = f"for a layer of {inputs} inputs and {outputs} outputs in {form.described}"
    for part, shape in form.shapes(outputs, inputs).items():
        if part in parts and parts[part].shape != shape:
            raise StoredError(
                f"does not fit its {part}, which has shape {list(parts[part].shape)}, not "
                f"{list(shape)}, {wrong}: config.json names another method, bits or group_size; "
                "get the config.json of these files"
            )
        if part in parts and part != "scales" and parts[part].dtype != "I32":
            raise StoredError(f"has a {part} of type {parts[part].dtype}, not I32; {_SERVED} have")
    if outputs % form.per_word or inputs % form.per_word:
        raise StoredError(f"is not of whole words, {wrong}; get it in another format")
    scale_type(parts["scales"])
    return f"{path}.qweight"


def _read_layer(
    form: StoredFormat,
    path: str,
    parts: dict[str, TensorHead],
    files: dict[Path, Any],
    opened: ExitStack,
) -> StoredLayer:
    """Read a layer's layout. The file's pages are only mapped, and codes mostly not read."""
    tensors = {}
    for part, head in parts.items():
        if head.file not in files:
            files[head.file] = opened.enter_context(safe_open(head.file, framework="pt"))
        tensors[part] = files[head.file].get_tensor(f"{path}.{part}")
    layout = form.layout(tensors)
    form.check_zero_scales(tensors)
    outputs, inputs = form.size(parts["qweight"].shape)
    return StoredLayer(path, form, dict(parts), outputs, inputs, layout)
