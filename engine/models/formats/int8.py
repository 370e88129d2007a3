"""Weights as int8 with a scale for each output, for bfloat16 inputs and results on a CPU.

Each element is a multiple of its row's scale, which is the row's largest absolute element / 127.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from engine.models.formats.native import Native, in_panels, why_missing


class Int8(Native):
    """A weight as int8 for our kernels; see Native."""

    name = "int8"
    share = 0.5
    changes_results = True
    bits = 8
    scales: torch.Tensor

    @classmethod
    @override
    def new_scales(cls, shape: tuple[int, ...]) -> torch.Tensor | None:
        return torch.zeros(in_panels(shape[0]))

    @classmethod
    @override
    def why_not(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu" or dtype is not torch.bfloat16:
            return (
                f"it is for bfloat16 on a CPU, and this is {dtype} on {device}; choose these, or "
                "none"
            )
        return why_missing()

    @classmethod
    @override
    def described(cls) -> str:
        return f"{super().described()}, as {cls.name}"

    @override
    def holds(self, weight: torch.Tensor, indices: torch.Tensor) -> bool:
        original = weight[indices].float()
        # Rounded to the next multiple of the scale, and then to bfloat16.
        bound = self.scales[indices, None] * 0.5 + original.abs() * 2**-7
        return bool(((self.rows(indices).float() - original).abs() <= bound).all())


FORMAT = Int8
