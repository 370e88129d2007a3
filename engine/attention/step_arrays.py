"""One group's part of a step as int64 arrays, from which kernels read everything on the device:
lengths, places, and how much of the arrays is in use. A captured step has them at fixed addresses,
with room for more; what is beyond the step is marked as padding, or never read.

    slot_mapping [T]    where a token's key and value go; in the null block: padding
    cu_seqlens [R + 1]  a request's first token in the flat row
    starts [R]          its position
    counts [R]          its tokens; 0: padding
    table_offsets [R]   where its row of blocks begins in `blocks`
    extent [3]          how many requests compute one token, how many compute more (they come
                        next), and how many tokens there are
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
    """The number of elements of each array, by name.

    tokens: T. rows: R. entries: the most block table entries of all requests together.
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
    """Write a step. Of `blocks`, what is beyond the step's tables is left as it is."""
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
    """A backend whose captured steps are these arrays."""

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
