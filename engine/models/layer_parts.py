"""A layer, part by part.

`OurDecoder` and `LayerParts` say what a decoder of ours offers, so that each part of its layers can
be compared with the model's own. `walk` computes a layer's parts in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from engine.attention.interface import AttentionBackend, AttentionContext
from engine.models import description as described

Kind = Literal["exact", "norm", "product", "attention", "experts"]
"""What a part computes, which tells how near it must be to the model's own."""
Tables = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a step's tokens, float32 [T, dim / 2] each."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention: queries [T, Hq, D], keys and values [T, Hkv, D] → [T, Hq, D]."""
Mix = Callable[[torch.Tensor], torch.Tensor]
"""A mixture of experts: [T, K] → [T, K]."""


class LayerParts(Protocol):
    """A layer of a decoder of ours, part by part. All tensors are contiguous rows of tokens."""

    @property
    def description(self) -> described.Layer:
        """The layer."""
        ...

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """By the layer's norm of that name: [T, H * width] → the same."""
        ...

    def multiply(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """By the layer's products of that name, side by side: [T, K] → [T, N]."""
        ...

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, tables: Tables
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys, without norms: [T, H * D] each."""
        ...

    def gate(self, inner: torch.Tensor) -> torch.Tensor:
        """The activation of an MLP's first product."""
        ...

    def add(self, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """x + residual · made, [T, K] each."""
        ...

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        """Its experts; see Mix."""
        ...


class OurDecoder(Protocol):
    """A decoder of ours, as it is compared; see `engine.models.native_decoder`."""

    @property
    def description(self) -> described.Decoder:
        """What it computes."""
        ...

    @property
    def layers(self) -> Sequence[LayerParts]:
        """Its layers with their tensors."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""
        ...

    @property
    def device(self) -> torch.device:
        """Where they are."""
        ...

    @property
    def backend(self) -> AttentionBackend:
        """What computes its attention."""
        ...

    @property
    def one_call(self) -> Kind:
        """How near a step is to its parts alone."""
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] → [T, K]."""
        ...

    def tables(self, positions: torch.Tensor) -> Sequence[Tables]:
        """Cosines and sines of tokens at these positions, for each of the rotary embeddings."""
        ...

    def run(
        self, layers: Any, x: torch.Tensor, tables: Any, context: AttentionContext
    ) -> torch.Tensor:
        """Compute some of its layers: [T, K] → [T, K]."""
        ...

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        """The last norm: [L, K] → [L, K]."""
        ...

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """The output layer: [L, K] → [L, V]."""
        ...

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """What is done to the output layer's results: [L, V] → [L, V]."""
        ...


class UnboundError(Exception):
    """A layer's tensors are not as the kernels need them. The message says why; it ends a
    sentence.
    """


@dataclass(frozen=True, slots=True)
class Part:
    """What one of a layer's parts made of its input.

    Attributes:
        name: of the part.
        kind: see Kind.
        made: [T, width].
    """

    name: str
    kind: Kind
    made: torch.Tensor


def walk(
    layer: LayerParts,
    x: torch.Tensor,
    tables: Tables | None,
    attend: Attend,
    mix: Mix,
    known: Mapping[str, torch.Tensor],
) -> list[Part]:
    """Compute a layer part by part.

    Args:
        layer: the layer.
        x: its input, [T, K], contiguous.
        tables: for rotary embeddings, if it has any.
        attend: its attention.
        mix: its experts, if it has any.
        known: the model's own results by the parts' names, of the first tokens or of all. The next
            part's input is taken from these, and from our own results for the other tokens.

    Returns:
        the parts in order; the last one is the layer's output.
    """
    return _Walk(layer, known, []).run(x, tables, attend, mix)


@dataclass(frozen=True, slots=True)
class _Walk:
    layer: LayerParts
    known: Mapping[str, torch.Tensor]
    parts: list[Part]

    def run(self, x: torch.Tensor, tables: Tables | None, attend: Attend, mix: Mix) -> list[Part]:
        """Compute the parts in turn."""
        one = self.layer.description
        heads = one.attention
        query, keys = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
        normed = self._norm("before_attention", one.before_attention, x)
        projected = self._products("projection", normed)
        sizes = (query, keys, keys)
        q, k, v = (part.contiguous() for part in projected.split_with_sizes(sizes, -1))
        if one.attention.norms_last:
            q, k = self._rotate(q, k, tables)
            q, k = self._norm_heads(q, k)
        else:
            q, k = self._norm_heads(q, k)
            q, k = self._rotate(q, k, tables)
        shape = (len(x), -1, heads.head_dim)
        attended = attend(q.view(shape), k.view(shape), v.view(shape)).reshape(len(x), -1)
        attended = self._add_part("attention", "attention", attended)
        made = self._products("output", attended)
        made = self._norm("after_attention", one.after_attention, made)
        residual = self._sum("residual", x, made)
        between = normed if one.parallel else self._norm("before_mlp", one.before_mlp, residual)
        if isinstance(one.mlp, described.Experts):
            made = self._add_part("experts", "experts", mix(between))
        else:
            inner = self._products("inner", between)
            gated = self._add_part("activation", "norm", self.layer.gate(inner))
            made = self._products("down", gated)
        made = self._norm("after_mlp", one.after_mlp, made)
        self._sum("result", residual, made)
        return self.parts

    def _add_part(self, name: str, kind: Kind, made: torch.Tensor) -> torch.Tensor:
        self.parts.append(Part(name, kind, made))
        known = self.known.get(name)
        if known is None or known.shape[1:] != made.shape[1:]:
            return made
        return torch.cat([known, made[len(known) :]])

    def _norm(self, name: str, norm: described.Norm | None, x: torch.Tensor) -> torch.Tensor:
        if norm is None:
            return x
        return self._add_part(name, "norm", self.layer.norm(name, x.contiguous()))

    def _norm_heads(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one = self.layer.description.attention
        return self._norm("query_norm", one.query_norm, q), self._norm("key_norm", one.key_norm, k)

    def _products(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._add_part(name, "product", self.layer.multiply(name, x))

    def _rotate(
        self, q: torch.Tensor, k: torch.Tensor, tables: Tables | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if tables is not None:
            q, k = self.layer.rotate(q, k, tables)
        return self._add_part("queries", "exact", q), self._add_part("keys", "exact", k)

    def _sum(self, name: str, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return self._add_part(name, "exact", self.layer.add(x, made))
