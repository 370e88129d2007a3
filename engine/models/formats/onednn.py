"""Weights packed by oneDNN, for processors with matrix tiles that our kernels cannot use."""

from __future__ import annotations

import torch
from typing_extensions import override

from engine.models.formats.weight_format import WeightFormat

_TYPICAL_ROWS = 16
"""The expected number of rows, on which oneDNN's packed layout may depend. Any number of rows can
be computed.
"""


class OneDnn(WeightFormat):
    """A weight in oneDNN's layout, which only oneDNN reads.

    Attributes:
        packed: the elements, in an opaque tensor.
    """

    name = "onednn"
    reads_rows = False
    packed: torch.Tensor

    @classmethod
    @override
    def why_not(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        has_bfloat16 = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
        if device.type == "cpu" and dtype is torch.bfloat16 and has_bfloat16:
            return None
        return "it is for bfloat16 on a CPU with instructions for it"

    @classmethod
    @override
    def described(cls) -> str:
        return "oneDNN"

    @override
    def pack(self, weight: torch.Tensor) -> None:
        weight = weight.detach().to(self.dtype).contiguous()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        if hasattr(self, "packed"):
            self.packed.data = packed
        else:
            self.packed = packed

    @override
    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return y

    @override
    def unpacked(self) -> torch.Tensor:
        weight: torch.Tensor = self.packed.to_dense()
        return weight
