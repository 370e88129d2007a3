"""Launches the kernels of `engine.models.decoder_kernels`, each as one torch operation.

These are `headrace::add_norm`, `headrace::turn`, `headrace::gate`, `headrace::clamped_gate` and
`headrace::product`. As torch operations, they let a substitute for CUDA graphs see a single call
and what it writes.

Products are computed by torch, except those of a single token in 16 bits. These compute so little
that launching them and fetching the first weights takes a third of the time of a small model's
step.

The constants of a launch depend only on a layer's sizes, never on the step. So a kernel is compiled
once for each kind of layer, a token's result does not depend on its neighbours, and the constants
are found once for each layer, not in every step. Torch computes sizes that would not fit in a
program's registers.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from engine.attention.triton_launch import launch
from engine.models import description as described
from engine.models.decoder_kernels import (
    CENTERED,
    FROM_ONE,
    GELU_TANH,
    PLAIN,
    RELU_SQUARED,
    ROUNDED_FIRST,
    SILU,
    add_norm_kernel,
    clamped_gate_kernel,
    gate_kernel,
    product_kernel,
    rotate_kernel,
)
from engine.models.operations import (
    BoundMixture,
    BoundNorm,
    Gate,
    Heads,
    KVPlaces,
    Operations,
    Tables,
    TorchOperations,
)
from engine.models.triton_experts import MOST_EXPERTS, mix_experts
from engine.native.torch_library import operation, writes_nothing

_FORMS: dict[described.NormForm, int] = {
    "plain": PLAIN.value,
    "from_one": FROM_ONE.value,
    "rounded_first": ROUNDED_FIRST.value,
    "centered": CENTERED.value,
}
_ACTIVATIONS: dict[described.Activation, int] = {
    "silu": SILU.value,
    "gelu_tanh": GELU_TANH.value,
    "relu_squared": RELU_SQUARED.value,
}
_WIDEST = 1 << 14
"""The maximum number of elements per program."""
_PART = 1 << 11
"""The approximate number of elements of heads per program, if heads are not normed together."""
_GATE_BLOCK = 1 << 10
_ELEMENTS_PER_THREAD = 16
_PRODUCT = {"BLOCK_N": 4, "BLOCK_K": 4096}
"""The block sizes of a product of one token. Of eight that were tried on an H200, they are the
fastest in a small model, and within 3 % of the fastest in a large one.
"""


Told = tuple[list[int], int, int]
"""Constants, warps and parts of a launch, as a torch operation gets them."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The constants of a launch.

    Attributes:
        constants: the kernel's constants, in its order.
        warps: the number of warps per program.
        parts: the number of programs per token.
    """

    constants: Mapping[str, int]
    warps: int
    parts: int

    def told(self) -> Told:
        """Convert it to types that a torch operation accepts."""
        return list(self.constants.values()), self.warps, self.parts


def add_norm_launch(
    width: int, made: int, after: BoundNorm | None, factor: float, before: BoundNorm | None
) -> Launch | None:
    """Return how to launch a sum of [T, width], or None if it is too wide. See
    `Operations.add_norm`.
    """
    block = _padded(width)
    if block > _WIDEST:
        return None
    constants = {
        "WIDTH": width,
        "BLOCK": block,
        "MADE": made,
        "SCALED": int(factor != 1.0),
        **_norm_constants("AFTER", after, ""),
        **_norm_constants("BEFORE", before, ""),
    }
    return Launch(constants, _warps(block), 1)


def turn_launch(heads: Heads, *, turns: bool, has_slots: bool) -> Launch | None:
    """Return how to launch a rotation, or None if the kernel does not support it.

    See `Operations.rotate`.
    """
    dim = heads.head_dim
    # As for a rotation where there is none, so that the sums of norms have one order.
    half = (heads.rotary_dim or dim) // 2
    wide = [one is not None and one.width != dim for one in (heads.query_norm, heads.key_norm)]
    block_half, block_rest = _padded(half), _padded(max(1, dim - 2 * half))
    width = 2 * block_half + (block_rest if dim > 2 * half else 0)
    most = _padded(heads.heads)
    block = most if any(wide) else min(most, max(1, _PART // width))
    if half == 0 or block * width > _WIDEST:
        return None
    constants = {
        "HEADS": heads.heads,
        "KV_HEADS": heads.kv_heads,
        "DIM": dim,
        "HALF": half,
        "PAIRED": int(heads.paired),
        "TURNS": int(turns),
        "ROUNDS": int(heads.rounds_products),
        "LAST": int(heads.norms_last),
        **_norm_constants("QUERY", heads.query_norm, "_FORM"),
        "QUERY_WHOLE": int(wide[0]),
        **_norm_constants("KEY", heads.key_norm, "_FORM"),
        "KEY_WHOLE": int(wide[1]),
        "HAS_SLOTS": int(has_slots),
        "BLOCK_H": block,
        "BLOCK_HALF": block_half,
        "BLOCK_REST": block_rest,
    }
    parts = -(-heads.heads // block) + 2 * -(-heads.kv_heads // block)
    return Launch(constants, _warps(block * width), parts)


def gate_launch(width: int, activation: described.Activation, *, gated: bool) -> Launch:
    """Return how to launch an activation of [T, width]. See `Operations.gate`."""
    constants = {
        "WIDTH": width,
        "GATED": int(gated),
        "ACTIVATION": _ACTIVATIONS[activation],
        "BLOCK": _GATE_BLOCK,
    }
    return Launch(constants, 4, -(-width // _GATE_BLOCK))


def _norm_constants(name: str, norm: BoundNorm | None, suffix: str) -> dict[str, int]:
    form = 0 if norm is None else _FORMS[norm.form]
    return {
        f"{name}{suffix}": form,
        f"{name}_BIASED": int(norm is not None and norm.bias is not None),
    }


def _warps(elements: int) -> int:
    return min(16, max(1, elements // (32 * _ELEMENTS_PER_THREAD)))


def _padded(size: int) -> int:
    """Return the next power of two, as required for a block."""
    return 1 << (size - 1).bit_length()


class TritonOperations(Operations):
    """The operations as Triton kernels; see `engine.models.operations`."""

    def __init__(self) -> None:
        self._plain = TorchOperations()
        self._found: dict[Hashable, Told | None] = {}
        """What a layer's norms and rotations are told, by what it depends on; None: torch computes
        them.
        """

    @override
    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if len(x) > 1 or x.itemsize != 2:
            return self._plain.multiply(x, weight, bias)
        made = x.new_empty((1, len(weight)))
        _product(x, weight, bias, made)
        return made

    @override
    def add_norm(
        self,
        x: torch.Tensor,
        made: Sequence[torch.Tensor] = (),
        after: BoundNorm | None = None,
        factor: float = 1.0,
        before: BoundNorm | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width, count = x.shape[-1], len(made)
        key = (after, before, width, count, factor)
        if key not in self._found:
            launch = add_norm_launch(width, count, after, factor, before)
            self._found[key] = None if launch is None else launch.told()
        told = self._found[key]
        if told is None:
            return self._plain.add_norm(x, made, after, factor, before)
        total = torch.empty_like(x) if made else None
        normed = None if before is None else torch.empty_like(x)
        first, second = (*made, None, None)[:2]
        _add_norm(
            *(x, first, second, total, normed),
            *(*_tensors(after), *_tensors(before), _eps(after), _eps(before), factor),
            *told,
        )
        result = x if total is None else total
        return result, result if normed is None else normed

    @override
    def rotate(
        self, projected: torch.Tensor, heads: Heads, tables: Tables | None, places: KVPlaces
    ) -> torch.Tensor:
        turns = tables is not None and heads.rotary_dim > 0
        has_slots = places.slots is not None
        key = (heads, turns, has_slots)
        if key not in self._found:
            launch = turn_launch(heads, turns=turns, has_slots=has_slots)
            self._found[key] = None if launch is None else launch.told()
        told = self._found[key]
        if told is None:
            return self._plain.rotate(projected, heads, tables, places)
        queries = projected.new_empty((len(projected), heads.heads, heads.head_dim))
        cos, sin = tables if tables is not None and turns else (None, None)
        query_norm, key_norm = heads.query_norm, heads.key_norm
        _rotate(
            *(projected, queries, places.keys, places.values, places.slots),
            *(cos, sin, *_tensors(query_norm), *_tensors(key_norm)),
            *(_eps(query_norm), _eps(key_norm), *told),
        )
        return queries

    @override
    def gate(self, inner: torch.Tensor, activation: Gate, *, gated: bool) -> torch.Tensor:
        width = inner.shape[-1] // (1 + gated)
        made = inner.new_empty((len(inner), width))
        if isinstance(activation, described.ClampedGate):
            _clamped_gate(inner, made, activation.factor, activation.limit)
            return made
        _gate(inner, made, *gate_launch(width, activation, gated=gated).told())
        return made

    @override
    def mix(self, x: torch.Tensor, mixture: BoundMixture) -> torch.Tensor:
        if len(mixture.router) > MOST_EXPERTS:
            return self._plain.mix(x, mixture)
        scores, routing = self.multiply(x, mixture.router, mixture.router_bias), mixture.routing

        def gate(inner: torch.Tensor) -> torch.Tensor:
            return self.gate(inner, routing.activation, gated=True)

        return mix_experts(x, scores, mixture.experts, routing, gate)


def _tensors(norm: BoundNorm | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if norm is None else (norm.weight, norm.bias)


def _eps(norm: BoundNorm | None) -> float:
    return 0.0 if norm is None else norm.eps


_LAUNCH = "int[] constants, int warps, int parts"


@operation(
    "add_norm(Tensor x, Tensor? made, Tensor? also, Tensor(a!)? total, Tensor(b!)? normed, "
    "Tensor? after_weight, Tensor? after_bias, Tensor? before_weight, Tensor? before_bias, "
    f"float after_eps, float before_eps, float factor, {_LAUNCH}) -> ()",
    writes_nothing,
)
def _add_norm(*given: Any) -> None:
    _launch(add_norm_kernel, *given)


@operation(
    "turn(Tensor projected, Tensor(a!) queries, Tensor(b!) keys, Tensor(c!) values, "
    "Tensor? slots, Tensor? cos, Tensor? sin, Tensor? query_weight, Tensor? query_bias, "
    f"Tensor? key_weight, Tensor? key_bias, float query_eps, float key_eps, {_LAUNCH}) -> ()",
    writes_nothing,
)
def _rotate(*given: Any) -> None:
    _launch(rotate_kernel, *given)


@operation(f"gate(Tensor inner, Tensor(a!) made, {_LAUNCH}) -> ()", writes_nothing)
def _gate(*given: Any) -> None:
    _launch(gate_kernel, *given)


@operation(
    "clamped_gate(Tensor inner, Tensor(a!) made, float factor, float limit) -> ()", writes_nothing
)
def _clamped_gate(inner: torch.Tensor, made: torch.Tensor, factor: float, limit: float) -> None:
    width = made.shape[-1]
    grid = (len(inner), -(-width // _GATE_BLOCK))
    launch(clamped_gate_kernel, grid, (inner, made, factor, limit, width, _GATE_BLOCK), 4)


@operation("product(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) made) -> ()", writes_nothing)
def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, made: torch.Tensor
) -> None:
    outputs, inputs = weight.shape
    parts = -(-outputs // _PRODUCT["BLOCK_N"])
    constants = (inputs, bias is not None, *_PRODUCT.values())
    # With 4 warps, Triton 3.6 spills some registers if rows are as long as those of 70B models.
    warps = 4 if inputs <= _WIDEST else 8
    launch(product_kernel, (parts,), (x, weight, bias, made, outputs, *constants), warps)


def _launch(kernel: Any, *given: Any) -> None:
    """Launch a kernel for each token of its first argument, [T, …]."""
    *arguments, constants, warps, parts = given
    launch(kernel, (len(arguments[0]), parts), (*arguments, *constants), warps)
