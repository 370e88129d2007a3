"""One group's data for a step, as int64 arrays that kernels read on the device.

They contain all lengths and offsets, and how much of the arrays is in use. In a captured step, they
have fixed addresses and spare capacity. Entries beyond the step are either marked as padding or
never read.

    slot_mapping [T]    the slot for a token's key and value; in the null block for padding
    cu_seqlens [R + 1]  the index of a request's first token in the flat row
    starts [R]          the position of that token in the request
    counts [R]          the request's tokens; 0 for padding
    table_offsets [R]   the offset of the request's block table in `blocks`
    extent [3]          the number of requests that compute one token, the number that compute
                        more (they come next), and the number of tokens
    blocks [*]          the block tables
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from engine.attention.interface import AttentionBackend, BatchLayout, StaticShape
from engine.attention.torch_layout import slots_of


def array_sizes(tokens: int, rows: int, entries: int) -> dict[str, int]:
    """Return the number of elements of each array, by name.

    Args:
        tokens: T.
        rows: R.
        entries: the maximum number of block table entries of all requests together.
    """
    return {
        "slot_mapping": tokens,
        "cu_seqlens": rows + 1,
        "starts": rows,
        "counts": rows,
        "table_offsets": rows,
        "extent": 3,
        "blocks": entries,
    }


def fill_arrays(layout: BatchLayout, arrays: Mapping[str, npt.NDArray[np.int64]]) -> None:
    """Write a step's data into the arrays.

    Entries of `blocks` beyond the step's block tables are left unchanged.
    """
    rows, tokens = len(layout.counts), len(layout.positions)
    width = layout.tables.shape[1]
    row_of_token = np.repeat(np.arange(rows), layout.counts)
    ends = np.cumsum(layout.counts)
    for name, values, padding in (
        ("slot_mapping", slots_of(layout, row_of_token, layout.positions), 0),
        ("starts", layout.starts, 0),
        ("counts", layout.counts, 0),
        ("table_offsets", np.arange(rows) * width, 0),
        ("cu_seqlens", ends - layout.counts, tokens),
    ):
        arrays[name][: len(values)] = values
        arrays[name][len(values) :] = padding
    arrays["extent"][:] = (layout.num_decodes, rows - layout.num_decodes, tokens)
    arrays["blocks"][: rows * width] = layout.tables.reshape(-1)


class StepArraysBackend(AttentionBackend):
    """A backend that keeps the metadata of captured steps in these arrays."""

    can_capture = True

    @override
    def static_fields(self, shape: StaticShape, window: int | None) -> Mapping[str, int]:
        return array_sizes(shape.tokens, shape.requests, shape.requests * shape.blocks)

    @override
    def fill_static(
        self,
        layout: BatchLayout,
        window: int | None,
        shape: StaticShape,
        fields: Mapping[str, npt.NDArray[np.int64]],
    ) -> None:
        fill_arrays(layout, fields)
