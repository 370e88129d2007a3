"""The criterion for constant memory, threads and files of a process."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

EVERY_S = 0.5
BYTES = 8 << 20
"""How far the median memory of the last quarter may exceed that of the second quarter. The first
quarter is a warm-up in which pools, caches and arenas fill.
"""
THREADS = 2
FILES = 8
"""The same limit for the median numbers of threads and of open files."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of a process."""

    memory: int
    threads: int
    files: int


class Watch:
    """Samples processes in a separate thread until it is closed."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self.samples: dict[str, list[Sample]] = {name: [] for name in pids}
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            for name, process in self._processes.items():
                try:
                    with process.oneshot():
                        memory = process.memory_info().rss
                        sample = Sample(memory, process.num_threads(), process.num_fds())
                except psutil.Error:
                    continue
                self.samples[name].append(sample)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def growth(samples: list[Sample]) -> tuple[float, float, float]:
    """Return how far the medians of the last quarter exceed those of the second: memory in bytes,
    threads, files.
    """
    quarter = len(samples) // 4
    before, after = samples[quarter : 2 * quarter], samples[-quarter:]
    found = [
        statistics.median(getattr(one, name) for one in after)
        - statistics.median(getattr(one, name) for one in before)
        for name in ("memory", "threads", "files")
    ]
    return found[0], found[1], found[2]


def not_flat(name: str, samples: list[Sample]) -> list[str]:
    """Return which resources of a process have grown; empty if none has."""
    if len(samples) < 8:
        return [f"{name}: only {len(samples)} samples"]
    memory, threads, files = growth(samples)
    found = []
    if memory > BYTES:
        found.append(f"{name}: memory grew by {memory / 1e6:.1f} MB, above {BYTES / 1e6:.1f}")
    if threads > THREADS:
        found.append(f"{name}: {threads:.0f} more threads, above {THREADS}")
    if files > FILES:
        found.append(f"{name}: {files:.0f} more files, above {FILES}")
    return found
