"""Computes a layer operation by operation.

`LayerParts` is the interface of our decoders' layers that allows each operation to be compared with
the model's own. `Walk` computes the operations of a layer in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from engine.attention.interface import AttentionParams
from engine.attention.step_states import StepStates
from engine.models import description as described
from engine.models.operations import Tables

Kind = Literal["exact", "lookup", "norm", "product", "attention", "recurrence", "experts"]
"""The kind of an operation, which determines how close its result must be to the model's own."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes attention: queries [T, Hq, D], keys and values [T, Hkv, D] → [T, Hq, D]."""
Recur = Callable[[torch.Tensor], torch.Tensor]
"""Computes a recurrence over what was projected: [T, N] → [T, width]."""
Mix = Callable[[torch.Tensor], torch.Tensor]
"""Computes a mixture of experts: [T, K] → [T, K]."""


class LayerParts(Protocol):
    """The separate operations of one layer of our decoder. All tensors are contiguous rows of
    tokens.
    """

    @property
    def description(self) -> described.Layer:
        """The description of the layer."""
        ...

    @property
    def params(self) -> AttentionParams:
        """The parameters of the layer's attention.

        Raises:
            TypeError: it does not attend.
        """
        ...

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Apply the norm of that name: [T, H * width] → the same shape."""
        ...

    def multiply(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Compute the products of that name and concatenate them: [T, K] → [T, N]."""
        ...

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, tables: Tables
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys, without norms: [T, H * D] each."""
        ...

    def recur(self, projected: torch.Tensor, states: StepStates) -> torch.Tensor:
        """Compute the recurrence over what was projected, and write the states of the step's
        requests: [T, N] → [T, width].
        """
        ...

    def gate_mixed(self, mixed: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """Apply the gate of gated attention, or a delta net's norm and gate, to what attention or
        the delta rule made: [T, width] → the same shape. The gate is a part of what was projected.
        """
        ...

    def gate(self, inner: torch.Tensor) -> torch.Tensor:
        """Apply the activation to the result of an MLP's first product."""
        ...

    def add(self, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Return x + residual · made, [T, K] each."""
        ...

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer's experts; see Mix."""
        ...


def run_experts(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compute a mixture of experts by the model's own module: [T, K] → [T, K]."""
    made = module(x.unsqueeze(0))
    rows: torch.Tensor = (made[0] if isinstance(made, tuple) else made)[0]
    return rows.contiguous()


class UnboundError(Exception):
    """A layer's tensors are not as the kernels need them. The message gives the reason, worded to
    complete a sentence.
    """


def split_projection(
    one: described.Attention, projected: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split what was projected into queries, gates, keys and values: [T, N] → [T, width] each.

    Gates are empty if there are none.
    """
    query, keys = one.heads * one.head_dim, one.kv_heads * one.head_dim
    q, k, v = projected.split_with_sizes(((1 + one.gated) * query, keys, keys), -1)
    if not one.gated:
        return q, q[:, :0], k, v
    heads = q.reshape(len(q), one.heads, 2, one.head_dim)
    return heads[:, :, 0].flatten(1), heads[:, :, 1].flatten(1), k, v


@dataclass(frozen=True, slots=True)
class Part:
    """The result of one operation of a layer.

    Attributes:
        name: the name of the operation.
        kind: see Kind.
        made: [T, width].
    """

    name: str
    kind: Kind
    made: torch.Tensor


class Walk:
    """Computes a layer operation by operation.

    Attributes:
        parts: the results in order. The last one is the layer's output.
    """

    def __init__(self, layer: LayerParts, known: Mapping[str, torch.Tensor]) -> None:
        """Begin before a layer's first operation.

        Args:
            layer: the layer.
            known: the model's own results by name, for all tokens or only the first ones. The next
                operation uses them as its input, and our own results for the remaining tokens.
        """
        self._layer = layer
        self._known = known
        self.parts: list[Part] = []

    def run(
        self, x: torch.Tensor, tables: Tables | None, attend: Attend, recur: Recur, mix: Mix
    ) -> None:
        """Compute the operations.

        Args:
            x: the layer's input, [T, K], contiguous.
            tables: the cosines and sines, if it has rotary embeddings.
            attend: computes its attention, if it has any.
            recur: computes its recurrence, if it has one.
            mix: computes its experts, if it has any.
        """
        one = self._layer.description
        normed = self._norm("before_attention", one.before_attention, x)
        projected = self._products("projection", normed)
        if isinstance(one.mixer, described.Attention):
            mixed = self._attend(one.mixer, projected, tables, attend)
        else:
            mixed = self._recur(one.mixer, projected, recur)
        made = self._products("output", mixed)
        made = self._norm("after_attention", one.after_attention, made)
        residual = self._sum("residual", x, made)
        between = normed if one.parallel else self._norm("before_mlp", one.before_mlp, residual)
        if isinstance(one.mlp, described.Experts):
            made = self._add_part("experts", "experts", mix(between))
        else:
            inner = self._products("inner", between)
            gated = self._add_part("activation", "norm", self._layer.gate(inner))
            made = self._products("down", gated)
        made = self._norm("after_mlp", one.after_mlp, made)
        self._sum("result", residual, made)

    def _attend(
        self,
        one: described.Attention,
        projected: torch.Tensor,
        tables: Tables | None,
        attend: Attend,
    ) -> torch.Tensor:
        q, _, k, v = (part.contiguous() for part in split_projection(one, projected))
        if one.norms_last:
            q, k = self._rotate(q, k, tables)
            q, k = self._norm_heads(one, q, k)
        else:
            q, k = self._norm_heads(one, q, k)
            q, k = self._rotate(q, k, tables)
        shape = (len(q), -1, one.head_dim)
        mixed = attend(q.view(shape), k.view(shape), v.view(shape)).reshape(len(q), -1)
        if one.gated:
            mixed = self._layer.gate_mixed(mixed, projected)
        return self._add_part("attention", "attention", mixed)

    def _recur(
        self, one: described.Recurrence, projected: torch.Tensor, recur: Recur
    ) -> torch.Tensor:
        mixed = recur(projected)
        if isinstance(one, described.ShortConvolution):
            return self._add_part("convolution", "norm", mixed)
        mixed = self._add_part("delta_rule", "recurrence", mixed)
        return self._add_part("gated_norm", "norm", self._layer.gate_mixed(mixed, projected))

    def _add_part(self, name: str, kind: Kind, made: torch.Tensor) -> torch.Tensor:
        self.parts.append(Part(name, kind, made))
        known = self._known.get(name)
        if known is None or known.shape[1:] != made.shape[1:]:
            return made
        return torch.cat([known, made[len(known) :]])

    def _norm(self, name: str, norm: described.Norm | None, x: torch.Tensor) -> torch.Tensor:
        if norm is None:
            return x
        return self._add_part(name, "norm", self._layer.norm(name, x.contiguous()))

    def _norm_heads(
        self, one: described.Attention, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._norm("query_norm", one.query_norm, q), self._norm("key_norm", one.key_norm, k)

    def _products(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._add_part(name, "product", self._layer.multiply(name, x))

    def _rotate(
        self, q: torch.Tensor, k: torch.Tensor, tables: Tables | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if tables is not None:
            q, k = self._layer.rotate(q, k, tables)
        return self._add_part("queries", "exact", q), self._add_part("keys", "exact", k)

    def _sum(self, name: str, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return self._add_part(name, "exact", self._layer.add(x, made))
