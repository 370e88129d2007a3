"""The torch backend's metadata for steps with fixed addresses: two such steps differ only in the
contents of int64 arrays, and everything else is computed from these on the device. So decode steps
are captured on a CUDA device without Triton too, and captured steps are tested without a device.

decode   the requests are one bucket; each reads `context` tokens from where its window begins:
         slot_mapping [T] fresh [T] blocks [T · B] base [T] last [T]
varlen   one attention over all contexts, laid one after the other:
         slot_mapping [T] fresh [R] key_slots [S] key_rows [S] key_positions [S] query_rows [T]
         query_positions [T]

Padding is harmless: padding tokens go to the null block, which has finite contents, and attend to
one key of it; a request's context is padded with its own last block. Hidden scores are replaced, so
the results are those of the step without padding.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import BatchLayout, StaticShape
from engine.attention.torch_layout import Bucket, Ragged, TorchMetadata, fresh_blocks, slots_of
from engine.kv_cache.groups import window_blocks

_Arrays = Mapping[str, npt.NDArray[np.int64]]
_Tensors = Mapping[str, torch.Tensor]

_MAX_DECODE_CONTEXT = 1 << 19
"""The most tokens that a decode step may gather, padding included: 2 GiB for each layer if a
token's key and value have 4 KiB.
"""
_MAX_VARLEN_SCORES = 1 << 22
"""The most scores per head in a step of varying lengths: 512 MiB for 32 heads."""
_NOBODY = -1
"""The row number of padding queries. Those of padding keys are lower."""


def fits(shape: StaticShape) -> bool:
    """See AttentionBackend.fits_static."""
    limit = _MAX_DECODE_CONTEXT if shape.is_decode else _MAX_VARLEN_SCORES
    return shape.tokens * shape.context <= limit


def _width(shape: StaticShape, window: int | None) -> int:
    """Decode: how many blocks are read for each request."""
    blocks = shape.context // shape.block_size
    return blocks if window is None else min(blocks, window_blocks(window, shape.block_size, 1))


def _num_keys(shape: StaticShape, window: int | None) -> int:
    """Varlen: how many tokens are read for all requests together."""
    if window is None:
        return shape.context
    return min(shape.context, shape.requests * (window - 1) + shape.tokens)


def fields_of(shape: StaticShape, window: int | None) -> dict[str, int]:
    """See AttentionBackend.static_fields."""
    if shape.is_decode:
        blocks = shape.tokens * _width(shape, window)
        names = ("slot_mapping", "fresh", "base", "last")
        return {**dict.fromkeys(names, shape.tokens), "blocks": blocks}
    keys = ("key_slots", "key_rows", "key_positions")
    return {
        **dict.fromkeys(("slot_mapping", "query_rows", "query_positions"), shape.tokens),
        **dict.fromkeys(keys, _num_keys(shape, window)),
        "fresh": shape.requests,
    }


def fill_decode(
    layout: BatchLayout, window: int | None, shape: StaticShape, fields: _Arrays
) -> None:
    """See AttentionBackend.fill_static."""
    rows, size = np.arange(len(layout.starts)), layout.block_size
    last = layout.starts
    first = np.zeros_like(last) if window is None else np.maximum(last - window + 1, 0)
    first_block, last_block = first // size, last // size
    # Padding reads the request's own last block, which always exists; it is hidden.
    index = first_block[:, None] + np.arange(_width(shape, window))
    index = np.minimum(index, last_block[:, None])
    _put(fields["slot_mapping"], slots_of(layout, rows, last))
    _put(fields["fresh"], fresh_blocks(layout))
    _put(fields["blocks"], layout.tables[rows[:, None], index].reshape(-1))
    _put(fields["base"], first_block * size)
    _put(fields["last"], last)


def fill_varlen(
    layout: BatchLayout, window: int | None, shape: StaticShape, fields: _Arrays
) -> None:
    """See AttentionBackend.fill_static."""
    requests = np.arange(len(layout.counts))
    query_rows = np.repeat(requests, layout.counts)
    ends = layout.starts + layout.counts
    firsts = np.zeros_like(ends)
    if window is not None:
        firsts = np.maximum(layout.starts - window + 1, 0)
    lengths = ends - firsts
    key_rows = np.repeat(requests, lengths)
    offsets = np.cumsum(lengths) - lengths
    key_positions = np.arange(len(key_rows)) - np.repeat(offsets - firsts, lengths)
    _put(fields["slot_mapping"], slots_of(layout, query_rows, layout.positions))
    _put(fields["fresh"], fresh_blocks(layout))
    _put(fields["key_slots"], slots_of(layout, key_rows, key_positions))
    _put(fields["key_rows"], key_rows, padding=_NOBODY - 1)
    _put(fields["key_positions"], key_positions)
    _put(fields["query_rows"], query_rows, padding=_NOBODY)
    _put(fields["query_positions"], layout.positions)


def _put(array: npt.NDArray[np.int64], values: npt.NDArray[np.integer], padding: int = 0) -> None:
    array[: len(values)] = values
    array[len(values) :] = padding


def decode_metadata(
    shape: StaticShape, window: int | None, fields: _Tensors, like: torch.Tensor
) -> TorchMetadata:
    """See AttentionBackend.static_metadata."""
    length = _width(shape, window) * shape.block_size
    positions = fields["base"].unsqueeze(1) + torch.arange(length, device=like.device)
    last = fields["last"].unsqueeze(1)
    hidden = positions > last
    if window is not None:
        hidden |= positions <= last - window
    bias = like.new_zeros(hidden.shape).masked_fill(hidden, float("-inf"))
    bucket = Bucket(0, shape.tokens, fields["blocks"], bias.view(shape.tokens, 1, 1, length))
    return TorchMetadata(
        slot_mapping=fields["slot_mapping"],
        block_size=shape.block_size,
        fresh_blocks=fields["fresh"],
        buckets=(bucket,),
        chunks=(),
    )


def varlen_metadata(
    shape: StaticShape, window: int | None, fields: _Tensors, like: torch.Tensor
) -> TorchMetadata:
    """See AttentionBackend.static_metadata."""
    query_rows, query_positions = (
        fields[name].unsqueeze(1) for name in ("query_rows", "query_positions")
    )
    keys = fields["key_positions"]
    hidden = (query_rows != fields["key_rows"]) | (keys > query_positions)
    if window is not None:
        hidden |= keys <= query_positions - window
    # Padding attends to the first key, so that its output is not NaN.
    first = torch.arange(len(keys), device=like.device) == 0
    hidden &= ~((query_rows == _NOBODY) & first)
    return TorchMetadata(
        slot_mapping=fields["slot_mapping"],
        block_size=shape.block_size,
        fresh_blocks=fields["fresh"],
        buckets=(),
        chunks=(),
        ragged=Ragged(fields["key_slots"], hidden),
    )
