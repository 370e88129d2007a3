"""How long the phases of a start take.

    the wiring ──▶ Stages ◀── enter(progress, phase) ── loader, runner, …
                     └──▶ lines, and the seconds of each phase

A sink of progress is passed through everything that loads; the one that also measures is `Stages`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Self

IMPORT: Final = "import"
"""torch, transformers and what they load."""
DOWNLOAD: Final = "download"
"""What is missing of the model comes from the hub."""
WEIGHTS: Final = "weights"
"""The model is read."""
KERNELS: Final = "kernels"
"""It is observed, and its linear layers are packed."""
VERIFY: Final = "verify"
"""It is compared with the model's own code."""
CACHE: Final = "cache"
"""The KV cache is sized and allocated."""
VOCABULARY: Final = "vocabulary"
"""What structured output needs is read."""
WARM_UP: Final = "warm_up"
"""Steps are computed that are slow the first time."""
CAPTURE: Final = "capture"
"""Steps are captured as CUDA graphs."""


_LOG_S = 5.0
"""How many seconds a log waits between two lines about bytes that come."""


class Transfer(str):
    """A line of progress about bytes that come. It takes the place of the one before: two come in a
    second, which suits a terminal (`bar`); `Paced` lets those through that suit a log.

    Attributes:
        done, total: bytes that are here, and all of them.
        seconds: since when they come.
        rate: bytes a second in the last seconds.
    """

    done: int
    total: int
    seconds: float
    rate: float

    def __new__(cls, done: int, total: int, seconds: float, rate: float) -> Self:
        """Make the line."""
        made = super().__new__(cls, _meter(done, total, seconds, rate, 0))
        made.done, made.total, made.seconds, made.rate = done, total, seconds, rate
        return made

    def bar(self, columns: int) -> str:
        """The same with a bar, as wide as this."""
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
    """A number of bytes as people say it, in powers of 1000."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.2f} GB"


class Paced:
    """A sink of progress for a log: of `Transfer`s it passes on one every five seconds, and the
    last.
    """

    def __init__(
        self, sink: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`sink`: takes the lines. `clock`: monotonic seconds."""
        self._sink = sink
        self._clock = clock
        self._last = -_LOG_S

    def __call__(self, line: str) -> None:
        """Pass a line on, or not."""
        if isinstance(line, Transfer):
            now = self._clock()
            if now - self._last < _LOG_S and line.done < line.total:
                return
            self._last = now
        self._sink(line)


class Stages:
    """A sink of progress that measures phases. Used by one thread."""

    def __init__(
        self, sink: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`sink`: takes the lines. `clock`: monotonic seconds."""
        self._sink = sink
        self._clock = clock
        self._present = ""
        self._since = 0.0
        self._seconds: dict[str, float] = {}

    def __call__(self, line: str) -> None:
        """Pass a line on."""
        self._sink(line)

    def enter(self, phase: str) -> None:
        """Begin a phase, and end the one before. A phase may come several times."""
        now = self._clock()
        if self._present:
            self._seconds[self._present] = self._seconds.get(self._present, 0.0) + now - self._since
        self._present, self._since = phase, now

    def end(self) -> tuple[tuple[str, float], ...]:
        """End the last phase; returns the seconds of all, in the order of their beginnings."""
        self.enter("")
        return tuple(self._seconds.items())


def enter(progress: Callable[[str], None], phase: str) -> None:
    """Tell a sink of progress that a phase begins, if it measures phases."""
    if isinstance(progress, Stages):
        progress.enter(phase)
