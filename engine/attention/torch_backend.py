"""Paged attention in plain torch.

It is the reference for all other backends, and the fallback if none of them can run.

Requests that compute one token are grouped in buckets of similar length. The blocks of their
contexts are gathered into one padded tensor per bucket. The query heads that share a key/value head
are laid out as query positions, so that nothing is repeated per query head:

    q [R, Hkv, G, D] · k [R, Hkv, L, D] → scores [R, Hkv, G, L]     L: the bucket's longest context,
                                                                    in whole blocks

Requests that compute several tokens are computed one after another, with heads as the batch:

    q [Hkv, G, n, D] · k [Hkv, 1→G, S, D] → scores [Hkv, G, n, S]   S: tokens the chunk attends to
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from typing_extensions import override

from engine.attention.interface import (
    AttentionBackend,
    AttentionMetadata,
    AttentionParams,
    BatchLayout,
    LayerCache,
)
from engine.attention.torch_layout import Bucket, QueryChunk, TorchMetadata, prepare


class TorchAttentionBackend(AttentionBackend):
    """The plain torch backend, described in the module docstring."""

    name = "torch"

    @override
    def prepare(self, layout: BatchLayout, window: int | None, like: torch.Tensor) -> TorchMetadata:
        return prepare(layout, window, like)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Compute attention; see the base class."""
        if not isinstance(metadata, TorchMetadata):
            raise TypeError(f"metadata of another backend: {type(metadata).__name__}")
        num_heads, num_tokens, _ = query.shape
        if metadata.fresh_blocks is not None:
            # Whole blocks are gathered. What an earlier request left after this step's tokens is
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


def _attend_bucket(
    query: torch.Tensor,
    cache: LayerCache,
    bucket: Bucket,
    block_size: int,
    params: AttentionParams,
) -> torch.Tensor:
    """Compute one bucket, query [Hq, R, D] → [R, Hq, Dv]."""
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
    """Gather blocks, [num_slots, H, D] → [count, blocks per request · block_size, H, D]."""
    _, heads, dim = cache.shape
    return _as_blocks(cache, block_size).index_select(0, blocks).view(count, -1, heads, dim)


def _as_blocks(cache: torch.Tensor, block_size: int) -> torch.Tensor:
    """View [num_slots, H, D] as one row per block, [num_blocks, block_size · H · D]."""
    return cache.view(-1, block_size * cache.shape[1] * cache.shape[2])


def _attend_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: LayerCache,
    chunk: QueryChunk,
    params: AttentionParams,
) -> torch.Tensor:
    """Compute one chunk, from the whole step's query, key and value [H, T, D] → [n, Hq, Dv]."""
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
    """Compute attention, [B, H, n, D] × [B, H, S, D] × [B, H, S, Dv] → [B, H, n, Dv].

    `sinks` broadcasts against [B, H, n, 1]. With is_causal, S = n and mask is None.
    """
    if params.softcap is None and sinks is None and keys.shape[-1] == values.shape[-1]:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=is_causal, scale=params.scaling
        )
    scores = torch.matmul(query, keys.transpose(-1, -2)).float() * params.scaling
    hidden = None
    if is_causal:
        size = scores.shape[-1]
        hidden = torch.ones(size, size, dtype=torch.bool, device=scores.device).triu(1)
    elif mask is not None:
        hidden = mask != 0
    weights = _weights(scores, hidden, params.softcap, sinks)
    return torch.matmul(weights.to(values.dtype), values)


def _weights(
    scores: torch.Tensor,
    hidden: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Convert scaled scores, float32 [B, H, n, S], to attention weights."""
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.float().expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
