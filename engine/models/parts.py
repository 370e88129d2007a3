"""A described layer with its tensors, and its kernels one by one.

`BoundLayer` holds what the kernels read: a LayerSpec for a whole layer in one call. `walk` computes
the same part by part, so that each part can be compared with the model's own; it takes the layers
of any decoder of ours (`LayerParts`).
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from engine.attention.base import AttentionBackend, AttentionContext
from engine.models import description as described
from engine.models.packed import PANEL, PackedLinear, linear_weight, native_library, type_of
from engine.native.library import (
    BFLOAT16,
    CENTERED,
    FLOAT32,
    FROM_ONE,
    GELU_TANH,
    RELU_SQUARED,
    ROUNDED_FIRST,
    SILU,
    HeadsCall,
    LayerSpec,
    LinearWeight,
    NormWeight,
)

_FORMS: dict[described.NormForm, int] = {
    "plain": 0,
    "from_one": FROM_ONE,
    "rounded_first": ROUNDED_FIRST,
    "centered": CENTERED,
}
_ACTIVATIONS: dict[described.Activation, int] = {
    "silu": SILU,
    "gelu_tanh": GELU_TANH,
    "relu_squared": RELU_SQUARED,
}
DTYPES = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}
"""The types of models, with the kernels' codes."""

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

    def turn(
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
    """A layer's tensors are not as the kernels need them; the message says why, as the end of a
    sentence.
    """


class Held:
    """Keeps tensors alive whose addresses are used."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self._model = model
        self._dtype = dtype
        self._tensors: list[torch.Tensor] = []

    def address(self, tensor: torch.Tensor | None) -> int | None:
        """A tensor's address."""
        if tensor is None:
            return None
        self._tensors.append(tensor.detach())
        return tensor.data_ptr()

    def norm(self, one: described.Norm | None) -> NormWeight:
        """A norm; without a weight if there is none."""
        if one is None:
            return NormWeight()
        parameters = self._model.get_submodule(one.module)._parameters
        weight, bias = parameters["weight"], parameters.get("bias")
        for tensor in (weight, bias):
            if tensor is not None and (
                tensor.dtype != self._dtype or not tensor.is_cpu or not tensor.is_contiguous()
            ):
                raise UnboundError(f"{one.module} is {tensor.dtype} on {tensor.device}")
        form = _FORMS[one.form]
        return NormWeight(self.address(weight), self.address(bias), one.width, one.eps, form)

    def linears(self, paths: Sequence[str], inputs: int, outputs: int) -> list[LinearWeight]:
        """Packed linear layers with the same input; one, if their weights are adjacent.

        inputs, outputs: how many they must have together.
        """
        layers: list[PackedLinear] = []
        for path in paths:
            module = self._model.get_submodule(path)
            if type(module) is not PackedLinear:
                raise UnboundError(f"{path} is not packed")
            if type_of(module.packed) is not self._dtype:
                raise UnboundError(f"{path} is not {self._dtype}")
            layers.append(module)
        if {one.in_features for one in layers} != {inputs} or outputs != sum(
            one.out_features for one in layers
        ):
            raise UnboundError(f"{paths[0]} has other sizes than its neighbours")
        if len(layers) > 1 and _are_adjacent(layers):
            return [self._joined(layers, inputs, outputs)]
        return [self._linear(one) for one in layers]

    def mlp(self, spec: LayerSpec, one: described.Mlp, width: int) -> None:
        """Put an MLP into a layer's spec; width: of its inputs and outputs."""
        down = self._model.get_submodule(one.down)
        inner = down.in_features if isinstance(down, PackedLinear) else 0
        weights = self.linears(one.inner, width, (1 + one.gated) * inner)
        spec.inner = (LinearWeight * 2)(*weights)
        spec.down = self.linears([one.down], inner, width)[0]
        spec.gated, spec.activation = one.gated, _ACTIVATIONS[one.activation]

    def _linear(self, one: PackedLinear) -> LinearWeight:
        for tensor in (one.packed, one.scales, one.padded_bias):
            self.address(tensor)
        sizes = (one.out_features, one.in_features)
        return linear_weight(one.packed, one.scales, one.padded_bias, *sizes)

    def _joined(self, layers: Sequence[PackedLinear], inputs: int, outputs: int) -> LinearWeight:
        bias = scales = None
        if any(one.padded_bias is not None for one in layers):
            bias = torch.cat([_bias(one) for one in layers])
        if layers[0].scales is not None:
            scales = torch.cat([one.scales for one in layers if one.scales is not None])
        for tensor in (*(one.packed for one in layers), bias, scales):
            self.address(tensor)
        return linear_weight(layers[0].packed, scales, bias, outputs, inputs)


def _are_adjacent(layers: Sequence[PackedLinear]) -> bool:
    return all(
        left.packed.data_ptr() + left.packed.nbytes == right.packed.data_ptr()
        and left.packed.untyped_storage().data_ptr() == right.packed.untyped_storage().data_ptr()
        and not left.out_features % PANEL  # multiples of this are whole panels for any kernel
        and (left.scales is None) == (right.scales is None)
        for left, right in itertools.pairwise(layers)
    )


def _bias(layer: PackedLinear) -> torch.Tensor:
    if layer.padded_bias is None:
        return torch.zeros(-(-layer.out_features // PANEL) * PANEL)
    return layer.padded_bias


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """A layer with its tensors.

    Attributes:
        description: the layer.
        rotary: its rotary embeddings, if it has any.
        spec: what the kernels read.
        dtype: of its elements.
        held: keeps the tensors alive that `spec` points to.
        experts: the model's own module in the place of the MLP, [1, T, K] → [1, T, K]; None: the
            MLP is in `spec`.
    """

    description: described.Layer
    rotary: described.Rotary | None
    spec: LayerSpec
    dtype: torch.dtype
    held: Held
    experts: torch.nn.Module | None

    @classmethod
    def of(
        cls, model: torch.nn.Module, decoder: described.Decoder, layer: described.Layer, width: int
    ) -> BoundLayer:
        """Bind a layer to a model's tensors.

        width: how many elements a token has between layers.

        Raises:
            UnboundError: they are not packed, or not in the kernels' format.
        """
        dtype = next(model.parameters()).dtype
        held, attention = Held(model, dtype), layer.attention
        rotary = None if attention.rotary is None else decoder.rotaries[attention.rotary]
        query = attention.heads * attention.head_dim
        keys = attention.kv_heads * attention.head_dim
        query_norm, key_norm = attention.query_norm, attention.key_norm
        for norm, whole in ((query_norm, query), (key_norm, keys)):
            if norm is not None and norm.width not in (attention.head_dim, whole):
                raise UnboundError(f"{norm.module} norms {norm.width} elements together")
        of_heads = query_norm is not None and query_norm.width == attention.head_dim
        if of_heads and rotary is not None and rotary.paired and not attention.norms_last:
            raise UnboundError("heads are normed, and rotated in pairs")
        if attention.norms_last and not of_heads:
            raise UnboundError("heads are normed together after they were rotated")
        spec = LayerSpec(
            before_attention=held.norm(layer.before_attention),
            after_attention=held.norm(layer.after_attention),
            before_mlp=held.norm(layer.before_mlp),
            after_mlp=held.norm(layer.after_mlp),
            projection=(LinearWeight * 3)(
                *held.linears(attention.projection, width, query + 2 * keys)
            ),
            output=held.linears([attention.output], query, width)[0],
            heads=HeadsCall(
                num_heads=attention.heads,
                num_kv_heads=attention.kv_heads,
                head_dim=attention.head_dim,
                rotary_dim=0 if rotary is None else rotary.dim,
                query_norm=held.norm(query_norm),
                key_norm=held.norm(key_norm),
                paired=rotary is not None and rotary.paired,
                rounds=rotary is not None and rotary.rounds_products,
                norms_last=attention.norms_last,
            ),
            rotary=attention.rotary or 0,
            parallel=layer.parallel,
            dtype=DTYPES[dtype],
            residual=layer.residual,
            scaling=attention.scaling,
            softcap=attention.softcap or 0.0,
        )
        if isinstance(layer.mlp, described.Experts):
            return cls(layer, rotary, spec, dtype, held, model.get_submodule(layer.mlp.module))
        held.mlp(spec, layer.mlp, width)
        return cls(layer, rotary, spec, dtype, held, None)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        """Its experts; see Mix."""
        if self.experts is None:
            raise TypeError(f"{self.description.module} has no experts")
        made: torch.Tensor = self.experts(x.unsqueeze(0))
        return made[0].contiguous()

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """See LayerParts."""
        heads = name in ("query_norm", "key_norm")
        return _norm(self.spec, getattr(self.spec.heads if heads else self.spec, name), x)

    def multiply(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """See LayerParts."""
        weights = getattr(self.spec, name)
        made = []
        for one in [weights] if isinstance(weights, LinearWeight) else weights:
            if one.outputs:
                y = x.new_empty((len(x), one.outputs))
                native_library().linear(
                    ctypes.byref(one), x.data_ptr(), one.inputs, y.data_ptr(), one.outputs,
                    len(x), torch.get_num_threads(),
                )  # fmt: skip
                made.append(y)
        return torch.cat(made, -1)

    def turn(
        self, q: torch.Tensor, k: torch.Tensor, tables: Tables
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See LayerParts."""
        q, k = q.clone(), k.clone()
        call = HeadsCall.from_buffer_copy(self.spec.heads)
        call.query_norm, call.key_norm, call.norms_last = NormWeight(), NormWeight(), 0
        call.query, call.key = q.data_ptr(), k.data_ptr()
        call.query_stride, call.key_stride = q.shape[1], k.shape[1]
        call.cos, call.sin = (one.data_ptr() for one in tables)
        call.tokens = len(q)
        native_library().heads(ctypes.byref(call), self.spec.dtype, torch.get_num_threads())
        return q, k

    def gate(self, inner: torch.Tensor) -> torch.Tensor:
        """See LayerParts."""
        tokens, width = inner.shape
        count = width // 2 if self.spec.gated else width
        y = inner.new_empty((tokens, count))
        up = inner.data_ptr() + count * inner.element_size() if self.spec.gated else None
        native_library().gate(
            self.spec.activation, inner.data_ptr(), up, width, y.data_ptr(), count, tokens, count,
            self.spec.dtype, torch.get_num_threads(),
        )  # fmt: skip
        return y

    def add(self, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """See LayerParts."""
        return _sum(self.spec, x, made)

    def add_experts(self, x: torch.Tensor) -> torch.Tensor:
        """The rest of a layer of which the kernels computed what comes before the MLP."""
        spec = self.spec
        made = _norm(spec, spec.before_mlp, x)
        return _sum(spec, x, _norm(spec, spec.after_mlp, self.mix(made)))


def _norm(spec: LayerSpec, norm: Any, x: torch.Tensor) -> torch.Tensor:
    """A norm; x itself if there is none."""
    if not norm.weight:
        return x
    x = x.contiguous()
    y = torch.empty_like(x)
    native_library().norm(
        ctypes.byref(norm), x.data_ptr(), y.data_ptr(), norm.width, x.numel() // norm.width,
        spec.dtype, torch.get_num_threads(),
    )  # fmt: skip
    return y


def _sum(spec: LayerSpec, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """x + residual · made, [T, K] each."""
    y = torch.empty_like(x)
    native_library().add(
        x.data_ptr(), made.data_ptr(), spec.residual, y.data_ptr(), *x.shape, spec.dtype,
        torch.get_num_threads(),
    )  # fmt: skip
    return y


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
        """See `walk`."""
        one = self.layer.description
        heads = one.attention
        query, keys = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
        normed = self._norm("before_attention", one.before_attention, x)
        projected = self._products("projection", normed)
        sizes = (query, keys, keys)
        q, k, v = (part.contiguous() for part in projected.split_with_sizes(sizes, -1))
        if one.attention.norms_last:
            q, k = self._turn(q, k, tables)
            q, k = self._norm_heads(q, k)
        else:
            q, k = self._norm_heads(q, k)
            q, k = self._turn(q, k, tables)
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

    def _turn(
        self, q: torch.Tensor, k: torch.Tensor, tables: Tables | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if tables is not None:
            q, k = self.layer.turn(q, k, tables)
        return self._add_part("queries", "exact", q), self._add_part("keys", "exact", k)

    def _sum(self, name: str, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return self._add_part(name, "exact", self.layer.add(x, made))
