"""Chooses tokens with Triton kernels: one launch for the most likely ones, then three to draw with
filters and two without, for any number of rows. See `engine.sampling.drawing_kernels`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton

from engine.sampling.drawing_bins import BINS, CUT, PLAN
from engine.sampling.drawing_kernels import (
    LISTED,
    count_bins,
    find_most_likely,
    pick_token,
    sum_weights,
)

_OPTIONS: Mapping[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}


def _cuts(width: int) -> int:
    """The number of places for the cuts of a row."""
    count: int = triton.next_power_of_2(triton.cdiv(width, CUT.value))
    return count


class TritonMostLikely:
    """Chooses each row's most likely token. Steps share its memory, so only one may run at a
    time.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        """logits: [R, V], of the most rows of any step."""
        rows, width = logits.shape
        cuts = (rows, _cuts(width))
        self._largest = logits.new_empty(cuts, dtype=torch.float32)
        self._first = logits.new_empty(cuts, dtype=torch.int32)
        self._arrived = logits.new_zeros(rows, dtype=torch.int32)

    def __call__(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write the tokens; see `engine.sampling.plain.MostLikely`. logits: at most R rows."""
        rows, width = logits.shape
        # Triton launches on the current device.
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            find_most_likely[(rows, triton.cdiv(width, CUT.value))](
                *(logits, logits.stride(0), tokens),
                *(self._largest, self._first, self._arrived, width),
                CUTS=self._largest.shape[1],
                **_OPTIONS,
            )


class TritonDraws:
    """Draws tokens. Steps share its memory, so only one may run at a time."""

    def __init__(self, logits: torch.Tensor, *, interpreted: bool = False) -> None:
        """logits: [R, V], of the most rows of any step. interpreted: whether Triton's interpreter
        runs the kernels; it uses numpy's e^x instead of the device's.
        """
        rows, width = logits.shape
        self._counts = logits.new_zeros((rows, BINS.value), dtype=torch.int32)
        self._masses = logits.new_zeros((rows, BINS.value), dtype=torch.int64)
        self._plans = logits.new_empty((rows, PLAN.value), dtype=torch.int32)
        self._near, self._marks = logits.new_empty(
            (2, rows, LISTED.value), dtype=torch.int32
        ).unbind()
        self._arrived, self._lengths = logits.new_zeros((2, rows), dtype=torch.int32).unbind()
        self._sums = logits.new_empty((rows, _cuts(width)), dtype=torch.int64)
        self._interpreted = interpreted

    def __call__(
        self, filters: bool, logits: torch.Tensor, numbers: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Draw, with filters or without; see `engine.sampling.plain.Draws`."""
        rows, width = logits.shape
        cuts = triton.cdiv(width, CUT.value)
        row = (logits, logits.stride(0), tokens, numbers)
        listed = (self._near, self._marks, self._lengths, self._sums, width)
        exact = {"INTERPRETED": self._interpreted, **_OPTIONS}
        last = {"CUTS": self._sums.shape[1], "FILTERED": filters, **exact}
        # Triton launches on the current device.
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            if filters:
                count_bins[(rows, cuts)](
                    *row, self._counts, self._masses, self._plans, self._arrived, width, **exact
                )
            sum_weights[(rows, cuts)](*row, self._plans, *listed, **last)
            pick_token[(rows,)](*row, self._plans, self._masses, *listed, **last)
