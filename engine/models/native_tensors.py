"""The tensors of layers, as the native kernels read them.

module ─ parameters, packed weights ─▶ NormWeight, LinearWeight, … ─▶ LayerSpec
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import torch

from engine.models import description as described
from engine.models.formats.native import OF_GROUPS, PANEL, Native, in_panels
from engine.models.held_layer import PackedLinear
from engine.models.joined_tensors import join_parts
from engine.models.layer_parts import UnboundError
from engine.native.library import (
    ATTENTION,
    CENTERED,
    FROM_ONE,
    GELU_TANH,
    PROJECTIONS,
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
        self._sinks: tuple[str, torch.Tensor] | None = None

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
        weight, bias = (self.parameter(one.module, name) for name in ("weight", "bias"))
        return NormWeight(weight, bias, one.width, one.eps, _FORMS[one.form])

    def parameter(self, path: str, name: str, shape: tuple[int, ...] | None = None) -> int | None:
        """Return the address of a module's parameter, or None if it has none of that name.

        shape: the required shape, if any is.
        """
        tensor = self._model.get_submodule(path)._parameters.get(name)
        if tensor is None:
            return None
        if tensor.dtype != self._dtype or not tensor.is_cpu or not tensor.is_contiguous():
            raise UnboundError(f"{path} is {tensor.dtype} on {tensor.device}")
        if shape is not None and tensor.shape != shape:
            raise UnboundError(f"{name} of {path} is {list(tensor.shape)}, not {list(shape)}")
        return self.address(tensor)

    def project(self, spec: LayerSpec, paths: Sequence[str], inputs: int, outputs: int) -> None:
        """Add the first linear layers to a layer's spec; see `linears`."""
        spec.projection = (LinearWeight * PROJECTIONS)(*self.linears(paths, inputs, outputs))

    def linears(self, paths: Sequence[str], inputs: int, outputs: int) -> list[LinearWeight]:
        """Return packed linear layers that have the same input. Neighbours are one layer if their
        weights are adjacent.

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
        runs = [layers[:1]]
        for left, right in itertools.pairwise(layers):
            if _are_adjacent(left, right):
                runs[-1].append(right)
            else:
                runs.append([right])
        return [self._joined(run) if len(run) > 1 else self._linear(*run[0]) for run in runs]

    def mlp(self, spec: LayerSpec, one: described.Mlp, width: int) -> None:
        """Add an MLP to a layer's spec. width: of its inputs and outputs."""
        down = self._model.get_submodule(one.down)
        inner = down.in_features if isinstance(down, PackedLinear) else 0
        weights = self.linears(one.inner, width, (1 + one.gated) * inner)
        spec.inner = (LinearWeight * 2)(*weights)
        spec.down = self.linears([one.down], inner, width)[0]
        spec.gated, spec.activation = one.gated, _ACTIVATIONS[one.activation]

    def attention(
        self, spec: LayerSpec, one: described.Attention, decoder: described.Decoder, width: int
    ) -> None:
        """Add attention to a layer's spec. width: of its inputs and outputs."""
        rotary = None if one.rotary is None else decoder.rotaries[one.rotary]
        query, keys = one.heads * one.head_dim, one.kv_heads * one.head_dim
        for norm, whole in ((one.query_norm, query), (one.key_norm, keys)):
            widths = {one.head_dim} if one.gated else {one.head_dim, whole}
            if norm is not None and norm.width not in widths:
                raise UnboundError(f"{norm.module} norms {norm.width} elements together")
        of_heads = one.query_norm is not None and one.query_norm.width == one.head_dim
        if of_heads and rotary is not None and rotary.paired and not one.norms_last:
            raise UnboundError("heads are normed, and rotated in pairs")
        if one.norms_last and not of_heads:
            raise UnboundError("heads are normed together after they were rotated")
        spec.mixer, spec.attention_gated = ATTENTION, one.gated
        self.project(spec, one.projection, width, (1 + one.gated) * query + 2 * keys)
        spec.output = self.linears([one.output], query, width)[0]
        spec.heads = HeadsCall(
            query_head_stride=(1 + one.gated) * one.head_dim,
            num_heads=one.heads,
            num_kv_heads=one.kv_heads,
            head_dim=one.head_dim,
            rotary_dim=0 if rotary is None else rotary.dim,
            query_norm=self.norm(one.query_norm),
            key_norm=self.norm(one.key_norm),
            paired=rotary is not None and rotary.paired,
            rounds=rotary is not None and rotary.rounds_products,
            norms_last=one.norms_last,
        )
        spec.rotary = one.rotary or 0
        spec.scaling, spec.softcap = one.scaling, one.softcap or 0.0
        if one.sinks is not None:
            path = f"{one.module}.{one.sinks}"
            copied = self._model.get_parameter(path).detach().to(torch.float32, copy=True)
            self._sinks = path, copied
            spec.sinks = copied.data_ptr()

    @property
    def sinks(self) -> torch.Tensor | None:
        """The sinks of the layer's attention, float32 [Hq]; None if it has none."""
        return None if self._sinks is None else self._sinks[1]

    def refresh(self) -> None:
        """Read again what is held as a copy: the sinks."""
        if self._sinks is not None:
            path, copied = self._sinks
            copied.copy_(self._model.get_parameter(path).detach())

    def _linear(self, held: Native, bias: torch.Tensor | None) -> LinearWeight:
        for tensor in (held.packed, *held.of_groups, held.order, bias):
            self.address(tensor)
        return held.for_kernels(bias)

    def _joined(self, layers: Sequence[_Layer]) -> LinearWeight:
        whole, bias = copy.copy(layers[0][0]), None
        whole.shape = (sum(held.shape[0] for held, _ in layers), whole.shape[1])
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


def _are_adjacent(one: _Layer, other: _Layer) -> bool:
    left, right = one[0], other[0]
    return (
        left.packed.data_ptr() + left.packed.nbytes == right.packed.data_ptr()
        and left.packed.untyped_storage().data_ptr() == right.packed.untyped_storage().data_ptr()
        and not left.shape[0] % PANEL  # multiples of this are whole panels for any kernel
        and _form(left) == _form(right)
    )


def _form(held: Native) -> tuple[object, ...]:
    return (
        *(held.bits, held.group, held.per_factor),
        *(None if one is None else one.dtype for one in held.of_groups),
        held.order is None or held.order.tolist(),
    )
