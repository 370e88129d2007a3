"""A layer with its tensors, for the native kernels.

A `BoundLayer` holds a LayerSpec, from which the kernels compute the whole layer in one call. For
comparisons, it can also compute each operation with a separate kernel.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.models import description as described
from engine.models.formats.native import DTYPES, OF_GROUPS, PANEL, Native, in_panels, native_library
from engine.models.held_layer import PackedLinear
from engine.models.joined_tensors import join_parts
from engine.models.layer_parts import UnboundError
from engine.models.operations import Tables
from engine.native.library import (
    CENTERED,
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
_Layer = tuple[Native, torch.Tensor | None]
"""The weight and the padded bias of a linear layer."""


class Held:
    """Passes tensors to the kernels by address, and keeps them alive."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self._model = model
        self._dtype = dtype
        self._tensors: list[torch.Tensor] = []

    def address(self, tensor: torch.Tensor | None) -> int | None:
        """Return a tensor's address, and keep the tensor alive."""
        if tensor is None:
            return None
        self._tensors.append(tensor.detach())
        return tensor.data_ptr()

    def norm(self, one: described.Norm | None) -> NormWeight:
        """Return a norm for the kernels. It has no weight if `one` is None."""
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
        """Return packed linear layers that have the same input, as one layer if their weights are
        adjacent.

        inputs, outputs: the required width of the input and total width of the outputs.
        """
        layers: list[_Layer] = []
        for path in paths:
            module = self._model.get_submodule(path)
            if not isinstance(module, PackedLinear) or not isinstance(module.held, Native):
                raise UnboundError(f"{path} is not packed")
            if module.held.dtype is not self._dtype:
                raise UnboundError(f"{path} is not {self._dtype}")
            layers.append((module.held, module.padded_bias))
        shapes = [held.shape for held, _ in layers]
        if {shape[1] for shape in shapes} != {inputs} or outputs != sum(
            shape[0] for shape in shapes
        ):
            raise UnboundError(f"{paths[0]} has other sizes than its neighbours")
        if len(layers) > 1 and _are_adjacent(layers):
            return [self._joined(layers, outputs)]
        return [self._linear(*one) for one in layers]

    def mlp(self, spec: LayerSpec, one: described.Mlp, width: int) -> None:
        """Add an MLP to a layer's spec. width: of its inputs and outputs."""
        down = self._model.get_submodule(one.down)
        inner = down.in_features if isinstance(down, PackedLinear) else 0
        weights = self.linears(one.inner, width, (1 + one.gated) * inner)
        spec.inner = (LinearWeight * 2)(*weights)
        spec.down = self.linears([one.down], inner, width)[0]
        spec.gated, spec.activation = one.gated, _ACTIVATIONS[one.activation]

    def _linear(self, held: Native, bias: torch.Tensor | None) -> LinearWeight:
        for tensor in (held.packed, *held.of_groups, held.order, bias):
            self.address(tensor)
        return held.for_kernels(bias)

    def _joined(self, layers: Sequence[_Layer], outputs: int) -> LinearWeight:
        whole, bias = copy.copy(layers[0][0]), None
        whole.shape = (outputs, whole.shape[1])
        if any(own is not None for _, own in layers):
            bias = join_parts(
                [
                    torch.zeros(in_panels(held.shape[0])) if own is None else own
                    for held, own in layers
                ]
            )
        for name in OF_GROUPS:
            if getattr(whole, name) is not None:
                setattr(whole, name, join_parts([getattr(one, name) for one, _ in layers]))
        for held, _ in layers:
            self.address(held.packed)
        return self._linear(whole, bias)


def _are_adjacent(layers: Sequence[_Layer]) -> bool:
    return all(
        left.packed.data_ptr() + left.packed.nbytes == right.packed.data_ptr()
        and left.packed.untyped_storage().data_ptr() == right.packed.untyped_storage().data_ptr()
        and not left.shape[0] % PANEL  # multiples of this are whole panels for any kernel
        and _form(left) == _form(right)
        for (left, _), (right, _) in itertools.pairwise(layers)
    )


def _form(held: Native) -> tuple[object, ...]:
    return (
        *(held.bits, held.group, held.per_factor),
        *(None if one is None else one.dtype for one in held.of_groups),
        held.order is None or held.order.tolist(),
    )


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """A layer with its tensors.

    Attributes:
        description: the description of the layer.
        spec: what the kernels read.
        dtype: of its elements.
        held: keeps the tensors alive that `spec` points to.
        experts: the model's own module that replaces the MLP, [1, T, K] → [1, T, K]. None if `spec`
            has an MLP.
    """

    description: described.Layer
    spec: LayerSpec
    dtype: torch.dtype
    held: Held
    experts: torch.nn.Module | None

    @classmethod
    def of(
        cls, model: torch.nn.Module, decoder: described.Decoder, layer: described.Layer, width: int
    ) -> BoundLayer:
        """Bind a layer to a model's tensors.

        width: the number of elements per token between layers.

        Raises:
            UnboundError: the tensors are not packed, or not in the kernels' format.
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
            return cls(layer, spec, dtype, held, model.get_submodule(layer.mlp.module))
        held.mlp(spec, layer.mlp, width)
        return cls(layer, spec, dtype, held, None)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer's experts; see Mix."""
        if self.experts is None:
            raise TypeError(f"{self.description.module} has no experts")
        made: torch.Tensor = self.experts(x.unsqueeze(0))
        return made[0].contiguous()

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        heads = name in ("query_norm", "key_norm")
        return _norm(self.spec, getattr(self.spec.heads if heads else self.spec, name), x)

    def multiply(self, name: str, x: torch.Tensor) -> torch.Tensor:
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

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, tables: Tables
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
        return _sum(self.spec, x, made)

    def add_experts(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the rest of a layer with experts, after the kernels have computed its
        attention.
        """
        spec = self.spec
        made = _norm(spec, spec.before_mlp, x)
        return _sum(spec, x, _norm(spec, spec.after_mlp, self.mix(made)))


def _norm(spec: LayerSpec, norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Apply a norm. Return x itself if there is none."""
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
    """Return x + residual · made, [T, K] each."""
    y = torch.empty_like(x)
    native_library().add(
        x.data_ptr(), made.data_ptr(), spec.residual, y.data_ptr(), *x.shape, spec.dtype,
        torch.get_num_threads(),
    )  # fmt: skip
    return y
