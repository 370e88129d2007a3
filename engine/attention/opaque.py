"""Attention as one operation that a compiler does not look into.

A compiled model cannot be handed the step's context: the compiler would specialise on it, and
compile anew at each step. It is given an id of the call instead, and the operation finds the
context under that id in CALLS, where it stands while the model is called, and no longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.attention.base import AttentionContext, AttentionParams

CALLS: dict[int, AttentionContext] = {}
"""The contexts of the model calls that are under way, by id. Operations have no other way to
be given what is not a tensor.
"""
_call_ids = itertools.count(1)


_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? sinks, int call_id, int layer, "
    "float scaling, float? softcap) -> Tensor"
)


def new_call_id() -> int:
    """An id for the calls of one model, on one thread at a time."""
    return next(_call_ids)


@contextmanager
def calling(call_id: int, context: AttentionContext) -> Iterator[None]:
    """While a model is called with that id."""
    CALLS[call_id] = context
    try:
        yield
    finally:
        del CALLS[call_id]


@torch.library.custom_op("headrace::paged_attention", mutates_args=(), schema=_SCHEMA)
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


@attend_by_call_id.register_fake
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
