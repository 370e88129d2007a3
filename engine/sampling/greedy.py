"""Chooses the most likely token of each row, for greedy requests, the most common kind.

choose_greedy(device) ─▶ the kernel for bfloat16 on a CPU ─▶ tokens
                      └▶ torch's, otherwise               ─▶ tokens

torch reads a row four times: to convert it to float32, for argmax, for the entry itself, and to
check that it is finite. The kernel reads it once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.native.library import NativeLibrary, NativeUnavailableError, load_library
from engine.sampling import ops
from engine.scheduler.runner_protocol import INVALID_TOKEN

Greedy = Callable[[torch.Tensor], torch.Tensor]
"""Maps logits [R, V] to tokens, int64 [R] on the same device: the first of a row's largest entries,
or INVALID_TOKEN if that entry is not finite or the row has a NaN.
"""


def choose_greedy(device: torch.device) -> Greedy:
    """Return the fastest implementation for a device."""
    if device.type != "cpu":
        return in_torch
    try:
        return GreedyInLibrary(load_library())
    except NativeUnavailableError:
        return in_torch


def in_torch(logits: torch.Tensor) -> torch.Tensor:
    """A Greedy that uses torch operations."""
    return valid(*ops.argmax(logits))


def valid(tokens: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Replace the tokens of rows without a finite largest logit by INVALID_TOKEN. Such rows have a
    NaN, or no token left to choose.
    """
    return torch.where(best.abs() < torch.inf, tokens, INVALID_TOKEN)


class GreedyInLibrary:
    """A Greedy that uses the native library's kernel."""

    def __init__(self, library: NativeLibrary) -> None:
        self._greedy = library.greedy

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose with the kernel, or with torch if the logits are not bfloat16 or not
        contiguous.
        """
        rows, width = logits.shape
        if logits.dtype is not torch.bfloat16 or logits.stride(1) != 1 or not width:
            return in_torch(logits)
        tokens = torch.empty(rows, dtype=torch.int64)
        self._greedy(
            logits.data_ptr(),
            logits.stride(0),
            rows,
            width,
            tokens.data_ptr(),
            torch.get_num_threads(),
        )
        return tokens
