"""Forwards for a model's own modules that compute several products of the same input as one, on any
device.

    attention(x)      ─▶ y = x · [Wq Wk Wv]ᵀ  ─▶ the class's own forward, given y in place of x
      q_proj(y)       ─▶ y's first columns
      k_proj(y), v_proj(y) ─▶ those that follow

The class's own forward passes its input to its projections and otherwise only uses the input's
shape; `engine.loading.joining` checks this at load. So it can be given the product instead
of the input, and a projection that gets the product returns its columns. No state is kept between
calls, so a compiler can trace this and a CUDA graph can capture it. A projection that gets anything
else (from another method of the class, from other code, or when gradients are needed) computes by
itself; the widths tell the cases apart. So do all projections if they have changed since they were
joined: after a copy or a move of the model, with other weights, or with hooks.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch.nn.functional import linear

PLAN = "_headrace_plan"
"""The attribute of a changed module with the parameters of its forward."""
WEIGHT = "_headrace_joined_weight"
"""A buffer of the module: [N, K], the joined weights, of which the projections' weights are
views.
"""
BIAS = "_headrace_joined_bias"
"""A buffer of the module: [N], the joined biases, 0 for projections without one; or None."""

_is_compiling = torch.compiler.is_compiling


@dataclass(frozen=True, slots=True)
class JoinedPlan:
    """How to compute a module whose projections are one product.

    Attributes:
        argument: the name of its input, its forward's first parameter.
        parts: its projections, by name, and each one's first column.
    """

    argument: str
    parts: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ColumnsPlan:
    """How to compute a projection.

    Attributes:
        first, count: its columns of the product.
        width: N, all columns of the product; never the width of its own input.
    """

    first: int
    count: int
    width: int


def exchange(module: torch.nn.Module, forward: Any, plan: object) -> None:
    """Give a module another forward.

    Args:
        module: the module.
        forward: one of this file's, called as a method of the module.
        plan: the parameters of that forward.
    """
    setattr(module, PLAN, plan)
    # Bound to the module, so that a copy of the module gets its own.
    module.forward = MethodType(forward, module)


def is_exchanged(module: torch.nn.Module) -> bool:
    """Whether a module's forward was replaced."""
    return "forward" in module.__dict__


def restore(module: torch.nn.Module) -> None:
    """Give a changed module its class's forward back."""
    del module.__dict__["forward"], module.__dict__[PLAN]


def joined_forward(self: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
    """Forward of a module with joined projections: the class's own forward, given the product."""
    plan: JoinedPlan = self.__dict__[PLAN]
    if arguments:
        x, arguments = arguments[0], arguments[1:]
    else:
        x = named.pop(plan.argument)
    # A compiler traces this once, and cannot ask for a tensor's address.
    if not torch.is_grad_enabled() and (_is_compiling() or _is_whole(self, plan)):
        x = product(self, x)
    return type(self).forward(self, x, *arguments, **named)


def _is_whole(module: torch.nn.Module, plan: JoinedPlan) -> bool:
    """Whether its projections are unchanged since they were joined."""
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
    """Forward of a projection: its columns [..., count], if it is given the product [...,
    width].
    """
    plan: ColumnsPlan = self.__dict__[PLAN]
    if x.shape[-1] != plan.width:
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    return x.narrow(-1, plan.first, plan.count)
