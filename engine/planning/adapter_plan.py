"""Adapters in a plan: which layers they change, what they take, and how long they take in steps.

    model on the meta device ─▶ called_with_all_rows ─┐
    our decoder's description ────────────────────────┴─▶ adaptable_layers ─▶ AdapterPlan

A plan is of adapters that change all layers that a server would let them change, each with the same
rank. Their memory is counted by the function that a server uses (`part_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.contract.adapters import Adapter
from engine.loading.adapters.adapter_loading import part_bytes
from engine.loading.quantised.stored_linear import StoredLinear
from engine.models.description import Decoder, Experts
from engine.models.low_rank import AdapterWeights, LowRankPart, PartPlace, decoder_places
from engine.planning.synthetic_weights import Numbers, Rings

Shapes = Mapping[str, tuple[int, int]]
"""The inputs and outputs of linear layers, by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlan:
    """Adapters that are loaded at the same time.

    Attributes:
        count: how many there are.
        rank: of each, in all layers.
        layers: the linear layers that each changes.
        dtype: the type of their tensors.
    """

    count: int
    rank: int
    layers: Shapes
    dtype: torch.dtype

    @property
    def each_bytes(self) -> int:
        """The memory of one adapter."""
        return sum(part_bytes(self.rank, shape, self.dtype) for shape in self.layers.values())

    @property
    def total_bytes(self) -> int:
        """The memory of all of them."""
        return self.count * self.each_bytes

    @property
    def elements(self) -> int:
        """The numbers of one adapter."""
        return self.rank * sum(sum(shape) for shape in self.layers.values())

    def made_up(self, most: int, places: Mapping[str, PartPlace], layers: int) -> list[Adapter]:
        """Make up adapters, of which there are `most` at most. There are only a few tensors of each
        shape, which they use in turn.

        Args:
            most: the largest number.
            places: the layers that our decoder computes.
            layers: the number of its layers.
        """
        rings, numbers = Rings(), Numbers()

        def take(rank: int, width: int) -> torch.Tensor:
            kind = rank, width
            size = rank * width * self.dtype.itemsize
            return rings.take(kind, size, lambda: numbers.like(kind, self.dtype))

        def one(index: int) -> Adapter:
            parts = {
                path: LowRankPart(take(self.rank, inputs), take(self.rank, outputs), 1.0)
                for path, (inputs, outputs) in self.layers.items()
            }
            weights = AdapterWeights(parts, places, layers)
            size = self.each_bytes
            return Adapter(str(index), bytes(32), self.rank, size, len(parts), "", weights)

        return [one(index) for index in range(min(self.count, most))]


def linear_shapes(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return the linear layers of a model on the meta device, but for the output layer."""
    output, found = model.get_output_embeddings(), dict[str, tuple[int, int]]()
    for path, one in model.named_modules():
        if one is output:
            continue
        if isinstance(one, Conv1D):
            found[path] = (int(one.weight.shape[0]), int(one.weight.shape[1]))
        elif isinstance(one, nn.Linear | StoredLinear):
            found[path] = (one.in_features, one.out_features)
    return found


@contextmanager
def called_with_all_rows(
    model: PreTrainedModel, paths: Iterable[str], rows: int
) -> Iterator[list[str]]:
    """Yield the paths of the modules that are called once, with this many rows, inside the `with`
    block. They are known at its end.
    """
    calls: dict[str, list[int]] = {path: [] for path in paths}

    def note(seen: list[int], _: nn.Module, given: tuple[Any, ...]) -> None:
        seen.append(given[0].numel() // given[0].shape[-1] if given else 0)

    found: list[str] = []
    with ExitStack() as hooks:
        for path, seen in calls.items():
            module = model.get_submodule(path)
            hooks.callback(module.register_forward_pre_hook(partial(note, seen)).remove)
        yield found
    found.extend(path for path, seen in calls.items() if seen == [rows])


def adaptable_layers(
    shapes: Shapes, decoder: Decoder | None, called: Iterable[str], apart: Iterable[str]
) -> dict[str, tuple[int, int]]:
    """Return the linear layers that a server lets adapters change.

    Args:
        shapes: all linear layers but the output layer.
        decoder: what our decoder would compute; None if the model runs as it is.
        called: the layers that are given all rows of a step.
        apart: the paths of modules that are called for each request.
    """
    if decoder is None:
        others = tuple(f"{path}." for path in apart)
        return {path: shapes[path] for path in called if not path.startswith(others)}
    outputs = {path: shape[1] for path, shape in shapes.items()}
    modules = [one.mlp.module for one in decoder.layers if isinstance(one.mlp, Experts)]
    inside = tuple(f"{path}." for path in modules)
    paths = [*decoder_places(decoder, outputs), *(one for one in called if one.startswith(inside))]
    return {path: shapes[path] for path in paths}
