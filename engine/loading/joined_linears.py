"""Joins the linear layers of a module that read the same input into one product, on CUDA, where a
model runs as transformers wrote it: fewer and larger products of the same elements.

    a step ─▶ q_proj(x) ─▶ y = x · [Wq Wk Wv]ᵀ ─▶ y's first columns
              k_proj(x), v_proj(x)             ─▶ those that follow; y is let go with the last

Which layers these are is seen when the model is run once, whatever their names are. Only they are
exchanged, and only in the view that steps run (see `engine.loading.view`). What was asked first
computes the product, and the others take their columns if they are given the very same tensor; with
any other one a layer computes a product of its own. So does a layer whose weights have been
replaced since, and one that is compiled. The load gate compares the model as it is then.

Weights are joined module by module: [Wq Wk Wv] is made, and the three parameters become views of
it, so that weights are held once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from engine.loading.eager import eager_forward
from engine.models.joined_tensors import join_tensors

Group = tuple[nn.Linear, ...]
"""Linear layers of one module that read the same tensor."""


@dataclass(slots=True)
class _Product:
    """Several layers' product. What it holds between their calls is gone when each has had it.

    Attributes:
        weight, bias: the joined ones, [N, K] and [N]; None: there is no bias.
        spans: by layer, its first output and how many it has.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    spans: Sequence[tuple[int, int]]
    _given: torch.Tensor | None = None
    _made: torch.Tensor | None = None
    _left: set[int] = field(default_factory=set)

    def columns(self, which: int, x: torch.Tensor) -> torch.Tensor:
        """[..., K] → [..., count], a layer's part of the product."""
        made = self._made
        if made is None or x is not self._given or which not in self._left:
            self._given, self._made = x, linear(x, self.weight, self.bias)
            made, self._left = self._made, set(range(len(self.spans)))
        self._left.discard(which)
        if not self._left:
            self._given = self._made = None
        return made.narrow(-1, *self.spans[which])


class JoinedLinear(nn.Linear):
    """A linear layer whose outputs are some columns of a product.

    Attributes:
        product: the product.
        which: the layer's number there.
    """

    product: _Product
    which: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] → [..., N]."""
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


def shared_inputs(model: PreTrainedModel, prompt: Sequence[int]) -> list[Group]:
    """Which of a model's linear layers read the same tensor, by the modules that they belong to.

    Args:
        model: in evaluation mode, not in use; it is left with eager attention.
        prompt: token ids, on which it is run.
    """
    given: dict[nn.Module, list[torch.Tensor]] = {}

    def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments:
            given.setdefault(module, []).append(arguments[0])

    model.set_attn_implementation("eager")
    plain = _plain_layers(model)
    hooks = [one.register_forward_pre_hook(note) for one in plain]
    try:
        eager_forward(model, torch.tensor([prompt], device=model.device))
    finally:
        for hook in hooks:
            hook.remove()
    found = []
    for parent in model.modules():
        by_input: dict[tuple[int, torch.dtype], list[nn.Linear]] = {}
        for one in parent.children():
            if isinstance(one, nn.Linear) and one in plain and len(given.get(one, ())) == 1:
                key = (id(given[one][0]), one.weight.dtype)
                by_input.setdefault(key, []).append(one)
        found += [tuple(group) for group in by_input.values() if len(group) > 1]
    return found


def join_linears(groups: Iterable[Group]) -> int:
    """Exchange linear layers; returns how many products there are.

    groups: of a view's modules; see `shared_inputs`.
    """
    count = 0
    for group in groups:
        weight, bias = join_tensors(group)
        sizes = [len(one.weight) for one in group]
        spans = [(sum(sizes[:index]), size) for index, size in enumerate(sizes)]
        product = _Product(weight, bias, spans)
        for index, one in enumerate(group):
            # The view's own modules; the owner's keep their class.
            one.__class__ = JoinedLinear
            vars(one).update(product=product, which=index)
        count += 1
    return count


def _plain_layers(model: nn.Module) -> set[nn.Linear]:
    """Linear layers with parameters of their own and nothing else."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return {
        one
        for one in model.modules()
        if type(one) is nn.Linear
        and not one._forward_hooks
        and not one._forward_pre_hooks
        and one.weight.is_contiguous()
        and all(holders[id(parameter)] == 1 for parameter in one.parameters())
    }
