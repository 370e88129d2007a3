"""One group's data for a step, as int64 arrays that kernels read on the device.

They contain all lengths and offsets, and how much of the arrays is in use. In a captured step, they
have fixed addresses and spare capacity. Entries beyond the step are either marked as padding or
never read.

    slot_mapping [T]    the slot for a token's key and value; in the null block for padding
    cu_seqlens [R + 1]  the index of a request's first token in the flat row
    starts [R]          the position of that token in the request
    counts [R]          the request's tokens; 0 for padding
    table_offsets [R]   the offset of the request's block table in `entries`
    extent [5]          the number of requests that compute one token, the number that compute
                        more (they come next), the number of tokens, the number of cuts of the
                        contexts of all requests that compute one token, and the offset of the first
                        cut in `entries`
    entries [*]         the block tables, without what is not in use, and then for each cut
                        `most_cuts` times the index of its request plus its own in the context

The last one has a different length in each step, and is shared by all groups: each has its entries
where those of the previous one end. So what is copied to the device is as long as the contexts, not
as long as the longest ones that there may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from engine.attention.interface import ENTRIES, AttentionBackend, BatchLayout, StaticShape
from engine.attention.torch_layout import slots_of

SHORTEST_CUT = 256
"""Tokens in the shortest cut of a context. Longer cuts are multiples of this."""
_FEWEST_CUTS, _MOST_CUTS = 16, 128
_PARTIALS = 256
"""The maximum product of the cuts of one request and the key/value heads. It is enough to fill a
device with one long request.
"""


@cache
def most_cuts(num_kv_heads: int, window: int | None) -> int:
    """Return the maximum number of cuts of one context.

    It does not depend on the step.
    """
    heads = 1 << (num_kv_heads - 1).bit_length()
    limit = max(_FEWEST_CUTS, min(_MOST_CUTS, _PARTIALS // heads))
    return min(limit, -(-window // SHORTEST_CUT) + 1) if window else limit


def count_cuts(
    positions: npt.NDArray[np.int64], window: int | None, most: int
) -> npt.NDArray[np.int64]:
    """Return the number of cuts of the contexts of tokens at `positions`.

    `triton_kernels.decode` divides them in the same way. `most` is the group's `most_cuts`.
    """
    last = positions // SHORTEST_CUT  # the piece of that size in which a context ends
    if window:
        last = last - np.maximum(positions - window + 1, 0) // SHORTEST_CUT
    return last // (last // most + 1) + 1


def array_sizes(tokens: int, rows: int, entries: int) -> dict[str, int]:
    """Return the number of elements of each array, by name; `entries` is the last one.

    Args:
        tokens: T.
        rows: R.
        entries: the maximum number of entries.
    """
    return {
        "slot_mapping": tokens,
        "cu_seqlens": rows + 1,
        "starts": rows,
        "counts": rows,
        "table_offsets": rows,
        "extent": 5,
        ENTRIES: entries,
    }


def fill_arrays(
    layout: BatchLayout,
    window: int | None,
    most: int,
    arrays: Mapping[str, npt.NDArray[np.int64]],
    begin: int = 0,
) -> int:
    """Write a step's data into the arrays.

    Args:
        layout: the step.
        window: the group's window, if it has one.
        most: the group's `most_cuts`.
        arrays: all arrays.
        begin: where the group's entries begin in `entries`.

    Returns:
        Where they end.
    """
    rows, tokens = len(layout.counts), len(layout.positions)
    row_of_token = np.arange(rows).repeat(layout.counts)
    ends = layout.counts.cumsum()
    lengths = (layout.starts + layout.counts - 1) // layout.block_size + 1
    offsets, used = _ragged(lengths, layout.tables.shape[1])
    cuts = count_cuts(layout.starts[: layout.num_decodes], window, most)
    _, numbers = _ragged(cuts, most)
    for name, values, padding in (
        ("slot_mapping", slots_of(layout, row_of_token, layout.positions), 0),
        ("starts", layout.starts, 0),
        ("counts", layout.counts, 0),
        ("table_offsets", begin + offsets, 0),
        ("cu_seqlens", ends - layout.counts, tokens),
    ):
        arrays[name][: len(values)] = values
        arrays[name][len(values) :] = padding
    middle = begin + len(used)
    end = middle + len(numbers)
    arrays[ENTRIES][begin:middle] = layout.tables.reshape(-1)[used]
    arrays[ENTRIES][middle:end] = numbers
    decodes = layout.num_decodes
    arrays["extent"][:] = (decodes, rows - decodes, tokens, len(numbers), middle)
    return end


def _ragged(
    lengths: npt.NDArray[np.int64], stride: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Lay out rows of different lengths one after another.

    Returns where each row begins, and for each element its index in an array whose rows have
    `stride` elements each.
    """
    ends = lengths.cumsum()
    begins = ends - lengths
    indices = (np.arange(len(lengths)) * stride - begins).repeat(lengths)
    indices += np.arange(len(indices))
    return begins, indices


class StepArraysBackend(AttentionBackend):
    """A backend that keeps the metadata of captured steps in these arrays."""

    can_capture = True

    @override
    def static_fields(
        self, shape: StaticShape, window: int | None, like: torch.Tensor
    ) -> Mapping[str, int]:
        entries = shape.requests * (shape.blocks + most_cuts(like.shape[1], window))
        return array_sizes(shape.tokens, shape.requests, entries)

    @override
    def fill_static(
        self,
        layout: BatchLayout,
        window: int | None,
        like: torch.Tensor,
        fields: Mapping[str, npt.NDArray[np.int64]],
        begin: int,
    ) -> int:
        return fill_arrays(layout, window, most_cuts(like.shape[1], window), fields, begin)
