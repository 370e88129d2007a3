"""Weights in the order in which the native kernels read them: bfloat16, or float32.

Packing moves elements without changing them. The types of elements are those of inputs and results.
"""

from __future__ import annotations

import copy
import ctypes
import math
import mmap
import sys
from collections.abc import Iterator
from functools import cache
from typing import Self

import torch
from typing_extensions import override

from engine.models.formats.weight_format import WeightFormat
from engine.native.library import (
    BFLOAT16,
    FLOAT32,
    LinearWeight,
    NativeLibrary,
    NativeUnavailableError,
    load_library,
)
from engine.native.torch_library import operation

PANEL = 64
"""Biases are padded to a multiple of this many elements, so that the kernel reads whole vectors."""
_SLICE_BYTES = 16 << 20
"""The approximate size of the slices in which elements are converted and packed."""
_LARGE_PAGE = 2 << 20
"""The size in bytes of a large page on most processors. Smaller regions cannot have any."""
DTYPES = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}
"""The supported dtypes of models, and the kernels' codes for them."""
_Tensor = torch.Tensor | None
_Parts = tuple[torch.Tensor, _Tensor, _Tensor, _Tensor, _Tensor, int, int, int, int]
"""A weight for an operation that a compiler sees as a single call: packed, scales, minima, factors,
order, N, K, bits and group.
"""
OF_GROUPS = ("scales", "minima", "factors")
"""The attributes of a weight that belong to groups of inputs."""


@cache
def native_library() -> NativeLibrary:
    """Return the kernels, which are loaded on the first call.

    Raises:
        NativeUnavailableError: the kernels cannot be used here.
    """
    return load_library()


def why_missing() -> str | None:
    """Return why the kernels cannot be used here, or None if they can."""
    try:
        native_library()
    except NativeUnavailableError as error:
        return str(error)
    return None


class Native(WeightFormat):
    """A weight for our kernels.

    Attributes:
        bits, group: see LinearWeight.
        packed: uint8, the elements. The weights of a model are adjacent.
        scales, minima, factors: for whole panels of rows; see LinearWeight. None if there are none.
        order: int32 [K]; see LinearWeight. None if there is none.
    """

    name = "native"
    is_ours = True
    bits: int = 0
    group: int = 0
    packed: torch.Tensor
    scales: torch.Tensor | None = None
    minima: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def of_groups(self) -> tuple[torch.Tensor | None, ...]:
        """Scales, minima and factors."""
        return self.scales, self.minima, self.factors

    @property
    def per_factor(self) -> int:
        """The number of groups that share factors; 0: there are none."""
        if self.factors is None:
            return 0
        return sum(len(one) for one in self.of_groups[:2] if one is not None) // len(self.factors)

    @override
    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, memory: torch.Tensor | None = None
    ) -> None:
        super().__init__(shape, dtype, memory)
        if memory is None:
            memory = torch.empty(packed_bytes(shape, dtype, self.bits), dtype=torch.uint8)
        self.packed = memory

    @classmethod
    @override
    def why_not(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu" or dtype not in DTYPES:
            return f"only bfloat16 and float32 on a CPU are packed, and this is {dtype} on {device}"
        missing = why_missing()
        if missing is not None:
            return missing
        isa = native_library().isa
        if dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported() and isa != "amx":
            return "its kernels lack the tiles of this processor, which are faster for many rows"
        if isa == "portable":
            return "there is no kernel for this kind of processor"
        return None

    @classmethod
    @override
    def described(cls) -> str:
        isa: str = native_library().isa
        return isa

    @classmethod
    @override
    def placed_bytes(cls, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return packed_bytes(shape, dtype, cls.bits)

    @classmethod
    @override
    def held_bytes(cls, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return packed_bytes(shape, dtype)

    def part(self, first: int, count: int) -> Self:
        """Return the part of this weight that holds some outputs.

        first, count: multiples of PANEL, except for the last part's count.
        """
        own, (outputs, inputs) = copy.copy(self), self.shape
        own.shape = (count, inputs)
        start = packed_bytes((first, inputs), self.dtype, self.bits)
        size = packed_bytes(own.shape, self.dtype, self.bits)
        own.packed = self.packed[start : start + size]
        for name in OF_GROUPS:
            whole = getattr(self, name)
            if whole is not None:
                a_row = len(whole) // in_panels(outputs)
                setattr(own, name, whole[first * a_row : (first + in_panels(count)) * a_row])
        return own

    @override
    def slices(self, weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, Self]]:
        count = max(1, _SLICE_BYTES // (PANEL * self.shape[1] * weight.itemsize)) * PANEL
        for first in range(0, len(weight), count):
            rows = weight[first : first + count]
            yield rows, self.part(first, len(rows))

    @override
    def pack(self, weight: torch.Tensor) -> None:
        weight = weight.to(self.dtype)
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        ask_for_large_pages(self.packed)
        native_library().linear_pack(
            ctypes.byref(self.for_kernels(None)),
            weight.data_ptr(),
            weight.stride(0),
            torch.get_num_threads(),
        )

    @override
    def padded(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        if bias is None:
            return None
        padded = torch.zeros(in_panels(len(bias)))
        padded[: len(bias)] = bias.detach()
        return padded

    def for_kernels(self, bias: torch.Tensor | None) -> LinearWeight:
        """Return the weight for the kernels, with the addresses of its tensors.

        bias: see `padded`.
        """
        tensors = (self.packed, bias, *self.of_groups, self.order)
        return LinearWeight(
            *(None if one is None else one.data_ptr() for one in tensors),
            *self.shape,
            DTYPES[self.dtype],
            self.bits,
            self.group,
            *(0 if one is None else 8 * one.itemsize for one in self.of_groups[:2]),
            max(0, self.per_factor.bit_length() - 1),
        )

    @override
    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, finished: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x · Wᵀ + bias: [..., K] → [..., N].

        Args:
            x, bias: see WeightFormat.
            finished: bfloat16 [65536], the value that replaces each result, indexed by the result's
                bits. Only for bfloat16 x.

        Raises:
            RuntimeError: x has another type or width, or is not on the CPU, as with torch's own
                layer.
        """
        if x.dtype is not self.dtype or x.shape[-1] != self.shape[1] or not x.is_cpu:
            raise RuntimeError(
                f"this packed linear layer takes {self.dtype} [..., {self.shape[1]}] on the CPU, "
                f"and was given {x.dtype} {list(x.shape)} on {x.device}"
            )
        if torch.compiler.is_compiling():
            return _multiply_opaquely(x, bias, *self._parts())
        shape, (outputs, inputs) = x.shape, self.shape
        if not x.is_contiguous():
            x = x.reshape(-1, inputs)
            x = x if x.stride(1) == 1 else x.contiguous()
        y = x.new_empty((*shape[:-1], outputs))
        weight = self.for_kernels(bias)
        if finished is not None:
            weight.finished = finished.data_ptr()
        native_library().linear(
            ctypes.byref(weight),
            x.data_ptr(),
            x.stride(0) if x.dim() == 2 else inputs,
            y.data_ptr(),
            outputs,
            math.prod(shape[:-1]),
            torch.get_num_threads(),
        )
        return y

    @override
    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return _read_opaquely(indices, self.dtype, *self._parts())
        return self._read(indices, self.for_kernels(None), self.dtype)

    def _read(
        self, indices: torch.Tensor, weight: LinearWeight, dtype: torch.dtype
    ) -> torch.Tensor:
        wanted = indices.long().contiguous()
        result = torch.empty((*indices.shape, self.shape[1]), dtype=dtype)
        if not native_library().linear_rows(
            ctypes.byref(weight),
            wanted.data_ptr(),
            wanted.numel(),
            result.data_ptr(),
            torch.get_num_threads(),
        ):
            raise IndexError(f"index out of range: rows must be between 0 and {self.shape[0] - 1}")
        return result

    def _parts(self) -> _Parts:
        tensors = (self.packed, self.scales, self.minima, self.factors, self.order)
        return (*tensors, *self.shape, self.bits, self.group)


def packed_bytes(shape: tuple[int, ...], dtype: torch.dtype, bits: int = 0) -> int:
    """Return how many bytes packed elements take. bits: see LinearWeight."""
    empty = LinearWeight(outputs=shape[0], inputs=shape[1], dtype=DTYPES[dtype], bits=bits)
    size: int = native_library().linear_size(ctypes.byref(empty))
    return size


def in_panels(outputs: int) -> int:
    """Return the length of a bias for so many outputs."""
    return -(-outputs // PANEL) * PANEL


def ask_for_large_pages(packed: torch.Tensor) -> None:
    """Ask the system for large pages before memory is written for the first time.

    A step reads all weights. If memory is fragmented, translating the address of each 4 KiB page
    takes longer than reading it (docs/performance.md).
    """
    storage = packed.untyped_storage()
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (storage.data_ptr() + storage.nbytes() - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and length >= _LARGE_PAGE:
        # A kernel without large pages refuses, and nothing is lost.
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE
        )


_PARTS = (
    "Tensor packed, Tensor? scales, Tensor? minima, Tensor? factors, Tensor? order, int outputs, "
    "int inputs, int bits, int group"
)
"""The arguments of operations for what `_parts` returns."""


@operation(
    f"packed_linear(Tensor x, Tensor? bias, {_PARTS}) -> Tensor",
    lambda x, bias, packed, scales, minima, factors, order, outputs, *_: x.new_empty(
        (*x.shape[:-1], outputs)
    ),
)
def _multiply_opaquely(x: torch.Tensor, bias: torch.Tensor | None, *parts: *_Parts) -> torch.Tensor:
    return _weight(x.dtype, *parts).multiply(x, bias)


@operation(
    f"packed_rows(Tensor rows, ScalarType dtype, {_PARTS}) -> Tensor",
    lambda rows, dtype, packed, scales, minima, factors, order, outputs, inputs, *_: (
        packed.new_empty((*rows.shape, inputs), dtype=dtype)
    ),
)
def _read_opaquely(rows: torch.Tensor, dtype: torch.dtype, *parts: *_Parts) -> torch.Tensor:
    return _weight(dtype, *parts).rows(rows)


def _weight(dtype: torch.dtype, *parts: *_Parts) -> Native:
    packed, scales, minima, factors, order, outputs, inputs, bits, group = parts
    weight = Native((outputs, inputs), dtype, packed)
    weight.scales, weight.minima, weight.factors, weight.order = scales, minima, factors, order
    weight.bits, weight.group = bits, group
    return weight
