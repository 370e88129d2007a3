"""A forward for a model's own decoder layers that computes whole layers in one call of the
library.

With `engine.runner.fused`, a step mostly spends its time in Python code between kernels that take
microseconds. If all parts of a layer have our forwards, they are computed here without Python in
between, in scratch memory that all layers of a model share. If a model does nothing between its
layers, the first one computes all of them, and the others return their input:

    model ─x─▶ layer 0: one call through all layers ─y─▶ layer 1 ─y─▶ … ─y─▶ layer N−1 ─y─▶ model

This is only for the engine's steps; any other call goes to the forward of the layer's class, with
the same modules.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.attention.base import AttentionContext
from engine.attention.native_backend import NativeAttentionBackend, NativeMetadata
from engine.attention.registry import ATTENTION_NAME, CONTEXT_KEYWORD
from engine.native.library import LayersCall, LayerSpec
from engine.runner.fused import PLAN, has_embeddings
from engine.runner.likeness import has_hooks
from engine.runner.packed import native_library

_is_compiling = torch.compiler.is_compiling

Embeddings = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, bfloat16 [1, T, rotary_dim] each."""


@dataclass(slots=True)
class LayerScratch:
    """Scratch memory that all layers of a model use in turn.

    Attributes:
        elements: the memory, as bfloat16.
    """

    elements: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bfloat16))

    def of(self, needed: int) -> int:
        """The address of memory for at least `needed` elements."""
        if needed > self.elements.numel():
            self.elements = torch.empty(needed, dtype=torch.bfloat16)
        return self.elements.data_ptr()


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """How to compute a decoder layer.

    Attributes:
        spec: everything that does not depend on the step.
        held: the tensors that it points to, kept alive.
        index: the index of the layer's cache.
        rotary_dim: how many elements of a head are rotated.
    """

    spec: LayerSpec
    held: tuple[torch.Tensor, ...]
    index: int
    rotary_dim: int


class LayerRun:
    """Consecutive layers that are computed in one call. Used by one thread at a time.

    Attributes:
        plans: the layers' plans.
        layers: the layers themselves, if there are several.
        scratch: shared by all layers of a model.
        rotary_dim: how many elements of a head are rotated, in layers that rotate any.
        result: with several layers, the output of the present step, until the last layer has
            received it.
    """

    def __init__(
        self,
        plans: Sequence[LayerPlan],
        scratch: LayerScratch,
        layers: Sequence[torch.nn.Module] = (),
    ) -> None:
        """plans: those of layers that rotate the same number of elements of a head, or none. For
        the other arguments see the class.
        """
        self.plans = tuple(plans)
        self.layers = tuple(layers)
        self.scratch = scratch
        self.rotary_dim = max(plan.rotary_dim for plan in plans)
        self.result: torch.Tensor | None = None
        self._scratch_per_token = max(
            native_library().layer_scratch(ctypes.byref(plan.spec), 1) for plan in plans
        )
        self._addresses = ctypes.c_void_p * len(plans)
        self._specs = self._addresses(*(ctypes.addressof(plan.spec) for plan in plans))

    def compute(
        self, x: torch.Tensor, embeddings: Embeddings | None, context: AttentionContext
    ) -> torch.Tensor:
        """[1, T, K] → [1, T, K], bfloat16.

        Args:
            x: contiguous.
            embeddings: needed if layers rotate.
            context: that of a step with the native backend.
        """
        backend = context.backend
        if not isinstance(backend, NativeAttentionBackend):
            raise TypeError(f"another backend: {type(backend).__name__}")
        of_groups = [_address(one) for one in context.metadata]
        caches = [context.caches[plan.index] for plan in self.plans]
        attention = self._addresses(*[of_groups[cache.group] for cache in caches])
        keys = self._addresses(*[cache.keys.data_ptr() for cache in caches])
        values = self._addresses(*[cache.values.data_ptr() for cache in caches])
        y = torch.empty_like(x)
        cos, sin = (None, None) if embeddings is None else [one.data_ptr() for one in embeddings]
        tokens = x.shape[1]
        call = LayersCall(
            ctypes.addressof(self._specs),
            ctypes.addressof(attention),
            ctypes.addressof(keys),
            ctypes.addressof(values),
            x.data_ptr(),
            y.data_ptr(),
            cos,
            sin,
            self.scratch.of(tokens * self._scratch_per_token),
            backend.scratch.data_ptr(),
            backend.scratch.numel(),
            tokens,
            len(self.plans),
            0,
        )
        while needed := native_library().layers(ctypes.byref(call)):
            backend.grow_scratch(needed)
            call.attention_scratch = backend.scratch.data_ptr()
            call.attention_floats = backend.scratch.numel()
        return y


def _address(metadata: object) -> int:
    if not isinstance(metadata, NativeMetadata):
        raise TypeError(f"metadata of another backend: {type(metadata).__name__}")
    return ctypes.addressof(metadata.call)


@dataclass(slots=True)
class LayerPlace:
    """How a decoder layer with our forward is computed. A copy of the layer has none, because it
    would point to the original's tensors.

    Attributes:
        alone: computes this layer.
        chain: computes it together with others; None: it is not part of a chain.
    """

    alone: LayerRun
    chain: LayerRun | None = None

    def __deepcopy__(self, memo: object) -> None:
        return None


def layer_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    *arguments: Any,
    position_embeddings: Embeddings | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Forward of a decoder layer: [1, T, K] → [1, T, K].

    Args:
        hidden_states: bfloat16 [1, T, K].
        arguments: passed on; the engine's steps have none.
        position_embeddings: cosines and sines, bfloat16 [1, T, rotary_dim] each.
        kwargs: the step's context, and others that the engine's steps do not need.

    Raises:
        RuntimeError: the model did something between layers that are computed in one call.
    """
    place: LayerPlace | None = self.__dict__[PLAN]
    if place is not None and not _is_compiling():
        chain = place.chain
        is_first = chain is not None and chain.layers[0] is self
        if chain is not None and chain.result is not None and not is_first:
            return _handed_on(chain, hidden_states, is_last=chain.layers[-1] is self)
        if chain is not None:
            chain.result = None  # a failed step may have left one
        run = place.alone
        if chain is not None and is_first and not any(map(has_hooks, chain.layers)):
            run = chain  # hooks must get their own layer's output
        context = _step(self, run, hidden_states, position_embeddings, kwargs)
        if context is not None and not arguments:
            y = run.compute(hidden_states, position_embeddings, context)
            if run is chain:
                chain.result = y
            return y
    return type(self).forward(  # type: ignore[no-any-return]
        self, hidden_states, *arguments, position_embeddings=position_embeddings, **kwargs
    )


def _handed_on(chain: LayerRun, hidden_states: torch.Tensor, *, is_last: bool) -> torch.Tensor:
    if hidden_states is not chain.result:
        chain.result = None
        raise RuntimeError("the model changed what its layers hand on, which it did not at load")
    if is_last:
        chain.result = None
    return hidden_states


def _step(
    layer: torch.nn.Module,
    run: LayerRun,
    hidden_states: torch.Tensor,
    embeddings: Embeddings | None,
    named: Mapping[str, object],
) -> AttentionContext | None:
    """The context of a call, if it is a step of the engine with everything in the kernels' format;
    None: it is another call.
    """
    config: Any = layer._modules["self_attn"].config  # type: ignore[union-attr]  # it has one
    context = named.get(CONTEXT_KEYWORD)
    if (
        type(context) is AttentionContext
        and type(context.backend) is NativeAttentionBackend
        and config._attn_implementation == ATTENTION_NAME
        and hidden_states.dtype is torch.bfloat16
        and hidden_states.is_contiguous()
        and hidden_states.shape[0] == 1
        and has_embeddings(embeddings, hidden_states, run.rotary_dim)
    ):
        return context
    return None
