"""Attention as one operation that a compiler does not look into.

A compiled model cannot be handed the step's context: the compiler would specialise on it, and
compile anew at each step. It is given a number instead, and the operation finds the context under
that number in CALLS, where it stands while the model is called, and no longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.attention.base import AttentionContext, AttentionParams

CALLS: dict[int, AttentionContext] = {}
"""The contexts of the model calls that are under way, by number. Operations have no other way to
be given what is not a tensor.
"""
_numbers = itertools.count(1)


_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? sinks, int number, int layer, float scaling, "
    "float? softcap) -> Tensor"
)


def new_number() -> int:
    """A number for the calls of one model, on one thread at a time."""
    return next(_numbers)


@contextmanager
def calling(number: int, context: AttentionContext) -> Iterator[None]:
    """While a model is called with that number."""
    CALLS[number] = context
    try:
        yield
    finally:
        del CALLS[number]


@torch.library.custom_op("headrace::paged_attention", mutates_args=(), schema=_SCHEMA)
def attend_by_number(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    number: int,
    layer: int,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """See `AttentionBackend.forward`: [Hq, T, D], [Hkv, T, D], [Hkv, T, Dv] → [T, Hq, Dv].

    The cache is written too, which the compiler need not know: a layer's result is always used, and
    the next layer's inputs depend on it.
    """
    context = CALLS[number]
    cache = context.caches[layer]
    params = AttentionParams(scaling=scaling, softcap=softcap, sinks=sinks)
    metadata = context.metadata[cache.group]
    return context.backend.forward(query, key, value, cache, metadata, params)


@attend_by_number.register_fake
def _shape_of_result(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    number: int,
    layer: int,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    return query.new_empty((query.shape[1], query.shape[0], value.shape[-1]))
