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
        scales: for whole panels of rows; see LinearWeight. None if there are none.
    """

    name = "native"
    is_ours = True
    bits: int = 0
    group: int = 0
    packed: torch.Tensor
    scales: torch.Tensor | None

    @override
    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, memory: torch.Tensor | None = None
    ) -> None:
        super().__init__(shape, dtype, memory)
        if memory is None:
            memory = torch.empty(self.placed_bytes(shape, dtype), dtype=torch.uint8)
        self.packed = memory
        self.scales = self.new_scales(self.shape)

    @classmethod
    def new_scales(cls, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return scales of 0 for a weight, or None if it has none."""
        return None

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
        empty = LinearWeight(None, None, None, *shape, DTYPES[dtype], cls.bits, cls.group)
        size: int = native_library().linear_size(ctypes.byref(empty))
        return size

    @classmethod
    @override
    def held_bytes(cls, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        with torch.device("meta"):
            scales = cls.new_scales(shape)
        return cls.placed_bytes(shape, dtype) + (0 if scales is None else scales.nbytes)

    @override
    def slices(self, weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, Self]]:
        count = max(1, _SLICE_BYTES // (PANEL * self.shape[1] * weight.itemsize)) * PANEL
        start = 0
        for first in range(0, len(weight), count):
            rows, own = weight[first : first + count], copy.copy(self)
            own.shape = (len(rows), self.shape[1])
            end = start + self.placed_bytes(own.shape, self.dtype)
            own.packed, start = self.packed[start:end], end
            if self.scales is not None:
                a_row = len(self.scales) // in_panels(self.shape[0])
                own.scales = self.scales[first * a_row : (first + count) * a_row]
            yield rows, own

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
        return LinearWeight(
            self.packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if self.scales is None else self.scales.data_ptr(),
            *self.shape,
            DTYPES[self.dtype],
            self.bits,
            self.group,
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
            form = (self.bits, self.group)
            return _multiply_opaquely(x, self.packed, self.scales, bias, *self.shape, *form)
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
            return _read_opaquely(
                *(self.packed, self.scales, indices, self.shape[0], self.shape[1], self.dtype),
                *(self.bits, self.group),
            )
        wanted = indices.long().contiguous()
        result = torch.empty((*indices.shape, self.shape[1]), dtype=self.dtype)
        if not native_library().linear_rows(
            ctypes.byref(self.for_kernels(None)),
            wanted.data_ptr(),
            wanted.numel(),
            result.data_ptr(),
            torch.get_num_threads(),
        ):
            raise IndexError(f"index out of range: rows must be between 0 and {self.shape[0] - 1}")
        return result


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


@operation(
    "packed_linear(Tensor x, Tensor packed, Tensor? scales, Tensor? bias, int outputs, int inputs, "
    "int bits, int group) -> Tensor",
    lambda x, packed, scales, bias, outputs, *_: x.new_empty((*x.shape[:-1], outputs)),
)
def _multiply_opaquely(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    outputs: int,
    inputs: int,
    bits: int,
    group: int,
) -> torch.Tensor:
    return _weight(packed, scales, (outputs, inputs), x.dtype, bits, group).multiply(x, bias)


@operation(
    "packed_rows(Tensor packed, Tensor? scales, Tensor rows, int outputs, int inputs, "
    "ScalarType dtype, int bits, int group) -> Tensor",
    lambda packed, scales, rows, outputs, inputs, dtype, *_: packed.new_empty(
        (*rows.shape, inputs), dtype=dtype
    ),
)
def _read_opaquely(
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    rows: torch.Tensor,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    bits: int,
    group: int,
) -> torch.Tensor:
    return _weight(packed, scales, (outputs, inputs), dtype, bits, group).rows(rows)


def _weight(
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    bits: int,
    group: int,
) -> Native:
    weight = Native(shape, dtype, packed)
    weight.scales, weight.bits, weight.group = scales, bits, group
    return weight
