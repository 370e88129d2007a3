"""Paged attention on a CUDA device with the kernels of `triton_kernels`.

A step's metadata consists of a few int64 arrays (see `step_arrays`) that are copied to the device
together. The kernels derive everything else from them. In a captured step, the arrays are at fixed
addresses, and the launches cover as many requests and tokens as the shape has room for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from typing_extensions import override

from engine.attention.interface import (
    AttentionMetadata,
    AttentionParams,
    BatchLayout,
    LayerCache,
    StaticShape,
)
from engine.attention.step_arrays import (
    StepArraysBackend,
    array_sizes,
    fill_arrays,
    most_cuts,
)
from engine.attention.triton_launch import triton_attention
from engine.native.device_copy import to_device

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The types that the kernels support. All sums are in float32."""


@dataclass(frozen=True, slots=True)
class TritonMetadata(AttentionMetadata):
    """One group's metadata.

    Attributes:
        slot_mapping, cu_seqlens, starts, counts, table_offsets, extent, entries: see `step_arrays`.
        block_size: tokens per block.
        window: the sliding window, or 0 if there is none.
        most_cuts: see `step_arrays.most_cuts`.
        decode_rows, prefill_rows: see `triton_launch.triton_attention`.
    """

    slot_mapping: torch.Tensor
    cu_seqlens: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    table_offsets: torch.Tensor
    extent: torch.Tensor
    entries: torch.Tensor
    block_size: int
    window: int
    most_cuts: int
    decode_rows: int
    prefill_rows: int


class TritonAttentionBackend(StepArraysBackend):
    """The Triton backend, described in the module docstring."""

    name = "triton"

    @override
    def prepare(
        self, layout: BatchLayout, window: int | None, like: torch.Tensor
    ) -> TritonMetadata:
        tokens, most = len(layout.positions) + layout.num_padding, most_cuts(like.shape[1], window)
        entries = layout.tables.size + layout.num_decodes * most
        sizes = array_sizes(tokens, len(layout.counts), entries)
        host = np.empty(sum(sizes.values()), dtype=np.int64)
        ends = np.cumsum(list(sizes.values())).tolist()
        places = {
            name: slice(end - sizes[name], end) for name, end in zip(sizes, ends, strict=True)
        }
        used = fill_arrays(
            layout, window, most, {name: host[place] for name, place in places.items()}
        )
        device = to_device(host[: len(host) - entries + used], like.device)
        return TritonMetadata(
            **{name: device[place] for name, place in places.items()},
            block_size=layout.block_size,
            window=window or 0,
            most_cuts=most,
            decode_rows=max(layout.num_decodes, int(layout.num_padding > 0)),
            prefill_rows=len(layout.counts) - layout.num_decodes,
        )

    @override
    def static_metadata(
        self,
        shape: StaticShape,
        window: int | None,
        fields: Mapping[str, torch.Tensor],
        like: torch.Tensor,
    ) -> TritonMetadata:
        return TritonMetadata(
            **fields,
            block_size=shape.block_size,
            window=window or 0,
            most_cuts=most_cuts(like.shape[1], window),
            decode_rows=min(shape.requests, shape.tokens),
            prefill_rows=0 if shape.is_decode else min(shape.requests, shape.tokens // 2),
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
        """Compute attention; see the base class."""
        output = query.new_empty((query.shape[1], query.shape[0], value.shape[-1]))
        self._launch(query, key, value, output, cache, metadata, params)
        return output

    @override
    def slots(self, metadata: AttentionMetadata) -> torch.Tensor:
        return _ours(metadata).slot_mapping

    @override
    def attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> None:
        self._launch(query, None, None, output, cache, metadata, params)

    def _launch(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> None:
        step = _ours(metadata)
        triton_attention(
            query,
            key,
            value,
            cache.keys,
            cache.values,
            output,
            step.slot_mapping,
            step.cu_seqlens,
            step.starts,
            step.counts,
            step.table_offsets,
            step.extent,
            step.entries,
            params.sinks,
            step.block_size,
            step.window,
            step.most_cuts,
            step.decode_rows,
            step.prefill_rows,
            params.scaling,
            params.softcap,
        )


def _ours(metadata: AttentionMetadata) -> TritonMetadata:
    if not isinstance(metadata, TritonMetadata):
        raise TypeError(f"metadata of another backend: {type(metadata).__name__}")
    return metadata
