"""Layers that hold quantised weights as a file has them, and the transformers quantizer that puts
them where linear layers were before anything is read.

    from_pretrained: a model on meta ─▶ place ─▶ each tensor goes where its name says, unchanged:
                                                 it stays in the mapping of the file
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import linear as torch_linear
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin
from typing_extensions import override

from engine.contract.errors import ModelRefusedError
from engine.loading.quantised.registry import StoredWeights
from engine.loading.quantised.stored_format import StoredLayer, Tensors
from engine.models.formats.codes import Codes

_METHOD = "headrace"
"""The name under which transformers knows the quantizer."""
_SLICE_BYTES = 8 << 20
"""The approximate size in bytes of the slices in which weights are computed, in float32."""
_ALIGNED = 64
"""The number of outputs of a slice is a multiple of this: of words, and of the kernels' panels."""


class StoredModule(torch.nn.Module):
    """Holds a weight [N, K] that is quantised in the file, as the file has it.

    Attributes:
        stored: the weight's form.
        shape: N and K.
        dtype: the type of results.
    """

    def __init__(self, stored: StoredLayer, dtype: torch.dtype) -> None:
        """Make a module on the meta device. dtype: of the weight that it replaces."""
        super().__init__()
        self.stored, self.shape, self.dtype = stored, stored.shape, dtype
        for part, head in stored.heads.items():
            if part != "bias":
                held = stored.form.part_type(part, head)
                self.register_buffer(part, torch.empty(head.shape, dtype=held, device="meta"))

    @property
    def nbytes(self) -> int:
        """The size of the weight in bytes."""
        return sum(one.nbytes for one in self.parts.values())

    @property
    def parts(self) -> Tensors:
        """The tensors of the weight."""
        return {part: self.get_buffer(part) for part in self.stored.heads if part != "bias"}

    def slices(self) -> Iterator[slice]:
        """Return slices of the outputs, small enough to be unpacked."""
        outputs, inputs = self.shape
        count = max(1, _SLICE_BYTES // (4 * _ALIGNED * inputs)) * _ALIGNED
        for first in range(0, outputs, count):
            yield slice(first, min(first + count, outputs))

    def codes(self, outputs: slice) -> Codes:
        """Return the codes of one of the slices."""
        return self.stored.form.codes(self.parts, self.stored.layout, outputs)

    def values(self, outputs: slice) -> torch.Tensor:
        """Return the weights of one of the slices, float32 [n, K]."""
        return self.stored.form.values(self.parts, outputs)

    @override
    def extra_repr(self) -> str:
        """Return the arguments for `repr`."""
        return f"{self.shape}, {self.stored.form.described}"


class StoredLinear(StoredModule):
    """Replaces a torch.nn.Linear."""

    bias: torch.nn.Parameter | None

    def __init__(
        self, stored: StoredLayer, dtype: torch.dtype, bias: torch.nn.Parameter | None
    ) -> None:
        """Make a layer on the meta device. dtype, bias: of the layer that it replaces."""
        super().__init__(stored, dtype)
        self.out_features, self.in_features = stored.shape
        self.register_parameter("bias", bias)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer in float32, rounded once: [..., K] → [..., N]."""
        if x.is_meta:
            return x.new_empty((*x.shape[:-1], self.out_features))
        wide = x.float()
        bias = None if self.bias is None else self.bias.float()
        made = [
            torch_linear(wide, self.values(part), None if bias is None else bias[part])
            for part in self.slices()
        ]
        return torch.cat(made, -1).to(x.dtype)


class StoredEmbedding(StoredModule):
    """Replaces a torch.nn.Embedding, or Gemma's, which multiplies rows by its `embed_scale`."""

    def __init__(self, stored: StoredLayer, embedding: torch.nn.Embedding) -> None:
        """Make a table on the meta device. embedding: the one to replace."""
        super().__init__(stored, embedding.weight.dtype)
        self.num_embeddings, self.embedding_dim = stored.shape
        self.padding_idx = embedding.padding_idx
        self._scale: float | None = getattr(embedding, "scalar_embed_scale", None)

    @property
    def embed_scale(self) -> torch.Tensor | None:
        """By what rows are multiplied. No buffer: from_pretrained empties those on meta."""
        return None if self._scale is None else torch.tensor(self._scale)

    @override
    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up rows: [...] → [..., K]."""
        if token_ids.is_meta:
            return token_ids.new_empty((*token_ids.shape, self.embedding_dim), dtype=self.dtype)
        rows = self.stored.form.look_up(self.parts, token_ids.flatten()).to(self.dtype)
        rows = rows.view(*token_ids.shape, self.embedding_dim)
        scale = self.embed_scale
        return rows if scale is None else rows * scale.to(rows.dtype)


def stored_modules(model: torch.nn.Module) -> dict[str, StoredModule]:
    """Return the modules of a model that hold quantised weights as a file has them, by name."""
    return {name: one for name, one in model.named_modules() if isinstance(one, StoredModule)}


def stored_weights(model: torch.nn.Module) -> dict[str, StoredModule]:
    """Return one module for each such weight: an output layer in the place of an embedding."""
    modules = stored_modules(model)
    last = {id(one.stored): name for name, one in modules.items()}
    return {name: modules[name] for name in last.values()}


def count_parameters(model: PreTrainedModel) -> int:
    """Return the number of a model's parameters, with the weights that are quantised in its file.

    The model is not packed.
    """
    plain: int = model.num_parameters()
    return plain + sum(math.prod(one.shape) for one in stored_weights(model).values())


def refuse_quantised(model: PreTrainedModel) -> None:
    """Refuse a model that another library has loaded from quantised weights.

    Raises:
        ModelRefusedError: it is such a model.
    """
    config = getattr(model.config, "quantization_config", None)
    if config is not None or getattr(model, "hf_quantizer", None) is not None:
        raise ModelRefusedError(
            "the model's weights are quantized already, and only linear layers of torch can be "
            "compared with; give the directory of its files to engine.load, or a model with plain "
            "weights"
        )


def place_stored(model: PreTrainedModel, weights: StoredWeights) -> None:
    """Replace the linear layers of a model on the meta device whose weights are quantised.

    An output layer that is quantised is no longer tied to the embedding. Layers that the library
    leaves out, such as those that predict several tokens, are left out.

    Raises:
        ModelRefusedError: the model has no such layer, or one of another size.
    """
    names = model.state_dict().keys()
    renamings = [
        one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)
    ]
    output = model.get_output_embeddings()
    ignored: list[str] = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    for path, stored in weights.layers.items():
        name = f"{path}.weight"
        if name not in names:
            prefix = model.base_model_prefix
            name, _ = rename_source_key(name, renamings, [], prefix, dict.fromkeys(names))
        place = name.removesuffix(".weight")
        module = model.get_submodule(place) if name in names else None
        if module is None and any(re.search(one, path) for one in ignored):
            continue
        part, head = next(iter(stored.heads.items()))
        told = f"{head.file}: {path}.{part}"
        is_table = isinstance(module, torch.nn.Embedding) and stored.form.reads_rows
        if module is None or not (is_table or type(module) is torch.nn.Linear):
            what = "has no such layer" if module is None else f"has {type(module).__name__} there"
            raise ModelRefusedError(
                f"{told}: {type(model).__name__} {what}, and only linear layers are served "
                "quantized; give the config.json of these files, or the model that they were made "
                "from"
            )
        if tuple(module.weight.shape) != stored.shape:
            outputs, inputs = module.weight.shape
            raise ModelRefusedError(
                f"{told} is of {stored.inputs} inputs and {stored.outputs} outputs, and the layer "
                f"of {inputs} and {outputs}: config.json is of another "
                "model, or says another number of bits; get the config.json of these files"
            )
        if isinstance(module, torch.nn.Embedding):
            model.set_submodule(place, StoredEmbedding(stored, module))
            continue
        bias = module._parameters["bias"]
        if bias is None and "bias" in stored.heads:  # AutoGPTQ gives all layers one
            empty = torch.empty(stored.outputs, dtype=module.weight.dtype, device="meta")
            bias = torch.nn.Parameter(empty, requires_grad=False)
        model.set_submodule(place, StoredLinear(stored, module.weight.dtype, bias))
        if module is output:
            model.config.tie_word_embeddings = False
            model.all_tied_weights_keys.pop(name, None)


@register_quantization_config(_METHOD)
class StoredConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """What transformers hands to the quantizer, in the place of the file's own config."""

    def __init__(self, weights: StoredWeights, **_: Any) -> None:
        self.quant_method: Any = _METHOD
        self.weights = weights

    @override
    def to_dict(self) -> dict[str, Any]:
        """Return what can be written to a config.json."""
        return {"quant_method": _METHOD}


def quantization_config(weights: StoredWeights) -> dict[str, Any]:
    """Return what `quantization_config` must be for transformers to load these weights."""
    return {"quant_method": _METHOD, "weights": weights}


@register_quantizer(_METHOD)
class _StoredQuantizer(HfQuantizer):  # type: ignore[misc]
    """See the module."""

    quantization_config: StoredConfig

    @override
    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        place_stored(model, self.quantization_config.weights)

    @override
    def is_serializable(self, *_: Any, **__: Any) -> bool:
        raise ModelRefusedError(
            "a model from a quantized file is not saved here: copy its directory, or save the "
            "model that it was made from"
        )

    @property
    @override
    def is_trainable(self) -> bool:
        return False
