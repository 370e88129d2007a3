"""Rotary frequencies that depend on a token's length, as the modules of a view keep them.

    position ids [T] ─▶ the length that each carries ─▶ its row ─▶ frequencies [T, F]

`engine.contract.rope` says how they carry it. `engine.loading.rotary` puts the tables there. They
are read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.contract.rope import LENGTH_SHIFT

FROM = "lengths_from"
"""The attribute of a rotary module with the length of the first row of its tables."""


def table_name(frequencies: str) -> str:
    """The name of the buffer with a table of such frequencies."""
    return f"{frequencies}_of_lengths"


@dataclass(frozen=True, slots=True)
class LengthTable:
    """A table.

    Attributes:
        frequencies: float32 [L, F]: up to the original length, then of each length beyond it; the
            last row is that of all longer ones.
        original: that length.
    """

    frequencies: torch.Tensor
    original: int

    @classmethod
    def of(cls, module: torch.nn.Module, name: str) -> LengthTable | None:
        """A rotary module's table by the name of its buffer; None: it has none."""
        table = module._buffers.get(name)
        return None if table is None else cls(table, vars(module)[FROM])

    def rows(self, position_ids: torch.Tensor) -> torch.Tensor:
        """The rows of tokens: [T] → [T]."""
        last = len(self.frequencies) - 1
        return ((position_ids >> LENGTH_SHIFT) - self.original).clamp(0, last)
