"""Makes up weights for a model whose own weights are not available.

    the model on the meta device ─▶ parameters and buffers, then packed layers, of the right shapes

There are only a few weights of each shape, which the layers share in rotation. There are enough
that a processor's cache cannot hold them all, unless the model is so small that it has fewer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import torch
from transformers import PreTrainedModel

from engine.loading.packing import packs_stored, shared_weights
from engine.loading.quantised.stored_linear import StoredModule, stored_modules, stored_weights
from engine.loading.stored_packing import packed_module
from engine.models.formats.codes import Codes
from engine.models.formats.grouped import Grouped, held_bytes
from engine.models.formats.native import packed_bytes
from engine.models.formats.registry import Format
from engine.models.formats.weight_format import WeightFormat
from engine.models.held_layer import PackedEmbedding, PackedLinear

UNCACHED_BYTES = 64 << 20
"""The total size of the weights of one shape: more than a processor's cache retains of them while
other weights are read, too.
"""
_TILE = (1 << 20) - 3
"""The number of made-up numbers before they repeat, chosen so that the rows of a matrix differ."""

_CHUNK_BYTES = 256 << 20
_ALIGNED = 64

_Made = TypeVar("_Made")


class Rings:
    """A few objects of each kind, which are given out in rotation."""

    def __init__(self) -> None:
        self._rings: defaultdict[Hashable, list[object]] = defaultdict(list)
        self._bytes: defaultdict[Hashable, int] = defaultdict(int)
        self._given: defaultdict[Hashable, int] = defaultdict(int)

    def take(self, kind: Hashable, size: int, make: Callable[[], _Made]) -> _Made:
        """Return an object of a kind: a new one of `size` bytes, or an existing one if there are
        enough.
        """
        ring = self._rings[kind]
        if self._bytes[kind] < UNCACHED_BYTES:
            self._bytes[kind] += size
            ring.append(make())
            return cast("_Made", ring[-1])
        self._given[kind] += 1
        return cast("_Made", ring[(self._given[kind] - 1) % len(ring)])


class Numbers:
    """Small random numbers to fill tensors with. They repeat, but each tensor gets different
    ones.
    """

    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(0)
        self._tile = torch.randn(_TILE, generator=chance) * 0.02
        self._next = 0

    def fill(self, flat: torch.Tensor) -> None:
        """Fill a tensor [N] with numbers."""
        numbers, done = self._tile.to(flat.dtype), 0
        while done < len(flat):
            part = numbers[self._next : self._next + len(flat) - done]
            flat[done : done + len(part)] = part
            done += len(part)
            self._next = (self._next + len(part)) % _TILE

    def like(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of numbers."""
        flat = torch.empty(math.prod(shape), dtype=dtype)
        self.fill(flat)
        return flat.view(*shape)


class TooLargeError(Exception):
    """Even a few weights of each shape do not fit."""


class _Weights:
    """Makes up weights. most_bytes: the maximum total size."""

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0
        self._rings = Rings()
        self._numbers = Numbers()

    def like(self, one: torch.Tensor) -> torch.Tensor:
        """Return a made-up tensor to replace one on the meta device."""
        shape, dtype = tuple(one.shape), one.dtype
        return self._rings.take((shape, dtype), one.nbytes, lambda: self._new(shape, dtype))

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return small random numbers, or ones for vectors, most of which are scales."""
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype)
        if len(shape) < 2:
            return torch.ones(shape, dtype=dtype)
        self._take(math.prod(shape) * dtype.itemsize)
        return self._numbers.like(shape, dtype)

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise TooLargeError

    def _place(self, size: int) -> torch.Tensor:
        """Return memory that has not been written yet, together with that of other weights."""
        if size > len(self._chunk) - self._used:
            # Only what is written takes memory.
            self._chunk = torch.empty(max(size, _CHUNK_BYTES), dtype=torch.uint8)
            self._used = 0
        part = self._chunk[self._used : self._used + size]
        self._used += -(-size // _ALIGNED) * _ALIGNED
        return part

    def packed(self, weight: torch.Tensor, how: Format) -> WeightFormat:
        """Return a made-up packed weight to replace a weight on the meta device."""
        shape, dtype = weight.shape, weight.dtype
        size = how.held_bytes(shape, dtype)

        def make() -> WeightFormat:
            self._take(size)
            held = how(shape, dtype, self._place(how.placed_bytes(shape, dtype)))
            for rows, own in held.slices(weight):
                own.pack(self._numbers.like(rows.shape, dtype))
            return held

        return self._rings.take((how, shape, dtype), size, make)

    def stored(self, one: StoredModule) -> Grouped:
        """Return a made-up packed weight to replace one that is quantised in its file."""
        layout = replace(one.stored.layout, order=None)
        size = held_bytes(one.shape, layout)

        def make() -> Grouped:
            self._take(size)
            bits = layout.bits
            held = Grouped(
                one.shape, one.dtype, layout, self._place(packed_bytes(one.shape, one.dtype, bits))
            )
            for part in one.slices():
                count = part.stop - part.start
                numbers = self._numbers.like((count, one.shape[1]), torch.float32)
                codes = (numbers * (1 << bits)).int() + (1 << (bits - 1))
                groups = -(-one.shape[1] // layout.group)
                scales, factors = torch.full((count, groups), 2.0**-6), None
                if layout.per_factor:
                    kinds = 1 + layout.has_minima
                    factors = scales[:, : groups // layout.per_factor].repeat(1, kinds)
                    scales = torch.ones_like(scales)
                minima = -scales if layout.has_minima else None
                held.pack_codes(part.start, Codes(codes.to(torch.uint8), scales, minima, factors))
            return held

        return self._rings.take((Grouped, one.shape, layout), size, make)


def make_up(model: PreTrainedModel, packing: Format | None, most_bytes: int) -> None:
    """Replace the weights of a model on the meta device by made-up ones, packed as a server would.

    Raises:
        TooLargeError: they would take more than `most_bytes` bytes.
    """
    weights = _Weights(most_bytes)
    groups = list(shared_weights(model, packing))
    in_linears = {id(group.weight) for group in groups}
    unpacked = {id(group.weight) for group in groups if not group.is_ours}
    made: dict[int, torch.nn.Parameter] = {}
    modules = stored_modules(model)
    for stored in stored_weights(model).values():
        if packs_stored(stored, packing):
            own = weights.stored(stored)
            for name, module in modules.items():
                if module.stored is stored.stored:
                    model.set_submodule(name, packed_module(module, own))
    for module in model.modules():
        for name, one in module._parameters.items():
            is_packed = id(one) in in_linears and (
                isinstance(module, torch.nn.Linear) or id(one) not in unpacked
            )
            if one is not None and not is_packed:
                if id(one) not in made:
                    made[id(one)] = torch.nn.Parameter(weights.like(one), requires_grad=False)
                module._parameters[name] = made[id(one)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = weights.like(buffer)
    for group in groups:
        held = weights.packed(group.weight, group.how)
        for name, linear in group.linears.items():
            model.set_submodule(name, PackedLinear(held, linear))
        if group.is_ours:
            for name, embedding in group.embeddings.items():
                model.set_submodule(name, PackedEmbedding(held, embedding))
