"""Linear layers with weights packed by oneDNN, for processors with matrix tiles, which oneDNN uses
and our kernels do not.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.models.packed import without_gradients

_TYPICAL_ROWS = 16
"""The expected number of rows, on which oneDNN's packed form may depend; any number can be
computed.
"""


class OneDnnLinear(torch.nn.Module):
    """Stands for a torch.nn.Linear of bfloat16."""

    bias: torch.nn.Parameter | None

    def __init__(self, linear: torch.nn.Linear) -> None:
        """Make a layer that computes the same as `linear`, without keeping its weight."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("bias", linear.bias)
        # Empty, but present: a model's dtype and device are those of its first parameter.
        nothing = torch.empty(0, dtype=torch.bfloat16)
        self.register_parameter("_dtype", torch.nn.Parameter(nothing, requires_grad=False))
        self._packed = torch.ops.mkldnn._reorder_linear_weight(
            linear.weight.detach(), _TYPICAL_ROWS
        )

    @property
    def weight(self) -> torch.Tensor:
        """bfloat16 [N, K]: a copy, made when it is asked for."""
        weight: torch.Tensor = self._packed.to_dense()
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] → [..., N]."""
        packed, bias = self._packed, self.bias
        linear = torch.ops.mkldnn._linear_pointwise
        return without_gradients(x, bias, lambda: linear(x, packed, bias, "none", [], ""))

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}_dtype"]
        destination[f"{prefix}weight"] = self.weight

    def extra_repr(self) -> str:
        """The arguments that str() shows."""
        return f"in_features={self.in_features}, out_features={self.out_features}, oneDNN"
