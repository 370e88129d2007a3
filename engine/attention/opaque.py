"""Attention as a single operation that is opaque to the compiler.

The step's context cannot be passed to a compiled model, because the compiler would specialise on it
and recompile at each step. Instead, the model receives a call id. The operation uses it to look up
the context in CALLS, which holds the context only during the call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.attention.interface import AttentionContext, AttentionParams
from engine.native.torch_library import operation

CALLS: dict[int, AttentionContext] = {}
"""The contexts of the model calls in progress, by id. A custom operation has no other way to
receive an object that is not a tensor.
"""
_call_ids = itertools.count(1)


_SCHEMA = (
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor? sinks, int call_id, "
    "int layer, float scaling, float? softcap) -> Tensor"
)


def new_call_id() -> int:
    """Return a new id for the calls of one model, which is called by one thread at a time."""
    return next(_call_ids)


@contextmanager
def calling(call_id: int, context: AttentionContext) -> Iterator[None]:
    """Provide `context` under `call_id` for the duration of a model call."""
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

    The operation also writes to the cache. The compiler need not know this, because a layer's
    result is always used and the next layer's inputs depend on it.
    """
    params = AttentionParams(scaling=scaling, softcap=softcap, sinks=sinks)
    return CALLS[call_id].attend(layer, query, key, value, params)
