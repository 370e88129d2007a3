"""Paged attention in plain torch: the reference for every other backend, and what runs where none
of them can.

Requests that compute one token are served in buckets of similar length: the blocks of their
contexts are gathered into one padded tensor a bucket. The query heads that share a key/value head
are laid out as query positions, so that nothing is repeated per query head:

    q [R, Hkv, G, D] · k [R, Hkv, L, D] → scores [R, Hkv, G, L]     L: the bucket's longest context,
                                                                    in whole blocks

Requests that compute several tokens are served one after the other, with heads as the batch:

    q [Hkv, G, n, D] · k [Hkv, 1→G, S, D] → scores [Hkv, G, n, S]   S: tokens that the chunk can see
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionParams,
    BatchLayout,
    LayerCache,
)

_MIN_BUCKET = 4
"""Fewer requests than this are not made a bucket of their own."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One request that computes several tokens.

    Attributes:
        begin, end: its tokens in the flat row.
        slots: int64 [S], where the tokens that it can see are cached; None: they are the chunk's
            own.
        mask: [n, S], added to the scores; None: causal, S = n.
    """

    begin: int
    end: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Requests of similar length that compute one token each.

    Attributes:
        begin, end: their rows, and their tokens in the flat row.
        blocks: int64 [R · B], the cache blocks that they see, B of them each.
        mask: [R, 1, 1, B · block_size], added to the scores; None: all of it is visible.
    """

    begin: int
    end: int
    blocks: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class TorchMetadata(AttentionMetadata):
    """One group's metadata.

    Attributes:
        slot_mapping: int64 [T], where each token's key and value are written.
        block_size: tokens in a block.
        fresh_blocks: int64, blocks that the step begins and does not fill; None: there are none.
        buckets: the requests that compute one token.
        chunks: the others.
        num_padding: tokens at the end that belong to nobody.
    """

    slot_mapping: torch.Tensor
    block_size: int
    fresh_blocks: torch.Tensor | None
    buckets: tuple[_Bucket, ...]
    chunks: tuple[_Chunk, ...]
    num_padding: int


class TorchAttentionBackend(AttentionBackend):
    """See the module."""

    name = "torch"

    def prepare(self, layout: BatchLayout, window: int | None, like: torch.Tensor) -> TorchMetadata:
        """Make one group's metadata for a step."""
        row_of_token = np.repeat(np.arange(len(layout.counts)), layout.counts)
        slots = _slots(layout, row_of_token, layout.positions)
        if layout.num_padding:
            slots = np.append(slots, np.zeros(layout.num_padding, dtype=np.int64))
        chunks: list[_Chunk] = []
        begin = layout.num_decodes
        for row in range(layout.num_decodes, len(layout.counts)):
            count = int(layout.counts[row])
            chunks.append(_prepare_chunk(layout, row, begin, window, like))
            begin += count
        return TorchMetadata(
            slot_mapping=torch.from_numpy(slots).to(like.device),
            block_size=layout.block_size,
            fresh_blocks=_fresh_blocks(layout, like.device),
            buckets=_prepare_buckets(layout, window, like),
            chunks=tuple(chunks),
            num_padding=layout.num_padding,
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attend; see the base class."""
        if not isinstance(metadata, TorchMetadata):
            raise TypeError(f"metadata of another backend: {type(metadata).__name__}")
        num_heads, num_tokens, _ = query.shape
        if metadata.fresh_blocks is not None:
            # Whole blocks are gathered: what an earlier owner left behind this step's tokens is
            # masked, but a NaN would pass through the mask.
            for tensor in (cache.keys, cache.values):
                _as_blocks(tensor, metadata.block_size).index_fill_(0, metadata.fresh_blocks, 0.0)
        cache.keys.index_copy_(0, metadata.slot_mapping, key.transpose(0, 1))
        cache.values.index_copy_(0, metadata.slot_mapping, value.transpose(0, 1))
        output = query.new_empty((num_tokens, num_heads, value.shape[-1]))
        for bucket in metadata.buckets:
            rows = slice(bucket.begin, bucket.end)
            output[rows] = _attend_bucket(
                query[:, rows], cache, bucket, metadata.block_size, params
            )
        for chunk in metadata.chunks:
            output[chunk.begin : chunk.end] = _attend_chunk(query, key, value, cache, chunk, params)
        if metadata.num_padding:
            output[-metadata.num_padding :] = 0.0
        return output


def _slots(
    layout: BatchLayout,
    rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    positions: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """The cache slots of positions in requests: table[row, position // block_size] · block_size +
    offset.
    """
    block, offset = np.divmod(positions, layout.block_size)
    slots: np.ndarray[tuple[int, ...], np.dtype[np.int64]] = (
        layout.tables[rows, block].astype(np.int64) * layout.block_size + offset
    )
    return slots


def round_up(value: int, multiple: int) -> int:
    """The next multiple of `multiple`."""
    return -(-value // multiple) * multiple


def _fresh_blocks(layout: BatchLayout, device: torch.device) -> torch.Tensor | None:
    """The last block of each request, where this step writes its first slot but not its last."""
    ends = layout.starts + layout.counts
    index = (ends - 1) // layout.block_size
    begins = index * layout.block_size
    rows = np.flatnonzero((begins >= layout.starts) & (ends < begins + layout.block_size))
    if len(rows) == 0:
        return None
    return torch.from_numpy(layout.tables[rows, index[rows]].astype(np.int64)).to(device)


def _prepare_buckets(
    layout: BatchLayout, window: int | None, like: torch.Tensor
) -> tuple[_Bucket, ...]:
    """Cut the requests that compute one token into buckets, and find what each bucket gathers."""
    count = layout.num_decodes
    if count == 0:
        return ()
    size = layout.block_size
    last = layout.starts[:count]  # the position of the token itself: the last one that it sees
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
        # Padding reads the request's own last block, which is there; it is masked.
        index = np.minimum(index, last_block[begin:end, None])
        blocks = layout.tables[rows, index].astype(np.int64)
        positions = first_block[begin:end, None] * size + np.arange(width * size)
        visible = (positions >= first[begin:end, None]) & (positions <= last[begin:end, None])
        mask = None
        if not visible.all():
            bias = np.where(visible, 0.0, -np.inf).astype(np.float32)
            mask = torch.from_numpy(bias).to(like).view(end - begin, 1, 1, width * size)
        buckets.append(
            _Bucket(begin, end, torch.from_numpy(blocks.reshape(-1)).to(like.device), mask)
        )
    return tuple(buckets)


def _bucket_bounds(lengths: list[int]) -> list[tuple[int, int]]:
    """Cut rows into runs whose lengths (in blocks) differ by less than a third.

    Batches are ordered by position, so that such runs are long; in any other order the cut is still
    right, only less good. Short runs are not cut: a call costs more than their padding.
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
) -> _Chunk:
    start, count = int(layout.starts[row]), int(layout.counts[row])
    end = start + count
    first = 0 if window is None else max(start - window + 1, 0)
    slots = None
    keys = np.arange(start, end)
    if first < start or layout.kv_interval:
        keys = np.arange(first, first + round_up(end - first, layout.kv_interval or 1))
        visible = np.minimum(keys, end - 1)  # padding reads the last token, which is there
        slots = torch.from_numpy(_slots(layout, np.full_like(visible, row), visible)).to(
            like.device
        )
    mask = None
    if slots is not None or (window is not None and count > window):
        queries = np.arange(start, end)[:, None]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.from_numpy(np.where(hidden, -np.inf, 0.0).astype(np.float32)).to(like)
    return _Chunk(begin=begin, end=begin + count, slots=slots, mask=mask)


def _attend_bucket(
    query: torch.Tensor,
    cache: LayerCache,
    bucket: _Bucket,
    block_size: int,
    params: AttentionParams,
) -> torch.Tensor:
    """query: [Hq, R, D] → [R, Hq, Dv]."""
    num_heads, count, head_dim = query.shape
    num_kv_heads = cache.keys.shape[1]
    groups = num_heads // num_kv_heads
    # Whole blocks are gathered: long copies instead of one a token. [R, L, Hkv, D] and [R, L, Hkv,
    # Dv]
    keys = _gather_blocks(cache.keys, bucket.blocks, block_size, count)
    values = _gather_blocks(cache.values, bucket.blocks, block_size, count)
    grouped = query.transpose(0, 1).reshape(count, num_kv_heads, groups, head_dim)
    sinks = params.sinks
    if sinks is not None:
        sinks = sinks.view(1, num_kv_heads, groups, 1)
    output = _attention(
        grouped,
        keys.transpose(1, 2),
        values.transpose(1, 2),
        bucket.mask,
        params,
        sinks,
        is_causal=False,
    )
    return output.reshape(count, num_heads, -1)


def _gather_blocks(
    cache: torch.Tensor, blocks: torch.Tensor, block_size: int, count: int
) -> torch.Tensor:
    """The blocks' contents, [num_slots, H, D] → [count, blocks a request · block_size, H, D]."""
    _, heads, dim = cache.shape
    return _as_blocks(cache, block_size).index_select(0, blocks).view(count, -1, heads, dim)


def _as_blocks(cache: torch.Tensor, block_size: int) -> torch.Tensor:
    """[num_slots, H, D] as one row a block: [num_blocks, block_size · H · D]."""
    return cache.view(-1, block_size * cache.shape[1] * cache.shape[2])


def _attend_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: LayerCache,
    chunk: _Chunk,
    params: AttentionParams,
) -> torch.Tensor:
    """query, key, value of the whole step: [H, T, D] → the chunk's [n, Hq, Dv]."""
    num_heads, num_kv_heads = query.shape[0], key.shape[0]
    groups = num_heads // num_kv_heads
    own = slice(chunk.begin, chunk.end)
    if chunk.slots is None:
        keys, values = key[:, own], value[:, own]  # [Hkv, S, D]
    else:
        keys = cache.keys.index_select(0, chunk.slots).transpose(0, 1)
        values = cache.values.index_select(0, chunk.slots).transpose(0, 1)
    grouped = query[:, own].reshape(num_kv_heads, groups, -1, query.shape[-1])
    sinks = params.sinks
    if sinks is not None:
        sinks = sinks.view(num_kv_heads, groups, 1, 1)
    output = _attention(
        grouped,
        keys.unsqueeze(1).expand(-1, groups, -1, -1),
        values.unsqueeze(1).expand(-1, groups, -1, -1),
        chunk.mask,
        params,
        sinks,
        is_causal=chunk.mask is None,
    )  # [Hkv, G, n, Dv]
    return output.permute(2, 0, 1, 3).reshape(chunk.end - chunk.begin, num_heads, -1)


def _attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    params: AttentionParams,
    sinks: torch.Tensor | None,
    *,
    is_causal: bool,
) -> torch.Tensor:
    """[B, H, n, D] × [B, H, S, D] × [B, H, S, Dv] → [B, H, n, Dv].

    `sinks` broadcasts against [B, H, n, 1]. With is_causal, S = n and mask is None.
    """
    if params.softcap is None and sinks is None and keys.shape[-1] == values.shape[-1]:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=is_causal, scale=params.scaling
        )
    scores = torch.matmul(query, keys.transpose(-1, -2)).float() * params.scaling
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    if is_causal:
        size = scores.shape[-1]
        hidden = torch.ones(size, size, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights.to(values.dtype), values)
