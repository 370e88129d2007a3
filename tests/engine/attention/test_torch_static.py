"""The torch backend: a step of fixed places equals the step as it comes, padding and all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.base import AttentionParams, BatchLayout, LayerCache, StaticShape
from engine.attention.torch_backend import TorchAttentionBackend

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 6
POOL = 40


def make_layout(parts: list[tuple[int, int]], size: int, window: int | None) -> BatchLayout:
    """Requests of (start, count), each in blocks of its own; what a window has left is null."""
    parts = sorted(parts, key=lambda part: (part[1] > 1, part[0]))
    starts = np.array([start for start, _ in parts], dtype=np.int64)
    counts = np.array([count for _, count in parts], dtype=np.int64)
    lengths = -(-(starts + counts) // size)
    tables = np.zeros((len(parts), int(lengths.max())), dtype=np.int32)
    random = np.random.default_rng(0)
    for row, length in enumerate(lengths.tolist()):
        tables[row, :length] = random.permutation(POOL)[:length] + 1 + POOL * row
        if window is not None:
            tables[row, : max(0, parts[row][0] - window + 1) // size] = 0
    return BatchLayout(
        starts=starts,
        counts=counts,
        num_decodes=int((counts == 1).sum()),
        positions=np.concatenate([np.arange(s, s + c) for s, c in parts]),
        tables=tables,
        block_size=size,
    )


def make_cache(size: int, num_requests: int) -> LayerCache:
    """Numbers everywhere, as earlier owners leave them."""
    generator = torch.Generator().manual_seed(7)
    slots = (POOL * num_requests + 1) * size
    return LayerCache(
        keys=torch.randn(slots, KV_HEADS, DIM, generator=generator),
        values=torch.randn(slots, KV_HEADS, VALUE_DIM, generator=generator),
        group=0,
    )


def attend(
    layout: BatchLayout,
    window: int | None,
    params: AttentionParams,
    cache: LayerCache,
    shape: StaticShape | None = None,
) -> torch.Tensor:
    """One layer's output for a step, [T, Hq, Dv], as it comes or at fixed places."""
    backend = TorchAttentionBackend()
    count = int(layout.counts.sum())
    generator = torch.Generator().manual_seed(3)
    tensors = [
        torch.randn(heads, count, dim, generator=generator)
        for heads, dim in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    ]
    if shape is None:
        metadata = backend.prepare(layout, window, cache.keys)
    else:
        sizes = backend.static_fields(shape, window)
        # What an earlier step left in the arrays must not matter.
        arrays = {name: np.full(size, 10**6, dtype=np.int64) for name, size in sizes.items()}
        backend.fill_static(layout, window, shape, arrays)
        fields = {name: torch.from_numpy(array) for name, array in arrays.items()}
        metadata = backend.static_metadata(shape, window, fields, cache.keys)
        padding = shape.tokens - count
        tensors = [torch.nn.functional.pad(t, (0, 0, 0, padding)) for t in tensors]
    query, key, value = tensors
    return backend.forward(query, key, value, cache, metadata, params)


def shape_for(layout: BatchLayout, more: int, context: int) -> StaticShape:
    """A shape with room for `more` tokens and `context` blocks than the step has."""
    size, ends = layout.block_size, layout.starts + layout.counts
    is_decode = bool((layout.counts == 1).all())
    tokens = int(layout.counts.sum()) + more
    read = int(ends.max()) if is_decode else int(ends.sum())
    return StaticShape(
        is_decode=is_decode,
        tokens=tokens,
        requests=tokens if is_decode else len(ends) + more,
        context=(-(-read // size) + context) * size,
        block_size=size,
    )


decodes = st.lists(st.tuples(st.integers(0, 60), st.just(1)), min_size=1, max_size=5)
mixed = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=5)


@settings(max_examples=120, deadline=None)
@given(
    parts=st.one_of(decodes, mixed),
    size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 7, 24]),
    softcap=st.sampled_from([None, 5.0]),
    has_sinks=st.booleans(),
    more=st.integers(0, 5),
    context=st.integers(0, 3),
)
def test_fixed_places_equal_the_step_as_it_comes(
    parts: list[tuple[int, int]],
    size: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    more: int,
    context: int,
) -> None:
    if sum(start + count for start, count in parts) > POOL * size:
        parts = parts[:1]
    if max(start + count for start, count in parts) > POOL * size:
        parts = [(3, parts[0][1])]
    layout = make_layout(parts, size, window)
    sinks = torch.linspace(-1, 2, HEADS) if has_sinks else None
    params = AttentionParams(scaling=0.4, softcap=softcap, sinks=sinks)
    caches = [make_cache(size, len(parts)) for _ in range(2)]
    expected = attend(layout, window, params, caches[0])
    actual = attend(layout, window, params, caches[1], shape_for(layout, more, context))
    assert bool(torch.isfinite(actual).all()), "padding too"
    torch.testing.assert_close(actual[: len(expected)], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(caches[0].keys[size:], caches[1].keys[size:], rtol=0, atol=0)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("counts", [(1, 1, 1), (5, 7, 1)])
@pytest.mark.parametrize("is_static", [False, True])
def test_a_request_that_is_not_a_number_stays_alone(
    window: int | None, counts: tuple[int, ...], is_static: bool
) -> None:
    """One request's cache is full of NaN; the others do not notice."""
    layout = make_layout([(20 + i, count) for i, count in enumerate(counts)], 4, window)
    params = AttentionParams(scaling=0.4)
    shape = shape_for(layout, 3, 2) if is_static else None
    clean, dirty = make_cache(4, 3), make_cache(4, 3)
    expected = attend(layout, window, params, clean, shape)
    for block in layout.tables[0][layout.tables[0] > 0].tolist():
        for tensor in (dirty.keys, dirty.values):
            tensor[block * 4 : block * 4 + 4] = float("nan")
    actual = attend(layout, window, params, dirty, shape)
    first, count = int(layout.counts[0]), int(layout.counts.sum())
    assert torch.isnan(actual[:first]).all(), "it shows in its own output"
    torch.testing.assert_close(actual[first:count], expected[first:count])
