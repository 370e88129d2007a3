"""Measures the machine's current memory bandwidth and matrix rate.

This is not a system of the comparison: the harness runs it before every turn. On a CPU each rate is
the best that torch or our kernels reach in any type. The rate of a single library or type would be
no bound where that library is slow, as torch's bfloat16 product is on a CPU without instructions
for it. On a GPU the bandwidth is that of a copy within its memory, counting bytes read and written,
timed by events.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.adapters.loop import Turn, main
from benchmarks.instructions import limit
from benchmarks.measures import seconds_of
from engine.models.formats.native import Native, native_library
from engine.native.library import NativeUnavailableError

READ_BYTES = 512 << 20
"""Far more bytes than any cache holds."""
MATRIX = (2048, 1024, 4096)
"""Rows, depth and columns of the matrix product on a CPU."""
TYPES = (torch.bfloat16, torch.float32)
"""The types of matrix products on a CPU."""
GPU_COPY_BYTES = 1 << 30
"""Twenty times the cache of an H100."""
GPU_MATRIX = 8192
"""Rows, depth and columns of the matrix product on a GPU."""
GPU_WARMUPS = 3
GPU_TRIES = 20


class Machine:
    """Two small measurements. On a CPU each is the best of several tries, a rate that the machine
    can reach. On a GPU, where there is little interference, it is the median.
    """

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(order["threads"])
        self._device = order.get("device", "cpu")
        if self._device != "cpu":
            torch.manual_seed(0)
            size, dtype = GPU_MATRIX, getattr(torch, order["dtype"])
            # Random numbers: a product of zeros runs faster.
            self._block = torch.randint(
                0, 256, (GPU_COPY_BYTES,), dtype=torch.uint8, device=self._device
            )
            self._target = torch.empty_like(self._block)
            self._left = torch.randn(size, size, device=self._device).to(dtype)
            self._right = torch.randn(size, size, device=self._device).to(dtype)
            return {"settings": _about(self._device), "versions": _versions()}
        self._block = torch.ones(READ_BYTES // 4)
        self._reads: list[Callable[[], Any]] = [self._block.max, self._block.sum]
        self._products = _products()
        if order.get("instructions"):
            limit(order["instructions"])
        instructions = _instructions()
        if instructions is not None:
            self._products += _our_products()
            # One row reads all weights once.
            row = torch.ones(1, MATRIX[1])
            self._reads.append(_ours(row, self._block.view(-1, MATRIX[1])))
        settings = {"name": "a CPU", "type": "cpu", "instructions": instructions}
        return {"settings": settings, "versions": _versions()}

    def run(self, turn: Turn) -> dict[str, float]:
        if self._device != "cpu":
            copy_s = _event_s(lambda: self._target.copy_(self._block))
            return {
                "bandwidth": 2 * GPU_COPY_BYTES / copy_s,
                "matrix": 2 * GPU_MATRIX**3 / _event_s(self._multiply),
            }
        rows, depth, columns = MATRIX
        return {
            "bandwidth": READ_BYTES / min(map(_best_s, self._reads)),
            "matrix": 2 * rows * depth * columns / min(map(_best_s, self._products)),
        }

    def _multiply(self) -> torch.Tensor:
        return torch.nn.functional.linear(self._left, self._right)


def _instructions() -> str | None:
    """Return the instruction set of our kernels; None if they cannot be used here."""
    try:
        return native_library().isa
    except NativeUnavailableError:
        return None


def _products() -> list[Callable[[], Any]]:
    """Measure torch's product of `MATRIX` in each type, except a type that is far slower than
    another.
    """
    rows, depth, columns = MATRIX
    found: list[tuple[float, Callable[[], Any]]] = []
    for dtype in TYPES:
        left = torch.randn(rows, depth).to(dtype)  # [rows, depth]
        right = torch.randn(columns, depth).to(dtype)  # [columns, depth], as a linear layer
        product = functools.partial(torch.nn.functional.linear, left, right)
        found.append((_best_s(product, tries=1), product))
    return [product for took, product in found if took < 4 * min(found)[0]]


def _our_products() -> list[Callable[[], Any]]:
    """Measure our kernels' product of `MATRIX` in each type."""
    rows, depth, columns = MATRIX
    return [
        _ours(torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).to(dtype))
        for dtype in TYPES
    ]


def _ours(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], Any]:
    """Our kernels' product of x [rows, depth] and a packed weight [columns, depth]."""
    packed = Native(weight.shape, weight.dtype)
    packed.pack(weight)
    return functools.partial(packed.multiply, x, None)


def _about(device: str) -> dict[str, Any]:
    """Describe the GPU."""
    about = torch.cuda.get_device_properties(device)
    return {
        "name": about.name,
        "type": "cuda",
        "capability": f"{about.major}.{about.minor}",
        "memory_bytes": about.total_memory,
        "multiprocessors": about.multi_processor_count,
        "cache_bytes": getattr(about, "L2_cache_size", None),
    }


def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def _event_s(work: Callable[[], Any]) -> float:
    """Return the median of several tries, in seconds."""
    for _ in range(GPU_WARMUPS):
        work()
    found = []
    for _ in range(GPU_TRIES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def _best_s(work: Callable[[], Any], tries: int = 6) -> float:
    return min(seconds_of(work, tries))


if __name__ == "__main__":
    main(Machine())
