"""A whole decoder layer in one call of the library: a forward for a model's own layer.

What `engine.runner.fused` leaves of a step is mostly Python between kernels that take microseconds.
Where all parts of a layer are ours, they follow one another here without it, in scratch memory that
all layers of a model share. It is for the engine's steps alone; any other call goes to the layer's
class, whose modules are ours, too.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.attention.base import AttentionContext
from engine.attention.native_backend import NativeAttentionBackend, NativeMetadata
from engine.attention.registry import ATTENTION_NAME, CONTEXT_KEYWORD
from engine.native.library import LayerCall
from engine.runner.fused import PLAN, has_embeddings
from engine.runner.packed import native_library

_is_compiling = torch.compiler.is_compiling


@dataclass(slots=True)
class LayerScratch:
    """Memory that all layers of a model use, one after the other.

    Attributes:
        numbers: bfloat16.
    """

    numbers: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bfloat16))

    def of(self, call: LayerCall) -> int:
        """The address of as much as a call needs."""
        needed = native_library().layer_scratch(ctypes.byref(call))
        if needed > self.numbers.numel():
            self.numbers = torch.empty(needed, dtype=torch.bfloat16)
        return self.numbers.data_ptr()


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Of a decoder layer. For one thread at a time.

    Attributes:
        call: all that is known before a step is.
        held: what it points to: kept alive. A copy of the layer points to nothing, and has no plan.
        index: of the layer's cache.
        rotary_dim: how many numbers of a head are turned.
        scratch: shared.
    """

    call: LayerCall
    held: tuple[torch.Tensor, ...]
    index: int
    rotary_dim: int
    scratch: LayerScratch

    def __deepcopy__(self, memo: object) -> None:
        return None


def layer_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    *arguments: Any,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Of a decoder layer: [1, T, K] → [1, T, K].

    Args:
        hidden_states: bfloat16 [1, T, K].
        arguments: handed on; not the engine's.
        position_embeddings: cosines and sines, bfloat16 [1, T, rotary_dim] each.
        kwargs: the step's context among them, and what the engine's steps do not need.
    """
    plan: LayerPlan | None = self.__dict__[PLAN]
    context = kwargs.get(CONTEXT_KEYWORD)
    config: Any = self._modules["self_attn"].config  # type: ignore[union-attr]  # it has one
    if (
        plan is None
        or type(context) is not AttentionContext
        or type(context.backend) is not NativeAttentionBackend
        or arguments
        or _is_compiling()
        or config._attn_implementation != ATTENTION_NAME
        or hidden_states.dtype is not torch.bfloat16
        or not hidden_states.is_contiguous()
        or hidden_states.shape[0] != 1
        or not has_embeddings(position_embeddings, hidden_states, plan.rotary_dim)
    ):
        return type(self).forward(  # type: ignore[no-any-return]
            self,
            hidden_states,
            *arguments,
            position_embeddings=position_embeddings,
            **kwargs,
        )
    return _run(plan, hidden_states, position_embeddings, context)


def _run(
    plan: LayerPlan,
    x: torch.Tensor,
    embeddings: tuple[torch.Tensor, torch.Tensor] | None,
    context: AttentionContext,
) -> torch.Tensor:
    call, backend, cache = plan.call, context.backend, context.caches[plan.index]
    metadata = context.metadata[cache.group]
    if not isinstance(metadata, NativeMetadata) or not isinstance(backend, NativeAttentionBackend):
        raise TypeError(f"metadata of another backend: {type(metadata).__name__}")
    y = torch.empty_like(x)
    if embeddings is not None:
        call.heads.cos, call.heads.sin = embeddings[0].data_ptr(), embeddings[1].data_ptr()
    call.attention = ctypes.addressof(metadata.call)
    call.x, call.y, call.tokens = x.data_ptr(), y.data_ptr(), x.shape[1]
    call.keys, call.values = cache.keys.data_ptr(), cache.values.data_ptr()
    call.scratch = plan.scratch.of(call)
    while True:
        call.attention_scratch = backend.scratch.data_ptr()
        call.attention_floats = backend.scratch.numel()
        needed = native_library().layer(ctypes.byref(call))
        if not needed:
            return y
        backend.grow_scratch(needed)
