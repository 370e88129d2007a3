"""Weights as int8 with a scale for each output, for bfloat16 inputs and results on a CPU.

Each element is a multiple of its row's scale, which is the row's largest absolute element / 127.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from engine.models.formats.codes import Layout
from engine.models.formats.grouped import Grouped, held_bytes
from engine.models.formats.native import Native


class Int8(Grouped):
    """A weight as int8 for our kernels; see Grouped."""

    name = "int8"
    is_writable = True
    bits = 8

    @override
    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, memory: torch.Tensor | None = None
    ) -> None:
        super().__init__(shape, dtype, self.layout_of(shape), memory)

    @classmethod
    def layout_of(cls, shape: tuple[int, ...]) -> Layout:
        """Return what all outputs of such a weight have in common."""
        return Layout(cls.bits, shape[1], has_minima=False)

    @classmethod
    @override
    def held_bytes(cls, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return held_bytes(shape, cls.layout_of(shape))

    @classmethod
    @override
    def described(cls) -> str:
        return f"{super().described()}, as {cls.name}"

    @override
    def pack(self, weight: torch.Tensor) -> None:
        Native.pack(self, weight)

    @override
    def holds(self, weight: torch.Tensor, indices: torch.Tensor) -> bool:
        original = weight[indices].float()
        # Rounded to the next multiple of the scale, and then to bfloat16.
        bound = self.scales[indices, None] * 0.5 + original.abs() * 2**-7
        return bool(((self.rows(indices).float() - original).abs() <= bound).all())


FORMAT = Int8
