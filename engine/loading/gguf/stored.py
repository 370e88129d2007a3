"""A GGUF file's tensors as weights of transformers' model: quantised ones stay as they are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig
from typing_extensions import override

from engine.contract.errors import ModelRefusedError
from engine.loading.gguf.container import open_container
from engine.loading.gguf.described import check_config
from engine.loading.gguf.naming import ARCHITECTURES, Weight, architecture_of, weights_of
from engine.loading.quantised.registry import StoredWeights
from engine.loading.quantised.stored_format import StoredForm, StoredLayer, Tensors
from engine.loading.tensor_heads import TensorHead
from engine.models.formats.codes import Codes, Layout

_BLOCKS = "blocks"
_EMBEDDING, _OUTPUT = "model.embed_tokens", "lm_head"


class GgufForm(StoredForm):
    """A weight of a GGUF file. Its only part is `blocks`, uint8 [N, bytes of a row]."""

    reads_rows = True

    def __init__(self, weight: Weight, kinds: Sequence[str]) -> None:
        """Describe one weight. kinds: those of the file, that of most elements first."""
        self.weight, self.kind, self.kinds = weight, weight.tensor.kind, kinds

    @property
    @override
    def described(self) -> str:
        return f"GGUF {', '.join(self.kinds)}"

    @property
    @override
    def label(self) -> str:
        return f"gguf-{self.kinds[0].lower()}"

    @override
    def part_type(self, part: str, head: TensorHead) -> torch.dtype:
        return torch.uint8

    @override
    def codes(self, tensors: Tensors, layout: Layout, outputs: slice) -> Codes:
        return self.kind.codes(self._blocks(tensors, outputs))

    @override
    def values(self, tensors: Tensors, outputs: slice) -> torch.Tensor:
        return self.kind.values(self._blocks(tensors, outputs))

    @override
    def look_up(self, tensors: Tensors, indices: torch.Tensor) -> torch.Tensor:
        return self.kind.values(self._blocks(tensors, indices))

    def _blocks(self, tensors: Tensors, outputs: slice | torch.Tensor) -> torch.Tensor:
        order = self.weight.order
        return tensors[_BLOCKS][outputs if order is None else order[outputs]]


def read_gguf(path: Path, config: PreTrainedConfig) -> StoredWeights:
    """Return the weights of the GGUF file in a directory.

    Raises:
        ModelRefusedError: it is damaged, or not of the model that the config describes.
    """
    container = open_container(path)
    architecture, text_config = architecture_of(container), config.get_text_config()
    if text_config.model_type not in architecture.model_types:
        fits = [name for name, one in ARCHITECTURES.items()
                if text_config.model_type in one.model_types]  # fmt: skip
        raise ModelRefusedError(
            f"{container.files[0]} is of architecture "
            f"{container.metadata['general.architecture']!r}, and config.json of model type "
            f"{text_config.model_type!r}, which is {fits[0] if fits else 'not served from GGUF'}: "
            "put the config.json of this file's model beside it"
        )
    check_config(container, text_config)
    heads = text_config.num_attention_heads
    weights = weights_of(container, heads, getattr(text_config, "num_key_value_heads", heads))
    table = weights.get(f"{_EMBEDDING}.weight")
    if f"{_OUTPUT}.weight" in weights:
        config.tie_word_embeddings = False  # the file decides
    elif table is not None and config.tie_word_embeddings:
        weights[f"{_OUTPUT}.weight"] = table
    sizes: Counter[str] = Counter()
    for tensor in container.tensors.values():
        if tensor.kind.layout is not None:
            sizes[tensor.kind.name] += math.prod(tensor.shape)
    kinds = [name for name, _ in sizes.most_common()]
    layers: dict[str, StoredLayer] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if weight.tensor.kind.layout is None:
            tensors[name] = weight.elements()
            continue
        module = name.removesuffix(".weight")
        is_tied = weight is table and _EMBEDDING in layers
        layers[module] = layers[_EMBEDDING] if is_tied else _layer(module, weight, kinds)
        tensors[f"{module}.{_BLOCKS}"] = weight.tensor.data
    if not layers:
        raise ModelRefusedError(
            f"{container.files[0]} has no quantised weights: give the directory of the model that "
            "it was made from, with config.json and *.safetensors"
        )
    return StoredWeights(next(iter(layers.values())).form, layers, tensors)


def _layer(module: str, weight: Weight, kinds: Sequence[str]) -> StoredLayer:
    tensor, layout = weight.tensor, weight.tensor.kind.layout
    if layout is None or len(tensor.shape) != 2:
        raise ModelRefusedError(
            f"{tensor.file}: {tensor.name!r} has the sizes {list(tensor.shape)} in "
            f"{tensor.kind.name}, and only matrices are served quantised; get another file"
        )
    head = TensorHead(tensor.file, "U8", tuple(tensor.data.shape), tensor.data.nbytes)
    return StoredLayer(module, GgufForm(weight, kinds), {_BLOCKS: head}, *tensor.shape, layout)
