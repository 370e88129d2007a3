"""Linear layers and embeddings whose weights are packed; see `engine.models.formats`.

Reading a layer's `weight` unpacks it, and writing to it packs the new values
(`engine.models.packed_weight`), as does `load_state_dict`. These layers do not support gradients: a
backward pass through one raises an error, so that nobody unknowingly trains only the rest of a
model. Converting the model (`model.to(dtype)`) leaves packed weights unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from engine.contract.errors import NoGradientsError
from engine.models.formats.interface import WeightFormat
from engine.models.held_layer import HeldLayer


class _NoGradients(torch.autograd.Function):
    """Puts a layer's result into the autograd graph, with a backward pass that raises an error."""

    @staticmethod
    def forward(
        _: Any, x: torch.Tensor, bias: torch.Tensor | None, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        return run()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> None:
        raise NoGradientsError


class PackedLinear(HeldLayer):
    """Replaces a torch.nn.Linear."""

    bias: torch.nn.Parameter | None
    padded_bias: torch.Tensor | None

    def __init__(self, held: WeightFormat, linear: torch.nn.Linear) -> None:
        """Make a layer that computes the same as `linear`.

        Args:
            held: the packed weight of `linear`.
            linear: the layer to replace. Its weight is not kept.
        """
        super().__init__(held)
        self.out_features, self.in_features = held.shape
        self.register_parameter("bias", linear.bias)
        self.register_buffer("padded_bias", held.padded(linear.bias), persistent=False)
        self.sync()

    @override
    def sync(self) -> None:
        """Apply changes; see HeldLayer. The kernel may read a padded copy of the bias."""
        super().sync()
        bias, padded = self.bias, self.padded_bias
        if bias is not None and padded is not None and self._has_changed("bias", bias):
            with torch.no_grad():
                padded[: len(bias)].copy_(bias)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer: [..., K] → [..., N]."""
        bias = self.bias if self.padded_bias is None else self.padded_bias
        if torch.compiler.is_compiling():
            return self.held.multiply(x, bias)
        self.sync()
        if not torch.is_grad_enabled():
            return self.held.multiply(x, bias)
        y: torch.Tensor = _NoGradients.apply(  # type: ignore[no-untyped-call]
            x, self.bias, lambda: self.held.multiply(x, bias)
        )
        return y

    @override
    def extra_repr(self) -> str:
        """Return the arguments for `repr`."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, {type(self.held).__name__}"


class PackedEmbedding(HeldLayer):
    """Replaces a torch.nn.Embedding that shares its weight with a linear layer, or Gemma's
    embedding, which multiplies rows by its `embed_scale`.

    Attributes:
        stands_for: the class of the module it replaced.
    """

    stands_for: type[torch.nn.Module]
    embed_scale: torch.Tensor | None

    def __init__(self, held: WeightFormat, embedding: torch.nn.Embedding) -> None:
        """Make a table that returns the same as `embedding`.

        Args:
            held: the packed weight, shared with the linear layer.
            embedding: the embedding to replace. Its weight is not kept.
        """
        super().__init__(held)
        self.num_embeddings, self.embedding_dim = held.shape
        self.padding_idx = embedding.padding_idx
        self.stands_for = type(embedding)
        factor = embedding._buffers.get("embed_scale")
        self.register_buffer("embed_scale", factor, persistent=False)

    @override
    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up rows: [...] → [..., K]."""
        return self.scaled(self.held.rows(token_ids))

    def scaled(self, rows: torch.Tensor) -> torch.Tensor:
        """Scale rows of the weight if the embedding scales its results."""
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)

    @override
    def extra_repr(self) -> str:
        """Return the arguments for `repr`."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {type(self.held).__name__}"
