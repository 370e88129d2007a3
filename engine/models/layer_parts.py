"""Computes a layer operation by operation.

`OurDecoder` and `LayerParts` are the interfaces of our decoders that allow each operation to be
compared with the model's own. `walk` computes the operations of a layer in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from engine.attention.interface import AttentionBackend, AttentionContext
from engine.models import description as described

Kind = Literal["exact", "norm", "product", "attention", "experts"]
"""The kind of an operation, which determines how close its result must be to the model's own."""
Tables = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a step's tokens, float32 [T, dim / 2] each."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes attention: queries [T, Hq, D], keys and values [T, Hkv, D] → [T, Hq, D]."""
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

    def gate(self, inner: torch.Tensor) -> torch.Tensor:
        """Apply the activation to the result of an MLP's first product."""
        ...

    def add(self, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Return x + residual · made, [T, K] each."""
        ...

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer's experts; see Mix."""
        ...


class OurDecoder(Protocol):
    """The interface through which comparisons use our decoders; see
    `engine.models.native_decoder`.
    """

    @property
    def description(self) -> described.Decoder:
        """What the decoder computes."""
        ...

    @property
    def layers(self) -> Sequence[LayerParts]:
        """The layers with their tensors."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type of the elements."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        ...

    @property
    def backend(self) -> AttentionBackend:
        """The backend that computes attention."""
        ...

    @property
    def one_call(self) -> Kind:
        """How close a layer in one call must be to its separate operations."""
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embed token ids: [T] → [T, K]."""
        ...

    def tables(self, positions: torch.Tensor) -> Sequence[Tables]:
        """Return the cosines and sines for tokens at these positions, for each of the rotary
        embeddings.
        """
        ...

    def run(
        self, layers: Any, x: torch.Tensor, tables: Any, context: AttentionContext
    ) -> torch.Tensor:
        """Compute some of the layers: [T, K] → [T, K]."""
        ...

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the last norm: [L, K] → [L, K]."""
        ...

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the output layer: [L, K] → [L, V]."""
        ...

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale and cap the output layer's results: [L, V] → [L, V]."""
        ...


class UnboundError(Exception):
    """A layer's tensors are not as the kernels need them. The message gives the reason, worded to
    complete a sentence.
    """


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


def walk(
    layer: LayerParts,
    x: torch.Tensor,
    tables: Tables | None,
    attend: Attend,
    mix: Mix,
    known: Mapping[str, torch.Tensor],
) -> list[Part]:
    """Compute a layer operation by operation.

    Args:
        layer: the layer.
        x: its input, [T, K], contiguous.
        tables: the cosines and sines, if it has rotary embeddings.
        attend: computes its attention.
        mix: computes its experts, if it has any.
        known: the model's own results by name, for all tokens or only the first ones. The next
            operation uses them as its input, and our own results for the remaining tokens.

    Returns:
        The results in order. The last one is the layer's output.
    """
    return _Walk(layer, known, []).run(x, tables, attend, mix)


@dataclass(frozen=True, slots=True)
class _Walk:
    layer: LayerParts
    known: Mapping[str, torch.Tensor]
    parts: list[Part]

    def run(self, x: torch.Tensor, tables: Tables | None, attend: Attend, mix: Mix) -> list[Part]:
        """Compute the operations in order."""
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
