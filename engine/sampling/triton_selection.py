"""Radix selection with Triton kernels: seven launches instead of about thirty."""

from __future__ import annotations

import torch
import triton

from engine.sampling.selection import DIGITS, INFINITY
from engine.sampling.selection_kernels import add_up, choose_digit

_CUT = 4096
"""The number of entries that one program adds up."""
_WARPS = 8


def least_bound(
    values: torch.Tensor, masses: torch.Tensor | None, target: torch.Tensor
) -> torch.Tensor:
    """A LeastBound that uses two kernels for each digit."""
    rows, width = values.shape
    stride = 1 << max(bits for _, bits in DIGITS)
    sums = torch.zeros((rows, stride), dtype=torch.int64, device=values.device)
    known = torch.empty((rows, 1), dtype=torch.int32, device=values.device)
    target = target.clone()
    bits_of = values.contiguous().view(torch.int32)
    counts = masses is None
    weights = sums if masses is None else masses.contiguous()
    # Triton launches on the current device.
    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
        for place, (lowest, bits) in enumerate(DIGITS):
            is_first = place == 0
            add_up[(rows, triton.cdiv(width, _CUT))](
                bits_of,
                weights,
                known,
                sums,
                width,
                COUNTS=counts,
                IS_FIRST=is_first,
                LOWEST=lowest,
                BITS=bits,
                STRIDE=stride,
                CUT=_CUT,
                num_warps=_WARPS,
                enable_fp_fusion=False,
            )
            choose_digit[(rows,)](
                sums,
                known,
                target,
                IS_FIRST=is_first,
                IS_LAST=place == len(DIGITS) - 1,
                BITS=bits,
                STRIDE=stride,
                LARGEST=INFINITY,
                num_warps=_WARPS,
                enable_fp_fusion=False,
            )
    return known.view(torch.float32)
