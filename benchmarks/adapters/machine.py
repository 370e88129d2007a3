"""What the machine does at this moment: memory bandwidth and matrix rate, with torch.

Not a system of the comparison: the harness runs it before every turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.adapters.loop import Turn, main

READ_BYTES = 512 << 20
"""Far more than any cache."""
MATRIX = (2048, 1024, 4096)
"""Rows, depth, columns."""


class Machine:
    """Two small measurements, the best of some tries each: a rate that the machine can have."""

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(order["threads"])
        dtype = getattr(torch, order["dtype"])
        rows, depth, columns = MATRIX
        self._block = torch.ones(READ_BYTES // 4)
        self._left = torch.randn(rows, depth).to(dtype)  # [rows, depth]
        self._right = torch.randn(columns, depth).to(dtype)  # [columns, depth], as a linear layer
        return {}

    def run(self, turn: Turn) -> dict[str, float]:
        rows, depth, columns = MATRIX
        return {
            "bandwidth": READ_BYTES / min(_best_s(self._block.max), _best_s(self._block.sum)),
            "matrix": 2 * rows * depth * columns / _best_s(self._multiply),
        }

    def _multiply(self) -> torch.Tensor:
        return torch.nn.functional.linear(self._left, self._right)


def _best_s(work: Callable[[], Any], tries: int = 6) -> float:
    found = []
    for _ in range(tries):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


if __name__ == "__main__":
    main(Machine())
