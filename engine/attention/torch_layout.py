"""The torch backend's metadata for a step, and how it is computed on the host.

`prepare` builds it from a BatchLayout, and `torch_backend` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.interface import AttentionMetadata, BatchLayout
from engine.native.device_copy import to_device

_MIN_BUCKET = 4
"""The minimum number of requests in a bucket that is split off."""


@dataclass(frozen=True, slots=True)
class QueryChunk:
    """One request that computes several tokens.

    Attributes:
        begin, end: the range of its tokens in the flat row.
        slots: int64 [S], the cache slots of the tokens that it attends to. None if it attends only
            to the tokens of the chunk itself.
        mask: [n, S], added to the scores. None if the mask is causal and S = n.
    """

    begin: int
    end: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Requests of similar length that compute one token each.

    Attributes:
        begin, end: the range of their rows, which is also the range of their tokens.
        blocks: int64 [R · B], the cache blocks that they attend to, B per request.
        mask: [R, 1, 1, B · block_size], added to the scores. None if everything is visible.
    """

    begin: int
    end: int
    blocks: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class TorchMetadata(AttentionMetadata):
    """One group's metadata.

    Attributes:
        slot_mapping: int64 [T], the slot that each token's key and value are written to.
        block_size: tokens per block.
        fresh_blocks: int64, the blocks that the step starts but does not fill, or None if there are
            none.
        buckets: the requests that compute one token.
        chunks: the requests that compute several tokens.
        num_padding: padding tokens at the end.
    """

    slot_mapping: torch.Tensor
    block_size: int
    fresh_blocks: torch.Tensor | None
    buckets: tuple[Bucket, ...]
    chunks: tuple[QueryChunk, ...]
    num_padding: int = 0


def prepare(layout: BatchLayout, window: int | None, like: torch.Tensor) -> TorchMetadata:
    """Create one group's metadata for a step without capture.

    `like` is a tensor with the cache's dtype and device.
    """
    row_of_token = np.repeat(np.arange(len(layout.counts)), layout.counts)
    slots = slots_of(layout, row_of_token, layout.positions)
    if layout.num_padding:
        slots = np.append(slots, np.zeros(layout.num_padding, dtype=np.int64))
    chunks: list[QueryChunk] = []
    begin = layout.num_decodes
    for row in range(layout.num_decodes, len(layout.counts)):
        count = int(layout.counts[row])
        chunks.append(_prepare_chunk(layout, row, begin, window, like))
        begin += count
    fresh = fresh_blocks(layout)
    return TorchMetadata(
        slot_mapping=to_device(slots, like.device),
        block_size=layout.block_size,
        fresh_blocks=to_device(fresh, like.device) if len(fresh) else None,
        buckets=_prepare_buckets(layout, window, like),
        chunks=tuple(chunks),
        num_padding=layout.num_padding,
    )


def slots_of(
    layout: BatchLayout,
    rows: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Return the cache slots of positions in requests.

    A slot is table[row, position // block_size] · block_size + offset.
    """
    block, offset = np.divmod(positions, layout.block_size)
    slots: npt.NDArray[np.int64] = (
        layout.tables[rows, block].astype(np.int64) * layout.block_size + offset
    )
    return slots


def round_up(value: int, multiple: int) -> int:
    """Round `value` up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple


def fresh_blocks(layout: BatchLayout) -> npt.NDArray[np.int64]:
    """Return the blocks for which this step writes the first slot but not the last.

    Only the last block of a request can be one.
    """
    ends = layout.starts + layout.counts
    index = (ends - 1) // layout.block_size
    firsts = index * layout.block_size
    rows = np.flatnonzero((firsts >= layout.starts) & (ends < firsts + layout.block_size))
    blocks: npt.NDArray[np.int64] = layout.tables[rows, index[rows]].astype(np.int64)
    return blocks


def _prepare_buckets(
    layout: BatchLayout, window: int | None, like: torch.Tensor
) -> tuple[Bucket, ...]:
    """Group the requests that compute one token into buckets, with the blocks that each bucket
    gathers.
    """
    count = layout.num_decodes
    if count == 0:
        return ()
    size = layout.block_size
    last = layout.starts[:count]  # the token's own position, the last one that it attends to
    first = np.zeros_like(last) if window is None else np.maximum(last - window + 1, 0)
    first_block, last_block = first // size, last // size
    lengths = last_block - first_block + 1
    buckets = []
    for begin, end in _bucket_bounds(lengths.tolist()):
        rows = np.arange(begin, end)[:, None]
        width = int(lengths[begin:end].max())
        if layout.kv_interval:
            width = -(-round_up(width * size, layout.kv_interval) // size)
        index = first_block[begin:end, None] + np.arange(width)
        # Padding reads the request's own last block, which always exists; it is masked.
        index = np.minimum(index, last_block[begin:end, None])
        blocks = layout.tables[rows, index].astype(np.int64)
        positions = first_block[begin:end, None] * size + np.arange(width * size)
        visible = (positions >= first[begin:end, None]) & (positions <= last[begin:end, None])
        mask = None
        if not visible.all():
            bias = np.where(visible, 0.0, -np.inf).astype(np.float32)
            mask = to_device(bias, like.device, like.dtype).view(end - begin, 1, 1, width * size)
        buckets.append(Bucket(begin, end, to_device(blocks.reshape(-1), like.device), mask))
    return tuple(buckets)


def _bucket_bounds(lengths: list[int]) -> list[tuple[int, int]]:
    """Split rows into runs in which the lengths (in blocks) differ by less than a third.

    Batches are ordered by position, so such runs are long. Any other order would also be correct,
    but less efficient. Short runs are not split, because a call costs more than their padding.
    """
    bounds = []
    begin, low, high = 0, lengths[0], lengths[0]
    for row, length in enumerate(lengths[1:], 1):
        new_low, new_high = min(low, length), max(high, length)
        if row - begin >= _MIN_BUCKET and new_high > new_low + max(1, new_low // 3):
            bounds.append((begin, row))
            begin, low, high = row, length, length
        else:
            low, high = new_low, new_high
    bounds.append((begin, len(lengths)))
    return bounds


def _prepare_chunk(
    layout: BatchLayout, row: int, begin: int, window: int | None, like: torch.Tensor
) -> QueryChunk:
    start, count = int(layout.starts[row]), int(layout.counts[row])
    end = start + count
    first = 0 if window is None else max(start - window + 1, 0)
    slots = None
    keys = np.arange(start, end)
    if first < start or layout.kv_interval:
        keys = np.arange(first, first + round_up(end - first, layout.kv_interval or 1))
        visible = np.minimum(keys, end - 1)  # padding reads the last token, which always exists
        slots = to_device(slots_of(layout, np.full_like(visible, row), visible), like.device)
    mask = None
    if slots is not None or (window is not None and count > window):
        queries = np.arange(start, end)[:, None]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        bias = np.where(hidden, -np.inf, 0.0).astype(np.float32)
        mask = to_device(bias, like.device, like.dtype)
    return QueryChunk(begin=begin, end=begin + count, slots=slots, mask=mask)
