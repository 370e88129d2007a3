"""Draws with Triton kernels: four launches with filters, two without, for any number of rows."""

from __future__ import annotations

import torch
import triton

from engine.sampling.drawing_kernels import (
    CUT,
    KEYS,
    count_values,
    find_bound,
    pick_token,
    sum_weights,
)

_WARPS = 8


class TritonDraws:
    """Draws tokens for rows of 16-bit logits. All steps share the counts, so only one may run at a
    time.
    """

    def __init__(self, rows: int, device: torch.device, *, interpreted: bool = False) -> None:
        """rows: the most rows of any step. interpreted: whether Triton's interpreter runs the
        kernels; it uses numpy's e^x instead of the device's.
        """
        # 256 KiB a row. A kernel clears what it has read: they are zeros between draws.
        self._counts = torch.zeros((rows, KEYS.value), dtype=torch.int32, device=device)
        self._interpreted = interpreted

    def __call__(
        self, filters: bool, logits: torch.Tensor, numbers: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Draw, with filters or without; see `engine.sampling.plain.Draws`."""
        rows, width = logits.shape
        cuts = triton.cdiv(width, CUT.value)
        sums = logits.new_empty((rows, triton.next_power_of_2(cuts)), dtype=torch.int64)
        farthest = logits.new_empty(rows, dtype=torch.float32)
        row = (logits, logits.stride(0), tokens, numbers)
        told = {"num_warps": _WARPS, "enable_fp_fusion": False}
        exact = {"INTERPRETED": self._interpreted, **told}
        last = {"CUTS": sums.shape[1], "FILTERED": filters, **exact}
        # Triton launches on the current device.
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            if filters:
                count_values[(rows, cuts)](*row, self._counts, width, **told)
                find_bound[(rows,)](*row, self._counts, farthest, width, **exact)
            sum_weights[(rows, cuts)](*row, farthest, sums, width, **last)
            pick_token[(rows,)](*row, farthest, sums, width, **last)
