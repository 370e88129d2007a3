"""The five operations that a decoder needs in addition to attention:

    multiply  x · weight + bias ─▶        a product
    add_norm  x + norm(made) ─ norm ─▶    the sum, and the input of the next product
    turn      queries, keys, values ─▶    norms, rotary embeddings, the write into the KV cache
    gate      activation(gate) · up ─▶    the input of an MLP's last product
    mix       a mixture of experts ─▶     the results of each token's experts, added up

`TorchOperations` is the reference implementation in plain torch, for any device.
`engine.models.triton_operations` computes the same on a CUDA device, with one kernel for each, and
seven for a mixture. Elements are computed in float32, and rounded wherever the models' own
operations round. Only the order of sums and the last bits of e^x may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import linear
from typing_extensions import override

from engine.models import description as described

Gate = described.Activation | described.ClampedGate
"""What is applied to an MLP's first product. A ClampedGate always has a gate."""
Tables = tuple[torch.Tensor, torch.Tensor]
"""The cosines and sines for a step's tokens, [T, dim / 2] each."""


@dataclass(frozen=True, slots=True, eq=False)
class BoundNorm:
    """A norm with its tensors. It equals itself alone, so that it can be looked up quickly.

    Attributes:
        weight: [width].
        bias: [width], or None if there is none.
        eps, form: see `engine.models.description.Norm`.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    form: described.NormForm

    @property
    def width(self) -> int:
        """The number of elements that are normed together."""
        return len(self.weight)


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """How queries and keys are processed before attention. It equals itself alone, like a norm.

    Attributes:
        heads, kv_heads, head_dim: Hq, Hkv, D.
        query_norm, key_norm: the norms of each head, or of all heads together. None for no norm.
        norms_last: whether the norms follow the rotation.
        rotary_dim: the number of leading elements of a head that are rotated.
        paired, rounds_products: see `engine.models.description.Rotary`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    query_norm: BoundNorm | None = None
    key_norm: BoundNorm | None = None
    norms_last: bool = False
    rotary_dim: int = 0
    paired: bool = False
    rounds_products: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class BoundMixture:
    """A mixture of experts with its tensors.

    Attributes:
        router: [E, K], whose product scores the experts.
        router_bias: [E], or None if there is none.
        experts: the module with the weights of all experts, in the form that transformers'
            ExpertsInterface knows.
        routing: how experts are chosen, and what they compute.
    """

    router: torch.Tensor
    router_bias: torch.Tensor | None
    experts: torch.nn.Module
    routing: described.Routing


@dataclass(frozen=True, slots=True)
class KVPlaces:
    """Where keys and values are written.

    Attributes:
        keys, values: [S, Hkv, D] each: a layer's cache, or tensors for the step's tokens alone.
        slots: int64 [T], the row of each token in them. None if the rows are the tokens in order.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor | None = None


class Operations(Protocol):
    """The operations; see the module. Tensors are contiguous and have the same type. Arguments are
    not modified, except for the tensors in `KVPlaces`.
    """

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute a linear layer: [T, K] → [T, N].

        Args:
            x: [T, K].
            weight: [N, K].
            bias: [N], or None if there is none.
        """
        ...

    def add_norm(
        self,
        x: torch.Tensor,
        made: Sequence[torch.Tensor] = (),
        after: BoundNorm | None = None,
        factor: float = 1.0,
        before: BoundNorm | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the result of attention or an MLP to x, and norm the sum for the next operation.

        Args:
            x: [T, K].
            made: at most two results, [T, K] each, which are added in this order.
            after: a norm that is applied to the results first.
            factor: multiplies the results.
            before: the norm of the sum.

        Returns:
            The sum (x itself if `made` is empty), and its norm (the sum itself without a norm).
        """
        ...

    def rotate(
        self, projected: torch.Tensor, heads: Heads, tables: Tables | None, places: KVPlaces
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, and write keys and values to the cache.

        Args:
            projected: [T, (Hq + 2 Hkv) · D], queries first, then keys, then values.
            heads: how queries and keys are processed.
            tables: the cosines and sines, or None for no rotation.
            places: where keys and values are written.

        Returns:
            The queries, [T, Hq, D].
        """
        ...

    def gate(self, inner: torch.Tensor, activation: Gate, *, gated: bool) -> torch.Tensor:
        """Apply the activation to the result of an MLP's first product.

        Args:
            inner: [T, N], or if gated [T, 2 N], gate first, then up, unless the activation says
                otherwise.
            activation: applied to the gate, or to all elements without one.
            gated: whether the activation is multiplied by `up`.

        Returns:
            [T, N].
        """
        ...

    def mix(self, x: torch.Tensor, mixture: BoundMixture) -> torch.Tensor:
        """Compute a mixture of experts: [T, K] → [T, K]."""
        ...


class TorchOperations(Operations):
    """The reference implementation in plain torch."""

    @override
    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return linear(x, weight, bias)

    @override
    def add_norm(
        self,
        x: torch.Tensor,
        made: Sequence[torch.Tensor] = (),
        after: BoundNorm | None = None,
        factor: float = 1.0,
        before: BoundNorm | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for one in made:
            added = one if after is None else normed(one, after)
            x = x + (added if factor == 1.0 else added * factor)
        return x, x if before is None else normed(x, before)

    @override
    def rotate(
        self, projected: torch.Tensor, heads: Heads, tables: Tables | None, places: KVPlaces
    ) -> torch.Tensor:
        tokens, dim = len(projected), heads.head_dim
        sizes = (heads.heads * dim, heads.kv_heads * dim, heads.kv_heads * dim)
        query, key, value = projected.split_with_sizes(sizes, -1)
        query = self._turned(query.reshape(tokens, -1, dim), heads.query_norm, heads, tables)
        key = self._turned(key.reshape(tokens, -1, dim), heads.key_norm, heads, tables)
        value = value.reshape(tokens, -1, dim)
        if places.slots is None:
            places.keys.copy_(key)
            places.values.copy_(value)
        else:
            places.keys.index_copy_(0, places.slots, key)
            places.values.index_copy_(0, places.slots, value)
        return query.contiguous()

    @override
    def gate(self, inner: torch.Tensor, activation: Gate, *, gated: bool) -> torch.Tensor:
        if isinstance(activation, described.ClampedGate):
            return _clamped(inner, activation)
        if not gated:
            return _activated(inner, activation)
        gate, up = inner.chunk(2, -1)
        return _activated(gate, activation) * up

    @override
    def mix(self, x: torch.Tensor, mixture: BoundMixture) -> torch.Tensor:
        scores = self.multiply(x, mixture.router, mixture.router_bias)
        made: torch.Tensor = mixture.experts(x, *routed(scores, mixture.routing))
        return made

    def _turned(
        self, x: torch.Tensor, norm: BoundNorm | None, heads: Heads, tables: Tables | None
    ) -> torch.Tensor:
        """Norm and rotate heads: [T, H, D] → [T, H, D]."""
        if heads.norms_last:
            x = _rotated(x, heads, tables)
        if norm is not None:
            together = x if norm.width == x.shape[-1] else x.flatten(1)
            x = normed(together, norm).view(x.shape)
        return x if heads.norms_last else _rotated(x, heads, tables)


def routed(scores: torch.Tensor, routing: described.Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token, and the weights of their results: [T, E] → [T, k] each."""
    weights, chosen = torch.topk(scores.softmax(-1, dtype=torch.float32), routing.chosen)
    if routing.normed:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights.to(scores.dtype) if routing.rounds else weights


def normed(x: torch.Tensor, norm: BoundNorm) -> torch.Tensor:
    """Return the norm of x's rows: [..., width] → [..., width]."""
    wide, weight = x.float(), norm.weight.float()
    if norm.form == "centered":
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.form == "rounded_first":
        wide = wide.to(x.dtype).float()
    made = wide * (1.0 + weight if norm.form == "from_one" else weight)
    return (made if norm.bias is None else made + norm.bias.float()).to(x.dtype)


def _rotated(x: torch.Tensor, heads: Heads, tables: Tables | None) -> torch.Tensor:
    """Rotate the leading elements of heads: [T, H, D] → [T, H, D]."""
    if tables is None:
        return x

    def product(one: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        made = one.float() * table.float()[:, None]
        return made.to(x.dtype).float() if heads.rounds_products else made

    turned, rest = x[..., : heads.rotary_dim], x[..., heads.rotary_dim :]
    if heads.paired:
        left, right = turned[..., ::2], turned[..., 1::2]
    else:
        left, right = turned.chunk(2, -1)
    cos, sin = tables
    first = (product(left, cos) - product(right, sin)).to(x.dtype)
    second = (product(right, cos) + product(left, sin)).to(x.dtype)
    if heads.paired:
        return torch.cat((torch.stack((first, second), -1).flatten(-2), rest), -1)
    return torch.cat((first, second, rest), -1)


def _clamped(inner: torch.Tensor, one: described.ClampedGate) -> torch.Tensor:
    gate, up = inner[..., ::2].clamp(max=one.limit), inner[..., 1::2].clamp(-one.limit, one.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * one.factor))


def _activated(x: torch.Tensor, activation: described.Activation) -> torch.Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(x)
    if activation == "relu_squared":
        return torch.nn.functional.relu(x).square()
    return torch.nn.functional.gelu(x, approximate="tanh")
