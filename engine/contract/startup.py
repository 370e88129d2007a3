"""Measures how long the phases of a start take.

    the wiring ──▶ Stages ◀── enter(progress, phase) ── loader, runner, …
                     └──▶ lines, and the seconds of each phase

A progress sink is passed to everything that loads. `Stages` is a sink that also measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Self

IMPORT: Final = "import"
"""Importing torch, transformers and their dependencies."""
DOWNLOAD: Final = "download"
"""Downloading missing files of the model from the hub."""
WEIGHTS: Final = "weights"
"""Reading the model."""
KERNELS: Final = "kernels"
"""Observing the model and packing its linear layers."""
VERIFY: Final = "verify"
"""Comparing the model with its own code."""
ADAPTERS: Final = "adapters"
"""Loading adapters."""
CACHE: Final = "cache"
"""Sizing and allocating the KV cache."""
VOCABULARY: Final = "vocabulary"
"""Reading what structured output needs."""
WARM_UP: Final = "warm_up"
"""Computing the steps that are slow the first time."""
CAPTURE: Final = "capture"
"""Capturing steps as CUDA graphs."""


_LOG_S = 5.0
"""The interval, in seconds, between log lines about a download's progress."""


class Transfer(str):
    """A line of progress about a download, which replaces the previous line.

    Two lines arrive per second, which suits a terminal (`bar`). `Paced` thins them out for a log.

    Attributes:
        done, total: the bytes received so far, and in total.
        seconds: how long the download has been running.
        rate: the recent rate, in bytes per second.
    """

    done: int
    total: int
    seconds: float
    rate: float

    def __new__(cls, done: int, total: int, seconds: float, rate: float) -> Self:
        """Create the line."""
        made = super().__new__(cls, _meter(done, total, seconds, rate, 0))
        made.done, made.total, made.seconds, made.rate = done, total, seconds, rate
        return made

    def bar(self, columns: int) -> str:
        """Return this line with a progress bar, `columns` wide."""
        return _meter(self.done, self.total, self.seconds, self.rate, columns)


def _meter(done: int, total: int, seconds: float, rate: float, columns: int) -> str:
    from tqdm import tqdm  # only while bytes come

    return tqdm.format_meter(
        done,
        total,
        seconds,
        ncols=columns,
        prefix="downloading",
        unit="B",
        unit_scale=True,
        rate=max(rate, 0.0) or None,
    )


def size_text(count: float) -> str:
    """Return a number of bytes in human-readable form, in powers of 1000."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.2f} GB"


class Paced:
    """A progress sink for a log: it passes on one `Transfer` every five seconds, and the last
    one.
    """

    def __init__(
        self, sink: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`sink` receives the lines. `clock` returns monotonic seconds."""
        self._sink = sink
        self._clock = clock
        self._last = -_LOG_S

    def __call__(self, line: str) -> None:
        """Pass a line on, unless it comes too soon after the previous `Transfer`."""
        if isinstance(line, Transfer):
            now = self._clock()
            if now - self._last < _LOG_S and line.done < line.total:
                return
            self._last = now
        self._sink(line)


class Stages:
    """A progress sink that measures phases. Used by one thread."""

    def __init__(
        self, sink: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`sink` receives the lines. `clock` returns monotonic seconds."""
        self._sink = sink
        self._clock = clock
        self._present = ""
        self._since = 0.0
        self._seconds: dict[str, float] = {}

    def __call__(self, line: str) -> None:
        """Pass a line on."""
        self._sink(line)

    def enter(self, phase: str) -> None:
        """Begin a phase, ending the previous one. A phase may occur several times."""
        now = self._clock()
        if self._present:
            self._seconds[self._present] = self._seconds.get(self._present, 0.0) + now - self._since
        self._present, self._since = phase, now

    def end(self) -> tuple[tuple[str, float], ...]:
        """End the last phase. Return the seconds of all phases, in the order in which they first
        began.
        """
        self.enter("")
        return tuple(self._seconds.items())


def enter(progress: Callable[[str], None], phase: str) -> None:
    """Begin a phase in a progress sink, if the sink measures phases."""
    if isinstance(progress, Stages):
        progress.enter(phase)
