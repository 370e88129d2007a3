"""How long the phases of a start take.

    the wiring ──▶ Stages ◀── enter(progress, phase) ── loader, runner, …
                     └──▶ lines, and the seconds of each phase

A sink of progress is passed through everything that loads; the one that also measures is `Stages`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

IMPORT: Final = "import"
"""torch, transformers and what they load."""
WEIGHTS: Final = "weights"
"""The model is read, or downloaded."""
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
