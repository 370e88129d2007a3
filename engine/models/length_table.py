"""Rotary frequencies that depend on the length of a token's request, as stored in a view's modules.

    position ids [T] ─▶ the length that each carries ─▶ its row ─▶ frequencies [T, F]

`engine.contract.rope` defines how position ids carry the length, and `engine.loading.rotary` stores
the tables. Tables are read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.contract.rope import LENGTH_SHIFT

FROM = "lengths_from"
"""The attribute of a rotary module that holds the length for the first row of its tables."""


def table_name(frequencies: str) -> str:
    """Return the name of the buffer that holds the table for the buffer `frequencies`."""
    return f"{frequencies}_of_lengths"


@dataclass(frozen=True, slots=True)
class LengthTable:
    """A table of frequencies by length.

    Attributes:
        frequencies: float32 [L, F]. The first row is for all lengths up to the original one, and
            the next rows are for one longer length each. The last row is also for all longer ones.
        original: the original length.
    """

    frequencies: torch.Tensor
    original: int

    @classmethod
    def of(cls, module: torch.nn.Module, name: str) -> LengthTable | None:
        """Return the table in a rotary module's buffer of that name, or None if it has none."""
        table = module._buffers.get(name)
        return None if table is None else cls(table, vars(module)[FROM])

    def rows(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the table rows for tokens: [T] → [T]."""
        last = len(self.frequencies) - 1
        return ((position_ids >> LENGTH_SHIFT) - self.original).clamp(0, last)
