"""Measures the machine's current memory bandwidth and matrix rate.

This is not a system of the comparison: the harness runs it before every turn. On a CPU each rate is
the best that torch or our kernels reach in any type. The rate of a single library or type would be
no bound where that library is slow, as torch's bfloat16 product is on a CPU without instructions
for it. On a GPU the bandwidth is that of a copy within its memory, counting bytes read and written,
timed by events.
"""

from __future__ import annotations

import functools
import math
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
        device = order.get("device", "cpu")
        if device != "cpu":
            torch.manual_seed(0)
            size, dtype = GPU_MATRIX, getattr(torch, order["dtype"])
            # Random numbers: a product of zeros runs faster.
            block = torch.randint(0, 256, (GPU_COPY_BYTES,), dtype=torch.uint8, device=device)
            left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
            self._reads: list[Callable[[], Any]] = [
                functools.partial(torch.empty_like(block).copy_, block)
            ]
            self._products = [functools.partial(torch.nn.functional.linear, left, right)]
            self._seconds, self._bytes, self._flops = _event_s, 2 * GPU_COPY_BYTES, 2 * size**3
            return {"settings": _about(device), "versions": _versions()}
        self._seconds, self._bytes, self._flops = _best_s, READ_BYTES, 2 * math.prod(MATRIX)
        block = torch.ones(READ_BYTES // 4)
        self._reads = [block.max, block.sum]
        self._products = _products()
        if order.get("instructions"):
            limit(order["instructions"])
        instructions = _instructions()
        if instructions is not None:
            self._products += _our_products()
            # One row reads all weights once.
            row = torch.ones(1, MATRIX[1])
            self._reads.append(_ours(row, block.view(-1, MATRIX[1])))
        settings = {"name": "a CPU", "type": "cpu", "instructions": instructions}
        return {"settings": settings, "versions": _versions()}

    def run(self, turn: Turn) -> dict[str, float]:
        return {
            "bandwidth": self._bytes / min(map(self._seconds, self._reads)),
            "matrix": self._flops / min(map(self._seconds, self._products)),
        }


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
