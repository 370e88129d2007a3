"""Steps of one layer, computed by the Triton backend and, plainly and in float64, here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.interface import (
    ENTRIES,
    AttentionParams,
    BatchLayout,
    LayerCache,
    StaticShape,
)
from engine.attention.triton_backend import TritonAttentionBackend

OTHERS = 37
"""How many entries other groups have in front of a step's, at fixed places."""
# Weights and outputs are rounded to the dtype once each; sums are float32.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.5e-2, torch.float16: 3e-3}


def make_layout(
    parts: list[tuple[int, int]],
    size: int,
    *,
    padding: int = 0,
    window: int | None = None,
    seed: int = 0,
) -> BatchLayout:
    """Requests of (start, count) whose blocks lie in no order; what a window has left is null."""
    parts = sorted(parts, key=lambda part: (part[1] > 1, part[0]))
    starts = np.array([start for start, _ in parts], dtype=np.int64)
    counts = np.array([count for _, count in parts], dtype=np.int64)
    lengths = -(-(starts + counts) // size)
    blocks = np.random.default_rng(seed).permutation(int(lengths.sum())) + 1
    tables = np.zeros((len(parts), int(lengths.max())), dtype=np.int32)
    for row, (length, end) in enumerate(zip(lengths, np.cumsum(lengths), strict=True)):
        tables[row, :length] = blocks[end - length : end]
        if window is not None:
            tables[row, : max(0, parts[row][0] - window + 1) // size] = 0
    return BatchLayout(
        starts=starts,
        counts=counts,
        num_decodes=int((counts == 1).sum()),
        positions=np.concatenate([np.arange(s, s + c) for s, c in parts]),
        tables=tables,
        block_size=size,
        num_padding=padding,
    )


def shape_for(layout: BatchLayout, more: int = 0, blocks: int = 0) -> StaticShape:
    """A shape with room for so many more tokens, and requests, and blocks than a step has."""
    is_decode = bool((layout.counts == 1).all())
    tokens = int(layout.counts.sum()) + more
    return StaticShape(
        is_decode=is_decode,
        tokens=tokens,
        requests=tokens if is_decode else len(layout.counts) + more,
        blocks=layout.tables.shape[1] + blocks,
        block_size=layout.block_size,
    )


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer is, beside its cache."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


class Case:
    """One layer's step. Tensors are rounded to the dtype, then kept in float64 on the host.

    Attributes:
        fill: what the cache holds where no request of the step has written.
    """

    def __init__(
        self, layout: BatchLayout, layer: Layer, dtype: torch.dtype, *, fill: float | None = None
    ) -> None:
        self.layout, self.layer, self.dtype = layout, layer, dtype
        self._generator = torch.Generator().manual_seed(0)
        tokens = int(layout.counts.sum())
        slots = (int(layout.tables.max()) + 1) * layout.block_size
        self.keys = self._random(slots, layer.kv_heads, layer.dim)
        self.values = self._random(slots, layer.kv_heads, layer.value_dim)
        if fill is not None:
            other = torch.ones(slots, dtype=torch.bool)
            for row in range(len(layout.counts)):
                first = 0
                if layer.window is not None:
                    first = max(0, int(layout.starts[row]) - layer.window + 1)
                other[self.slots(row)[first:]] = False
            self.keys[other] = fill
            self.values[other] = fill
        # As models make them: [1, T, H, D] with two axes exchanged.
        self.query = self._random(tokens, layer.heads, layer.dim).transpose(0, 1)
        self.key = self._random(tokens, layer.kv_heads, layer.dim).transpose(0, 1)
        self.value = self._random(tokens, layer.kv_heads, layer.value_dim).transpose(0, 1)
        self.sinks = self._random(layer.heads) if layer.has_sinks else None

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.dtype).double()

    def slots(self, row: int) -> torch.Tensor:
        """Where a request's context stands in the cache, this step's tokens included."""
        size = self.layout.block_size
        slots = self.layout.tables[row].astype(np.int64)[:, None] * size + np.arange(size)
        end = int(self.layout.starts[row] + self.layout.counts[row])
        return torch.from_numpy(slots.reshape(-1)[:end])

    def reference(self) -> torch.Tensor:
        """[T, Hq, Dv], without padding, in float64."""
        layer, layout = self.layer, self.layout
        keys, values = self.keys.clone(), self.values.clone()
        groups, outputs, begin = layer.heads // layer.kv_heads, [], 0
        for row, (start, count) in enumerate(zip(layout.starts, layout.counts, strict=True)):
            own = slice(begin, begin + int(count))
            begin = own.stop
            slots = self.slots(row)
            keys[slots[start:]] = self.key[:, own].transpose(0, 1)
            values[slots[start:]] = self.value[:, own].transpose(0, 1)
            places = torch.arange(len(slots))
            queries = torch.arange(int(start), len(slots))[:, None]
            hidden = places > queries
            if layer.window is not None:
                hidden |= places <= queries - layer.window
            # What nobody sees may be anything.
            seen = (~hidden).any(0)[:, None, None]
            context = torch.where(seen, keys[slots], 0.0).repeat_interleave(groups, 1)
            content = torch.where(seen, values[slots], 0.0).repeat_interleave(groups, 1)
            scores = torch.einsum("hnd,shd->hns", self.query[:, own], context) * layer.dim**-0.5
            if layer.softcap is not None:
                scores = torch.tanh(scores / layer.softcap) * layer.softcap
            scores = scores.masked_fill(hidden, float("-inf"))
            if self.sinks is not None:
                sinks = self.sinks[:, None, None].expand(-1, int(count), 1)
                weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
            else:
                weights = torch.softmax(scores, -1)
            outputs.append(torch.einsum("hns,shd->nhd", weights, content))
        return torch.cat(outputs)

    def cache(self, device: torch.device) -> LayerCache:
        """A cache of its own for a run."""
        return LayerCache(
            self.keys.to(device, self.dtype, copy=True),
            self.values.to(device, self.dtype, copy=True),
            0,
        )

    def run(
        self,
        device: torch.device,
        cache: LayerCache | None = None,
        shape: StaticShape | None = None,
        *,
        is_written: bool = False,
    ) -> torch.Tensor:
        """[T, Hq, Dv], padding included, on the host; as the step comes, or at fixed places.

        is_written: the cache has the step's keys and values already; what is not written is NaN.
        """
        backend, layout, window = TritonAttentionBackend(), self.layout, self.layer.window
        cache = self.cache(device) if cache is None else cache
        padding = layout.num_padding
        if shape is None:
            metadata = backend.prepare(layout, window, cache.keys)
        else:
            padding = shape.tokens - int(layout.counts.sum())
            sizes = dict(backend.static_fields(shape, window, cache.keys))
            sizes[ENTRIES] += OTHERS
            # What an earlier step left in the arrays must not matter.
            arrays = {name: np.full(size, 10**6, dtype=np.int64) for name, size in sizes.items()}
            end = backend.fill_static(layout, window, cache.keys, arrays, OTHERS)
            assert end <= sizes[ENTRIES]
            fields = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
            metadata = backend.static_metadata(shape, window, fields, cache.keys)
        query, key, value = (
            torch.nn.functional.pad(tensor, (0, 0, 0, padding)).to(device, self.dtype)
            for tensor in (self.query, self.key, self.value)
        )
        params = AttentionParams(
            scaling=self.layer.dim**-0.5,
            softcap=self.layer.softcap,
            sinks=None if self.sinks is None else self.sinks.to(device, self.dtype),
        )
        with torch.inference_mode():
            if is_written:
                made = (query.shape[1], self.layer.heads, self.layer.value_dim)
                output = query.new_full(made, float("nan"))
                backend.attend(query, output, cache, metadata, params)
            else:
                output = backend.forward(query, key, value, cache, metadata, params)
        assert output.dtype is self.dtype
        return output.cpu()
