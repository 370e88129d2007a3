"""Paged attention on a CUDA device with the kernels of `triton_kernels`.

A step's metadata are a few int64 arrays, copied to the device at once; the kernels derive
everything else from them. A captured step differs only in having them at fixed addresses:

as it comes   decode over the first requests, which have one token, prefill over the others
captured      decode steps: decode over all; varying lengths: both over all, and each request is
              taken by one of them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionParams,
    BatchLayout,
    LayerCache,
    StaticShape,
    StepSlots,
)
from engine.attention.torch_layout import slots_of
from engine.attention.triton_launch import triton_attention
from engine.transfer import to_device

_Arrays = Mapping[str, npt.NDArray[np.int64]]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The types that the kernels support. All sums are float32."""
_MAX_TABLES = 1 << 20
"""The most block table entries of a captured step: 8 MiB that are copied at each replay."""


@dataclass(frozen=True, slots=True)
class TritonMetadata(AttentionMetadata):
    """One group's metadata.

    Attributes:
        slot_mapping, cu_seqlens, starts, counts, table_offsets, blocks: see `triton_kernels`.
        block_size: tokens in a block.
        window: 0: none.
        decode_rows, prefill_row, prefill_rows, longest: see `triton_launch.triton_attention`.
    """

    slot_mapping: torch.Tensor
    cu_seqlens: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    table_offsets: torch.Tensor
    blocks: torch.Tensor
    block_size: int
    window: int
    decode_rows: int
    prefill_row: int
    prefill_rows: int
    longest: int


class TritonAttentionBackend(AttentionBackend):
    """See the module."""

    name = "triton"

    def prepare(
        self, layout: BatchLayout, window: int | None, like: torch.Tensor
    ) -> TritonMetadata:
        """See the base class."""
        rows, width = layout.tables.shape
        sizes = {
            "slot_mapping": len(layout.positions) + layout.num_padding,
            "cu_seqlens": rows + 1,
            "starts": rows,
            "counts": rows,
            "table_offsets": rows,
            "blocks": rows * width,
        }
        host = np.zeros(sum(sizes.values()), dtype=np.int64)
        ends = np.cumsum(list(sizes.values())).tolist()
        places = {
            name: slice(end - sizes[name], end) for name, end in zip(sizes, ends, strict=True)
        }
        arrays = {name: host[place] for name, place in places.items()}
        _fill_requests(layout, arrays)
        arrays["table_offsets"][:] = np.arange(rows) * width
        arrays["blocks"][:] = layout.tables.reshape(-1)
        device = to_device(host, like.device)
        return TritonMetadata(
            **{name: device[place] for name, place in places.items()},
            block_size=layout.block_size,
            window=window or 0,
            decode_rows=layout.num_decodes,
            prefill_row=layout.num_decodes,
            prefill_rows=rows - layout.num_decodes,
            longest=int(layout.starts[: layout.num_decodes].max(initial=0)) + 1,
        )

    def fits_static(self, shape: StaticShape) -> bool:
        """See the base class."""
        return _table_entries(shape) <= _MAX_TABLES

    def static_fields(self, shape: StaticShape, window: int | None) -> Mapping[str, int]:
        """See the base class."""
        return {
            "slot_mapping": shape.tokens,
            "cu_seqlens": shape.requests + 1,
            "starts": shape.requests,
            "counts": shape.requests,
            "table_offsets": shape.requests,
            "blocks": _table_entries(shape),
        }

    def fill_static(
        self, layout: BatchLayout, window: int | None, shape: StaticShape, fields: _Arrays
    ) -> None:
        """See the base class. Block table rows are stored one after another, without padding."""
        _fill_requests(layout, fields)
        lengths = -(-(layout.starts + layout.counts) // layout.block_size)
        ends = np.cumsum(lengths)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        columns = np.arange(len(rows)) - np.repeat(ends - lengths, lengths)
        fields["table_offsets"][: len(ends)] = ends - lengths
        fields["table_offsets"][len(ends) :] = 0
        fields["blocks"][: len(rows)] = layout.tables[rows, columns]
        fields["blocks"][len(rows) :] = 0

    def static_metadata(
        self,
        shape: StaticShape,
        window: int | None,
        fields: Mapping[str, torch.Tensor],
        like: torch.Tensor,
    ) -> TritonMetadata:
        """See the base class."""
        return TritonMetadata(
            **fields,
            block_size=shape.block_size,
            window=window or 0,
            decode_rows=min(shape.requests, shape.tokens),
            prefill_row=0,
            prefill_rows=0 if shape.is_decode else shape.requests,
            longest=shape.context,
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
        output = query.new_empty((query.shape[1], query.shape[0], value.shape[-1]))
        self._launch(query, key, value, output, cache, metadata, params)
        return output

    def slots(self, metadata: AttentionMetadata) -> StepSlots:
        """See the base class."""
        step = _ours(metadata)
        return StepSlots(step.slot_mapping, step.block_size)

    def attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> None:
        """See the base class."""
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
            step.blocks,
            params.sinks,
            step.block_size,
            step.window,
            step.decode_rows,
            step.prefill_row,
            step.prefill_rows,
            step.longest,
            params.scaling,
            params.softcap,
        )


def _ours(metadata: AttentionMetadata) -> TritonMetadata:
    if not isinstance(metadata, TritonMetadata):
        raise TypeError(f"metadata of another backend: {type(metadata).__name__}")
    return metadata


def _table_entries(shape: StaticShape) -> int:
    """The most blocks in all of a step's tables together."""
    blocks = shape.context // shape.block_size
    return shape.tokens * blocks if shape.is_decode else blocks + shape.requests


def _fill_requests(layout: BatchLayout, arrays: _Arrays) -> None:
    """Fill everything but the tables. Entries after the last request have no tokens."""
    rows, tokens = len(layout.counts), len(layout.positions)
    row_of_token = np.repeat(np.arange(rows), layout.counts)
    arrays["slot_mapping"][:tokens] = slots_of(layout, row_of_token, layout.positions)
    arrays["slot_mapping"][tokens:] = 0
    arrays["cu_seqlens"][0] = 0
    arrays["cu_seqlens"][1 : rows + 1] = np.cumsum(layout.counts)
    arrays["cu_seqlens"][rows + 1 :] = tokens
    for name, values in (("starts", layout.starts), ("counts", layout.counts)):
        arrays[name][:rows] = values
        arrays[name][rows:] = 0
