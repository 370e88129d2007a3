"""Draws a random token for each row that has a temperature but no filters, the most common case of
sampling.

    choose_draw(device) ─▶ the kernel on a CPU ─▶ tokens
                        └▶ none, otherwise: the sampler's own steps

The tensor steps convert a row to float32 and then pass over it about ten times. The kernel reads
the row twice, in its original dtype. Their results are the same, except that about a tenth of the
weights differ in the last bit of e^x. As a result, between one draw in ten thousand (large
vocabularies) and one in a million falls on the other side of the border between two tokens. A row
always takes the same path, whatever its neighbours are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from engine.native.library import (
    BFLOAT16,
    FLOAT32,
    NativeLibrary,
    NativeUnavailableError,
    load_library,
)

Draw = Callable[
    [torch.Tensor, torch.Tensor, npt.NDArray[np.float64], npt.NDArray[np.float32]], torch.Tensor
]
"""Draws tokens for some rows. Takes logits [R, V], the indices of the rows to draw, int64 [N], and
for each of them a uniform number in [0, 1) and a temperature above 0. Returns tokens, int64 [N]:
the first token at which the cumulative weight exceeds the number times the total (see
`engine.sampling.ops`), or INVALID_TOKEN if the largest logit is not finite or the row has a NaN.
"""


def choose_draw(device: torch.device) -> Draw | None:
    """Return the kernel if it runs on the device, otherwise None."""
    if device.type != "cpu":
        return None
    try:
        return DrawInLibrary(load_library())
    except NativeUnavailableError:
        return None


class DrawInLibrary:
    """A Draw that uses the native library's kernel."""

    def __init__(self, library: NativeLibrary) -> None:
        self._draw = library.draw

    def __call__(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        uniforms: npt.NDArray[np.float64],
        temperatures: npt.NDArray[np.float32],
    ) -> torch.Tensor:
        if logits.dtype not in (torch.float32, torch.bfloat16) or logits.stride(1) != 1:
            logits, rows = logits.index_select(0, rows).float(), torch.arange(len(rows))
        tokens = torch.empty(len(rows), dtype=torch.int64)
        self._draw(
            logits.data_ptr(),
            logits.stride(0),
            rows.data_ptr(),
            len(rows),
            logits.shape[1],
            BFLOAT16 if logits.dtype is torch.bfloat16 else FLOAT32,
            uniforms.ctypes.data,
            temperatures.ctypes.data,
            tokens.data_ptr(),
            torch.get_num_threads(),
        )
        return tokens
