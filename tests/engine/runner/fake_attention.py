"""Attention that can be captured without a CUDA device: one operation, which reads the step from
its arrays each time that it runs, and computes it with the torch backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.interface import (
    AttentionMetadata,
    AttentionParams,
    BatchLayout,
    LayerCache,
    StaticShape,
)
from engine.attention.step_arrays import StepArraysBackend
from engine.attention.torch_backend import TorchAttentionBackend


@dataclass(frozen=True, slots=True)
class _Places(AttentionMetadata):
    fields: Mapping[str, torch.Tensor]
    block_size: int
    window: int


class CapturableAttention(StepArraysBackend, TorchAttentionBackend):
    """See the module."""

    def static_metadata(
        self,
        shape: StaticShape,
        window: int | None,
        fields: Mapping[str, torch.Tensor],
        like: torch.Tensor,
    ) -> AttentionMetadata:
        return _Places(fields, shape.block_size, window or 0)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        if not isinstance(metadata, _Places):
            return super().forward(query, key, value, cache, metadata, params)
        names = ("starts", "counts", "table_offsets", "extent", "entries")
        output: torch.Tensor = _attend(
            *(query, key, value, cache.keys, cache.values),
            *(metadata.fields[name] for name in names),
            *(params.sinks, metadata.block_size, metadata.window),
            *(params.scaling, params.softcap),
        )
        return output


@torch.library.custom_op(
    "headrace_tests::attend",
    mutates_args=("keys", "values"),
    schema="(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, "
    "Tensor starts, Tensor counts, Tensor table_offsets, Tensor extent, Tensor entries, "
    "Tensor? sinks, int block_size, int window, float scaling, float? softcap) -> Tensor",
)
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    table_offsets: torch.Tensor,
    extent: torch.Tensor,
    entries: torch.Tensor,
    sinks: torch.Tensor | None,
    block_size: int,
    window: int,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    num_decodes, others, tokens, *_ = extent.tolist()
    rows = num_decodes + others
    if not rows:
        return query.new_zeros((query.shape[1], query.shape[0], value.shape[-1]))
    begins, lengths = starts[:rows].numpy(), counts[:rows].numpy()
    widths = -(-(begins + lengths) // block_size)
    tables = np.zeros((rows, widths.max()), dtype=np.int32)
    for row, (offset, width) in enumerate(zip(table_offsets.tolist(), widths, strict=False)):
        tables[row, :width] = entries[offset : offset + width].numpy()
    layout = BatchLayout(
        starts=begins,
        counts=lengths,
        num_decodes=num_decodes,
        positions=np.concatenate(
            [np.arange(s, s + n) for s, n in zip(begins, lengths, strict=True)]
        ),
        tables=tables,
        block_size=block_size,
        num_padding=query.shape[1] - tokens,
    )
    backend = TorchAttentionBackend()
    metadata = backend.prepare(layout, window or None, keys)
    params = AttentionParams(scaling=scaling, softcap=softcap, sinks=sinks)
    return backend.forward(query, key, value, LayerCache(keys, values, 0), metadata, params)
