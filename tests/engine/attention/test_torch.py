"""The torch backend: one request's cache cannot be seen by another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.interface import AttentionParams, BatchLayout, LayerCache
from engine.attention.torch_backend import TorchAttentionBackend

SIZE, BLOCKS = 4, 8


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 5, 7)])
def test_a_request_that_is_not_a_number_stays_alone(
    window: int | None, counts: tuple[int, ...]
) -> None:
    """One request's cache is full of NaN; the others do not notice."""
    starts = np.arange(20, 20 + len(counts), dtype=np.int64)
    layout = BatchLayout(
        starts=starts,
        counts=np.array(counts, dtype=np.int64),
        num_decodes=counts.count(1),
        positions=np.concatenate(
            [np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
        ),
        tables=1 + np.arange(len(counts) * BLOCKS, dtype=np.int32).reshape(-1, BLOCKS),
        block_size=SIZE,
    )
    backend, total = TorchAttentionBackend(), sum(counts)
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(heads, total, dim, generator=generator)
        for heads, dim in ((4, 8), (2, 8), (2, 6))
    )
    slots = (1 + len(counts) * BLOCKS) * SIZE
    clean = LayerCache(
        torch.randn(slots, 2, 8, generator=generator),
        torch.randn(slots, 2, 6, generator=generator),
        0,
    )
    dirty = LayerCache(clean.keys.clone(), clean.values.clone(), 0)
    for tensor in (dirty.keys, dirty.values):
        tensor[SIZE : SIZE + BLOCKS * SIZE] = float("nan")
    outputs = []
    for cache in (clean, dirty):
        metadata = backend.prepare(layout, window, cache.keys)
        params = AttentionParams(scaling=0.4)
        outputs.append(backend.forward(query, key, value, cache, metadata, params))
    expected, actual = outputs
    assert torch.isnan(actual[: counts[0]]).all(), "it shows in its own output"
    torch.testing.assert_close(actual[counts[0] :], expected[counts[0] :])
