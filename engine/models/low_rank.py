"""What adapters add to linear layers: y += scale · B · (A · x), for the rows that have an adapter.

    Adapter.weights ─┬─ table ───▶ our decoder's call of all layers, with the step's AdaptedRows
                     └─ modules ─▶ `add_to`, for a layer that runs as a module

A is held as [r, K] and B as [r, N], in bfloat16 if the file has that, or else in float32, so no
element is rounded. Their elements lie in the order in which the kernels read them. Products are
summed in float32 and added to what the layer has stored, as peft does. Our kernels compute them: a
row's result depends neither on other rows nor on their adapters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from engine.contract.adapters import Adapter, AdapterRows
from engine.models import description as described
from engine.models.formats.native import DTYPES, native_library
from engine.native.library import (
    PARTS,
    TO_DOWN,
    TO_INNER,
    TO_OUTPUT,
    TO_PROJECTION,
    AdaptedRows,
    LowRank,
)

Matrix = npt.NDArray[Any]
_RANKS, _INPUTS, _OUTPUTS = 4, 32, 64
"""The sizes of what lies together in memory; see src/low_rank.cpp."""


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """What an adapter adds to one linear layer.

    Attributes:
        a: [r, K], bfloat16 or float32, in the order of `pack_a`.
        b: [r, N], of the same type: B transposed, in the order of `pack_b`.
        scale: multiplies the product.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def for_kernels(self, column: int = 0) -> LowRank:
        """Return it for the kernels, with the addresses of its tensors; see LowRank."""
        (rank, inputs), outputs = self.a.shape, self.b.shape[1]
        return LowRank(
            self.a.data_ptr(), self.b.data_ptr(), rank, inputs, outputs, column,
            DTYPES[self.a.dtype], self.scale,
        )  # fmt: skip


def pack_a(a: Matrix, to: Matrix) -> None:
    """Write A, [r, K], in the order in which the kernels read it: for each 4 ranks, for each 32
    inputs, rank after rank.
    """
    flat, inputs = to.reshape(-1), a.shape[1]
    for first in range(0, len(a), _RANKS):
        ranks = a[first : first + _RANKS]
        _pack(ranks, flat[first * inputs :][: ranks.size], _INPUTS)


def pack_b(b: Matrix, to: Matrix) -> None:
    """Write B transposed, [r, N], in the order in which the kernels read it: for each 64 outputs,
    rank after rank.
    """
    _pack(b, to.reshape(-1), _OUTPUTS)


def _pack(rows: Matrix, to: Matrix, width: int) -> None:
    high, columns = rows.shape
    whole = columns // width * width
    apart = rows[:, :whole].reshape(high, -1, width).transpose(1, 0, 2)
    to[: high * whole].reshape(apart.shape)[:] = apart
    to[high * whole :].reshape(high, -1)[:] = rows[:, whole:]


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Where our decoder computes a linear layer.

    Attributes:
        entry: the index in an adapter's table.
        column: its first column in the product.
    """

    entry: int
    column: int


class AdapterWeights:
    """An adapter's tensors, as they are computed.

    Attributes:
        table: the parts of all layers that our decoder computes.
        modules: the parts of other linear layers, by path, each as a table of one entry.
    """

    def __init__(
        self, parts: Mapping[str, LowRankPart], places: Mapping[str, PartPlace], num_layers: int
    ) -> None:
        """Prepare tables.

        Args:
            parts: by the path of the linear layer.
            places: those that our decoder computes.
            num_layers: the number of its layers.
        """
        self.table = (LowRank * (PARTS * num_layers))()
        self.modules: dict[str, ctypes.Array[LowRank]] = {}
        self._parts = tuple(parts.values())  # the tables have their addresses
        for path, part in parts.items():
            place = places.get(path)
            if place is None:
                self.modules[path] = (LowRank * 1)(part.for_kernels())
            else:
                self.table[place.entry] = part.for_kernels(place.column)


def decoder_places(decoder: described.Decoder, outputs: Mapping[str, int]) -> dict[str, PartPlace]:
    """Return where a decoder computes linear layers, by their paths.

    outputs: the layers' numbers of outputs.
    """
    places: dict[str, PartPlace] = {}
    for index, layer in enumerate(decoder.layers):
        products: list[tuple[int, tuple[str, ...]]] = []
        if isinstance(layer.mixer, described.Attention):
            products += [
                (TO_PROJECTION, layer.mixer.projection),
                (TO_OUTPUT, (layer.mixer.output,)),
            ]
        if isinstance(layer.mlp, described.Mlp):
            products += [(TO_INNER, layer.mlp.inner), (TO_DOWN, (layer.mlp.down,))]
        for first, paths in products:
            column = 0
            for part, path in enumerate(paths):
                places[path] = PartPlace(index * PARTS + first + part, column)
                column += outputs[path]
    return places


@dataclass(frozen=True, slots=True)
class StepTables:
    """A step's rows with adapters for the kernels, and what keeps it alive."""

    call: AdaptedRows
    held: tuple[object, ...]

    @classmethod
    def of(cls, rows: AdapterRows, tables: Sequence[int]) -> StepTables:
        """`tables`: the address of each adapter's table."""
        adapters = (ctypes.c_void_p * len(tables))(*tables)
        call = AdaptedRows(
            rows.rows.ctypes.data, rows.ends.ctypes.data, ctypes.addressof(adapters), len(tables)
        )
        return cls(call, (rows, adapters))

    @property
    def address(self) -> int:
        return ctypes.addressof(self.call)


def layer_tables(rows: AdapterRows, first: int) -> StepTables:
    """Return a step's rows for a call of all layers of our decoder from layer `first` on."""
    offset = first * PARTS * ctypes.sizeof(LowRank)
    tables = [ctypes.addressof(weights_of(one).table) + offset for one in rows.adapters]
    return StepTables.of(rows, tables)


def add_to(rows: AdapterRows, path: str, x: torch.Tensor, y: torch.Tensor) -> None:
    """Add to a linear layer's results what each row's adapter makes of its inputs.

    Args:
        rows: the step's rows with adapters.
        path: the layer's path.
        x: [..., K], of all the step's tokens in order.
        y: [..., N], contiguous; changed.
    """
    x, y = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    found = [weights_of(one).modules.get(path) for one in rows.adapters]
    if not any(found):
        return
    nothing = (LowRank * 1)()
    tables = [ctypes.addressof(nothing if one is None else one) for one in found]
    step = StepTables.of(rows, tables)
    x = x if x.stride(1) == 1 else x.contiguous()
    native_library().low_rank(
        step.address, 0, 1, x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0),
        DTYPES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip


def weights_of(adapter: Adapter) -> AdapterWeights:
    """Return an adapter's tensors."""
    if not isinstance(adapter.weights, AdapterWeights):
        raise TypeError(f"adapter {adapter.name} has other weights")
    return adapter.weights
