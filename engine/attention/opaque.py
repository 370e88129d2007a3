"""Attention as one operation that a compiler does not look into.

The step's context cannot be passed to a compiled model: the compiler would specialise on it, and
compile again at each step. The model is given an id of the call instead, and the operation looks up
the context by that id in CALLS, where it is kept only during the call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.attention.interface import AttentionContext, AttentionParams
from engine.native.torch_library import operation

CALLS: dict[int, AttentionContext] = {}
"""The contexts of the model calls in progress, by id. There is no other way to pass an object that
is not a tensor to an operation.
"""
_call_ids = itertools.count(1)


_SCHEMA = (
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor? sinks, int call_id, "
    "int layer, float scaling, float? softcap) -> Tensor"
)


def new_call_id() -> int:
    """Make an id for the calls of one model, which is called by one thread at a time."""
    return next(_call_ids)


@contextmanager
def calling(call_id: int, context: AttentionContext) -> Iterator[None]:
    """A block in which a model is called with that id."""
    CALLS[call_id] = context
    try:
        yield
    finally:
        del CALLS[call_id]


def _shape_of_result(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    call_id: int,
    layer: int,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    return query.new_empty((query.shape[1], query.shape[0], value.shape[-1]))


@operation(_SCHEMA, _shape_of_result)
def attend_by_call_id(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    call_id: int,
    layer: int,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """See `AttentionBackend.forward`: [Hq, T, D], [Hkv, T, D], [Hkv, T, Dv] → [T, Hq, Dv].

    The cache is written too, which the compiler need not know: a layer's result is always used, and
    the next layer's inputs depend on it.
    """
    context = CALLS[call_id]
    cache = context.caches[layer]
    params = AttentionParams(scaling=scaling, softcap=softcap, sinks=sinks)
    metadata = context.metadata[cache.group]
    return context.backend.forward(query, key, value, cache, metadata, params)
