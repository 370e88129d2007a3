"""A layer with its tensors, for the native kernels.

A `BoundLayer` holds a LayerSpec, from which the kernels compute the whole layer in one call. For
comparisons, it can also compute each operation with a separate kernel.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.interface import AttentionParams
from engine.attention.step_states import StepStates
from engine.models import description as described
from engine.models.formats.native import DTYPES, native_library
from engine.models.layer_parts import run_experts, split_projection
from engine.models.native_recurrence import bind_recurrence, gated_norm, recur
from engine.models.native_tensors import Held
from engine.models.operations import Tables
from engine.native.library import SIGMOID, HeadsCall, LayerSpec, LinearWeight, NormWeight


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

    @property
    def params(self) -> AttentionParams:
        one = self.description.attention
        return AttentionParams(one.scaling, one.softcap, self.held.sinks)

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
        held = Held(model, dtype)
        spec = LayerSpec(
            before_attention=held.norm(layer.before_attention),
            after_attention=held.norm(layer.after_attention),
            before_mlp=held.norm(layer.before_mlp),
            after_mlp=held.norm(layer.after_mlp),
            parallel=layer.parallel,
            dtype=DTYPES[dtype],
            residual=layer.residual,
        )
        if isinstance(layer.mixer, described.Attention):
            held.attention(spec, layer.mixer, decoder, width)
        else:
            bind_recurrence(held, spec, layer.mixer, width)
        if isinstance(layer.mlp, described.Experts):
            return cls(layer, spec, dtype, held, model.get_submodule(layer.mlp.module))
        held.mlp(spec, layer.mlp, width)
        return cls(layer, spec, dtype, held, None)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer's experts; see Mix."""
        if self.experts is None:
            raise TypeError(f"{self.description.module} has no experts")
        return run_experts(self.experts, x)

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
        call.query_head_stride = call.head_dim
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
            self.spec.activation, inner.data_ptr(), width, up, width, y.data_ptr(), count, tokens,
            count, self.spec.dtype, torch.get_num_threads(),
        )  # fmt: skip
        return y

    def recur(self, projected: torch.Tensor, states: StepStates) -> torch.Tensor:
        return recur(self.spec, self.description, projected, states)

    def gate_mixed(self, mixed: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        mixer = self.description.mixer
        if not isinstance(mixer, described.Attention):
            return gated_norm(self.spec, mixed, projected)
        gates = split_projection(mixer, projected)[1].contiguous()
        y = torch.empty_like(mixed)
        tokens, width = mixed.shape
        native_library().gate(
            SIGMOID, gates.data_ptr(), width, mixed.data_ptr(), width, y.data_ptr(), width, tokens,
            width, self.spec.dtype, torch.get_num_threads(),
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
