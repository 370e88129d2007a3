"""Products of the same input as one: forwards for a model's own modules, on any device.

    attention(x)      ─▶ y = x · [Wq Wk Wv]ᵀ  ─▶ the class's own forward, given y in place of x
      q_proj(y)       ─▶ y's first columns
      k_proj(y), v_proj(y) ─▶ those that follow

A class's own forward hands its input to its projections, and uses nothing else of it but its
shape; that is seen at load (`engine.runner.fusing_products`). So it may be given the product in the
input's place, and a projection that is given the product takes its columns of it. Nothing is kept
from one call to another: a compiler traces it, and a CUDA graph holds it. A projection that is
given anything else (by a method of the class, by other code, while gradients are wanted) computes
by itself: the widths tell them apart. So they all do where the projections are not what they were
when they were joined: after a copy or a move of the model, with other weights, with hooks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from engine.runner.fused import PLAN

WEIGHT = "_headrace_joined_weight"
"""A buffer of the module: [N, K], the weights of its projections, which are views of it."""
BIAS = "_headrace_joined_bias"
"""A buffer of the module: [N], their biases, 0 for those that have none; or None."""

_is_compiling = torch.compiler.is_compiling


@dataclass(frozen=True, slots=True)
class JoinedPlan:
    """Of a module whose projections are one product.

    Attributes:
        argument: the name of its input, its forward's first parameter.
        parts: its projections, by name, and each one's first column.
    """

    argument: str
    parts: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ColumnsPlan:
    """Of a projection.

    Attributes:
        first, count: which columns of the product are its own.
        width: N, all columns of the product; never the width of its own input.
    """

    first: int
    count: int
    width: int


def joined_forward(self: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
    """Of a module whose projections are one product: the class's own forward, given the product."""
    plan: JoinedPlan = self.__dict__[PLAN]
    if arguments:
        x, arguments = arguments[0], arguments[1:]
    else:
        x = named.pop(plan.argument)
    # A compiler traces this once, and cannot ask where a tensor lies.
    if not torch.is_grad_enabled() and (_is_compiling() or _is_whole(self, plan)):
        x = product(self, x)
    return type(self).forward(self, x, *arguments, **named)


def _is_whole(module: torch.nn.Module, plan: JoinedPlan) -> bool:
    """Whether its projections are what they were when they were joined."""
    weight, bias = module._buffers[WEIGHT], module._buffers[BIAS]
    for name, first in plan.parts:
        one: Any = module._modules[name]
        parameters = one._parameters
        if one._forward_hooks or one._forward_pre_hooks or "weight" not in parameters:
            return False
        for own, joined in ((parameters["weight"], weight), (parameters.get("bias"), bias)):
            if own is not None and own.data_ptr() != _address(joined, first):
                return False
    return True


def _address(joined: torch.Tensor | None, row: int) -> int:
    if joined is None:
        return 0
    return joined.data_ptr() + row * joined.stride(0) * joined.element_size()


def product(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """[..., K] → [..., N], the first projection's outputs first."""
    buffers = module._buffers
    return linear(x, buffers[WEIGHT], buffers[BIAS])  # type: ignore[arg-type]  # it has a weight


def columns_forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of a projection: its columns [..., count], if it is given the product [..., width]."""
    plan: ColumnsPlan = self.__dict__[PLAN]
    if x.shape[-1] != plan.width:
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    return x.narrow(-1, plan.first, plan.count)
