"""Linear layers with weights packed by oneDNN, for processors with matrix tiles. oneDNN uses these
tiles, and our kernels do not.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from engine.models.held_layer import HeldLayer
from engine.models.packed import without_gradients

_TYPICAL_ROWS = 16
"""The expected number of rows, on which oneDNN's packed layout may depend. Any number of rows can
be computed.
"""


class OneDnnLinear(HeldLayer):
    """Replaces a torch.nn.Linear in bfloat16."""

    bias: torch.nn.Parameter | None

    def __init__(self, linear: torch.nn.Linear) -> None:
        """Make a layer that computes the same as `linear`, without keeping its weight."""
        super().__init__((linear.out_features, linear.in_features), torch.bfloat16)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("bias", linear.bias)
        self._held: list[torch.Tensor] = []  # the same list for its twin in a view
        self.hold(linear.weight.detach())

    @override
    def unpacked(self) -> torch.Tensor:
        weight: torch.Tensor = self._held[0].to_dense()
        return weight

    @override
    def hold(self, weight: torch.Tensor) -> None:
        self._held[:] = [
            torch.ops.mkldnn._reorder_linear_weight(
                weight.to(torch.bfloat16).contiguous(), _TYPICAL_ROWS
            )
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer: [..., K] → [..., N]."""
        self.sync()
        packed, bias = self._held[0], self.bias
        linear = torch.ops.mkldnn._linear_pointwise
        return without_gradients(x, bias, lambda: linear(x, packed, bias, "none", [], ""))

    def extra_repr(self) -> str:
        """Return the arguments for `repr`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, oneDNN"
