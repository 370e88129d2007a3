"""Joins linear layers that read the same input into a single product, on CUDA.

This applies if a model runs as transformers wrote it. The same elements are then computed in fewer
and larger products.

    a step ─▶ q_proj(x) ─▶ y = x · [Wq Wk Wv]ᵀ ─▶ y's first columns
              k_proj(x), v_proj(x)             ─▶ the next columns; y is released after the last

The layers are found by watching the model run, independently of their names (see
`engine.loading.watching`). Only they are replaced, and only in the view that steps run (see
`engine.loading.view`). The layer that is called
first computes the product. The others take their columns if they receive the same tensor object;
otherwise the product is computed again. A layer computes only its own outputs if its weights have
been replaced since, or if it is compiled. The load gate compares the model in this state.

Weights are joined module by module: [Wq Wk Wv] is created, and the three parameters become views of
it, so that weights are held only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from engine.models.joined_tensors import join_tensors


@dataclass(slots=True)
class _Product:
    """The product of several layers.

    The result is held between their calls and released once each layer has used it.

    Attributes:
        weight, bias: the joined tensors, [N, K] and [N]. The bias is None if there is none.
        spans: for each layer, its first output and its number of outputs.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    spans: Sequence[tuple[int, int]]
    _given: torch.Tensor | None = None
    _made: torch.Tensor | None = None
    _left: set[int] = field(default_factory=set)

    def columns(self, which: int, x: torch.Tensor) -> torch.Tensor:
        """Return a layer's columns of the product, [..., K] → [..., count]."""
        made = self._made
        if made is None or x is not self._given or which not in self._left:
            self._given, self._made = x, linear(x, self.weight, self.bias)
            made, self._left = self._made, set(range(len(self.spans)))
        self._left.discard(which)
        if not self._left:
            self._given = self._made = None
        return made.narrow(-1, *self.spans[which])


class JoinedLinear(nn.Linear):
    """A linear layer whose outputs are some columns of a joined product.

    Attributes:
        product: the joined product.
        which: the layer's index in the product.
    """

    product: _Product
    which: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer, [..., K] → [..., N]."""
        if torch.compiler.is_compiling() or not self._is_joined():
            return super().forward(x)
        return self.product.columns(self.which, x)

    def _is_joined(self) -> bool:
        first = self.product.spans[self.which][0]
        own: list[torch.Tensor | None] = [self.weight, self.bias]
        return all(
            part is None
            or (
                whole is not None
                and part.storage_offset() == first * whole.stride(0)
                and part.untyped_storage()._cdata == whole.untyped_storage()._cdata
            )
            for part, whole in zip(own, (self.product.weight, self.product.bias), strict=True)
        )


def join_linears(model: nn.Module, groups: Sequence[Sequence[str]]) -> int:
    """Replace linear layers with joined ones, and return the number of products.

    Args:
        model: a view, or a part of one.
        groups: the layers' paths; see `Observation.joinable`.
    """
    for paths in groups:
        group: list[Any] = [model.get_submodule(path) for path in paths]
        weight, bias = join_tensors(group)
        sizes = [len(one.weight) for one in group]
        spans = [(sum(sizes[:index]), size) for index, size in enumerate(sizes)]
        product = _Product(weight, bias, spans)
        for index, one in enumerate(group):
            # The view's own modules; the owner's keep their class.
            one.__class__ = JoinedLinear
            vars(one).update(product=product, which=index)
    return len(groups)
