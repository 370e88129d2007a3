"""Paged attention on a CUDA device with torch's own FlashAttention (`torch.nn.attention.varlen`,
from torch 2.12 on), which needs no compiler.

    step ─▶ slot_mapping, cu_seqlens of queries and contexts, lengths of contexts, block tables
         ─▶ write keys and values ─▶ varlen_attn_out, through the tables

It supports 16-bit types, blocks of a multiple of 256 tokens, and layers without softcap or sinks in
which keys and values have the same head size, at most 256. Contexts are never split among programs
(num_splits=1), because some rows of torch's result are wrong if it splits contexts in a paged
cache. So a request's result does not depend on other requests, but a few long contexts do not fill
a device.

Queries are the last tokens of their contexts, with which its causal mask is aligned. Output rows
without a request are not written, and stay zero.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention import varlen as torch_varlen

from engine.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionParams,
    BatchLayout,
    LayerCache,
    LayerShape,
    StaticShape,
)
from engine.attention.torch_layout import slots_of
from engine.transfer import to_device

DTYPES = (torch.bfloat16, torch.float16)
"""The supported types."""
BLOCK_MULTIPLE = 256
"""The block size in tokens must be a multiple of this."""
_LARGEST_HEAD = 256
_HEAD_MULTIPLE = 8
_MAX_TABLES = 1 << 20
"""The most block table entries of a captured step: 8 MiB that are copied at each replay."""
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, "
    "Tensor slot_mapping, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor lengths, Tensor tables, "
    "int block_size, int window, int max_queries, int max_keys, float scaling) -> Tensor"
)
_NEEDED = ("scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits")


@dataclass(frozen=True, slots=True)
class VarlenMetadata(AttentionMetadata):
    """One group's metadata for R requests; rows after the last request have no tokens.

    Attributes:
        slot_mapping: int64 [T], where keys and values are written; 0 for padding.
        cu_seqlens_q, cu_seqlens_k: int32 [R + 1], how many tokens, and how many context tokens,
            come before each request.
        lengths: int32 [R], context lengths, this step's tokens included.
        tables: int32 [R, W], block tables.
        block_size: tokens in a block.
        window: 0: none.
        max_queries, max_keys: no request has more tokens, or a longer context.
    """

    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    block_size: int
    window: int
    max_queries: int
    max_keys: int


class VarlenAttentionBackend(AttentionBackend):
    """See the module."""

    name = "varlen"
    dtypes = DTYPES
    block_multiple = BLOCK_MULTIPLE

    def why_not(self, shape: LayerShape, params: AttentionParams) -> str | None:
        """See the base class."""
        if params.softcap is not None:
            return "has a softcap, which torch's varlen attention does not do"
        if params.sinks is not None:
            return "has attention sinks, which torch's varlen attention does not do"
        if shape.key_dim != shape.value_dim:
            return (
                f"has keys of {shape.key_dim} elements and values of {shape.value_dim}, and "
                "torch's varlen attention takes one size for both"
            )
        if shape.key_dim > _LARGEST_HEAD or shape.key_dim % _HEAD_MULTIPLE:
            return (
                f"has heads of {shape.key_dim} elements, and torch's varlen attention takes "
                f"multiples of {_HEAD_MULTIPLE} up to {_LARGEST_HEAD}"
            )
        return None

    def prepare(
        self, layout: BatchLayout, window: int | None, like: torch.Tensor
    ) -> VarlenMetadata:
        """See the base class."""
        rows, width = layout.tables.shape
        tokens = len(layout.positions) + layout.num_padding
        host = {
            name: np.zeros(size, np.int64) for name, size in _sizes(tokens, rows, width).items()
        }
        _fill(layout, host, width)
        return _metadata(
            {name: to_device(array, like.device) for name, array in host.items()},
            width=width,
            block_size=layout.block_size,
            window=window,
            max_queries=int(layout.counts.max(initial=1)),
            max_keys=int((layout.starts + layout.counts).max(initial=1)),
        )

    def fits_static(self, shape: StaticShape) -> bool:
        """See the base class."""
        return shape.requests * _width(shape) <= _MAX_TABLES

    def static_fields(self, shape: StaticShape, window: int | None) -> Mapping[str, int]:
        """See the base class."""
        return _sizes(shape.tokens, shape.requests, _width(shape))

    def fill_static(
        self,
        layout: BatchLayout,
        window: int | None,
        shape: StaticShape,
        fields: Mapping[str, npt.NDArray[np.int64]],
    ) -> None:
        """See the base class."""
        _fill(layout, fields, _width(shape))

    def static_metadata(
        self,
        shape: StaticShape,
        window: int | None,
        fields: Mapping[str, torch.Tensor],
        like: torch.Tensor,
    ) -> VarlenMetadata:
        """See the base class. The longest context that the shape allows is part of the captured
        work.
        """
        return _metadata(
            fields,
            width=_width(shape),
            block_size=shape.block_size,
            window=window,
            max_queries=1 if shape.is_decode else shape.tokens,
            max_keys=_width(shape) * shape.block_size,
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
        if not isinstance(metadata, VarlenMetadata):
            raise TypeError(f"metadata of another backend: {type(metadata).__name__}")
        output: torch.Tensor = varlen_attention(
            query,
            key,
            value,
            cache.keys,
            cache.values,
            metadata.slot_mapping,
            metadata.cu_seqlens_q,
            metadata.cu_seqlens_k,
            metadata.lengths,
            metadata.tables,
            metadata.block_size,
            metadata.window,
            metadata.max_queries,
            metadata.max_keys,
            params.scaling,
        )
        return output


def _width(shape: StaticShape) -> int:
    """The most blocks of one request; with varying lengths, one request may have the whole
    context.
    """
    return -(-shape.context // shape.block_size)


def _sizes(tokens: int, rows: int, width: int) -> dict[str, int]:
    """The number of elements of each array, by name. All but slot_mapping are converted to int32
    together.
    """
    return {"slot_mapping": tokens, "requests": 2 * (rows + 1) + rows + rows * width}


def _split(requests: torch.Tensor, width: int) -> list[torch.Tensor]:
    """Split `requests` into cu_seqlens_q, cu_seqlens_k, lengths and tables."""
    rows = (len(requests) - 2) // (3 + width)
    sizes = (rows + 1, rows + 1, rows, rows * width)
    *parts, tables = requests.split_with_sizes(sizes)
    return [*parts, tables.view(rows, width)]


def _fill(layout: BatchLayout, arrays: Mapping[str, npt.NDArray[np.int64]], width: int) -> None:
    """Overwrite a step's arrays completely. Rows after the last request have no tokens and no
    context.
    """
    count, tokens = len(layout.counts), len(layout.positions)
    row_of_token = np.repeat(np.arange(count), layout.counts)
    arrays["slot_mapping"][:tokens] = slots_of(layout, row_of_token, layout.positions)
    arrays["slot_mapping"][tokens:] = 0
    views = _split(torch.from_numpy(arrays["requests"]), width)
    cu_seqlens_q, cu_seqlens_k, lengths, tables = (one.numpy() for one in views)
    ends = layout.starts + layout.counts
    for cu_seqlens, counts in ((cu_seqlens_q, layout.counts), (cu_seqlens_k, ends)):
        cu_seqlens[0] = 0
        cu_seqlens[1 : count + 1] = np.cumsum(counts)
        cu_seqlens[count + 1 :] = cu_seqlens[count]
    lengths[:count] = ends
    lengths[count:] = 0
    known = min(width, layout.tables.shape[1])
    tables[:count, :known] = layout.tables[:, :known]
    tables[:count, known:] = 0
    tables[count:] = 0


def _metadata(
    fields: Mapping[str, torch.Tensor],
    *,
    width: int,
    block_size: int,
    window: int | None,
    max_queries: int,
    max_keys: int,
) -> VarlenMetadata:
    cu_seqlens_q, cu_seqlens_k, lengths, tables = _split(fields["requests"].int(), width)
    return VarlenMetadata(
        slot_mapping=fields["slot_mapping"],
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        lengths=lengths,
        tables=tables,
        block_size=block_size,
        window=window or 0,
        max_queries=max_queries,
        max_keys=max_keys,
    )


@torch.library.custom_op(
    "headrace::varlen_attention", mutates_args=("keys", "values"), schema=_SCHEMA
)
def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    window: int,
    max_queries: int,
    max_keys: int,
    scaling: float,
) -> torch.Tensor:
    """Write the step's keys and values, and attend: → [T, Hq, D].

    Args:
        query: [Hq, T, D]. key, value: [Hkv, T, D]. All in the cache's dtype.
        keys, values: the layer's cache, [num_slots, Hkv, D].
        slot_mapping, cu_seqlens_q, cu_seqlens_k, lengths, tables: see VarlenMetadata.
        block_size, window, max_queries, max_keys: see VarlenMetadata.
        scaling: see AttentionParams.
    """
    keys.index_copy_(0, slot_mapping, key.transpose(0, 1))
    values.index_copy_(0, slot_mapping, value.transpose(0, 1))
    heads, tokens, dim = query.shape
    by_token = query.transpose(0, 1)
    if by_token.stride(-1) != 1:
        by_token = by_token.contiguous()
    output = query.new_zeros((tokens, heads, dim))
    torch_varlen.varlen_attn_out(
        output,
        by_token,
        keys.view(-1, block_size, *keys.shape[1:]),
        values.view(-1, block_size, *values.shape[1:]),
        cu_seqlens_q,
        cu_seqlens_k,
        max_queries,
        max_keys,
        scale=scaling,
        # How many tokens to the left and to the right are attended to, without the token itself.
        window_size=(window - 1, 0) if window else (-1, 0),
        enable_gqa=heads != key.shape[0],
        seqused_k=lengths,
        block_table=tables,
        num_splits=1,
    )
    return output


@varlen_attention.register_fake
def _shape_of_result(query: torch.Tensor, *others: object) -> torch.Tensor:
    return query.new_empty((query.shape[1], query.shape[0], query.shape[2]))


def missing() -> str | None:
    """What this torch's varlen attention lacks; None: nothing."""
    function = getattr(torch_varlen, "varlen_attn_out", None)
    if function is None:
        return "varlen_attn_out"
    lacking = [name for name in _NEEDED if name not in inspect.signature(function).parameters]
    return ", ".join(lacking) or None


def try_out(device: torch.device) -> None:
    """Attend once, so that a missing feature is found before a model runs.

    Raises whatever torch raises.
    """
    step = torch.zeros((1, 1, 64), device=device, dtype=torch.bfloat16)
    keys, values = step.new_zeros((2, BLOCK_MULTIPLE, 1, 64)).unbind()
    cache = LayerCache(keys, values, group=0)
    layout = BatchLayout(
        starts=np.zeros(1, dtype=np.int64),
        counts=np.ones(1, dtype=np.int64),
        num_decodes=1,
        positions=np.zeros(1, dtype=np.int64),
        tables=np.zeros((1, 1), dtype=np.int32),
        block_size=BLOCK_MULTIPLE,
    )
    backend = VarlenAttentionBackend()
    metadata = backend.prepare(layout, None, cache.keys)
    output = backend.forward(step, step, step, cache, metadata, AttentionParams(scaling=1.0))
    output.sum().item()  # wait for the end, so that a failure shows now
