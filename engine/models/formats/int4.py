"""Weights as int4 with a scale for each group of 32 inputs of an output, for bfloat16 inputs and
results on a CPU.

Each element is one of the multiples -8 to 7 of its group's scale, a float16. The kernel tries 24
scales for a group and takes the one with the least squared error. The output layer and embeddings
are int8: rounding them to 4 bits would cost a third of the whole error more, for little memory.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from engine.models.formats.codes import Layout
from engine.models.formats.int8 import Int8
from engine.models.formats.weight_format import WeightFormat


class Int4(Int8):
    """A weight as int4 for our kernels; see Native."""

    name = "int4"
    bits = 4
    group = 32

    @classmethod
    @override
    def of_tables(cls) -> type[WeightFormat]:
        return Int8

    @classmethod
    @override
    def described(cls) -> str:
        return f"{super().described()}, the output layer as {Int8.name}"

    @classmethod
    @override
    def layout_of(cls, shape: tuple[int, ...]) -> Layout:
        return Layout(cls.bits, cls.group, has_minima=False, scale_dtype=torch.float16)

    @override
    def holds(self, weight: torch.Tensor, indices: torch.Tensor) -> bool:
        original = weight[indices].float()
        scales = self.codes(indices).scales.repeat_interleave(self.group, 1)[:, : self.shape[1]]
        # Rounded to the nearest multiple that there is, and then to bfloat16. A scale may be
        # negative, so that a group's largest element is 8 times it.
        first, last = -8 * scales, 7 * scales
        nearest = original.clamp(torch.minimum(first, last), torch.maximum(first, last))
        bound = scales.abs() * 0.501 + original.abs() * 2**-7
        return bool(((self.rows(indices).float() - nearest).abs() <= bound).all())


FORMAT = Int4
