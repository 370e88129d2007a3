"""Resident memory of processes, by windows of time."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.usage import resident
from tests.campaign.witness.report import Memory


@dataclass(slots=True)
class Watched:
    """A process whose memory is watched.

    Attributes:
        start, peak, now: as in `Memory`.
    """

    pid: int
    start: int = 0
    peak: int = 0
    now: int = 0
    _mark: int = 0

    def begin(self) -> None:
        self.now, self._mark = resident(self.pid)
        self.start = self.peak = self.now

    def sample(self) -> None:
        self.now, mark = resident(self.pid)
        self.peak = max(self.peak, self.now)
        if mark > self._mark:  # the peak lay between two samples
            self.peak = max(self.peak, mark)

    def memory(self) -> Memory:
        self.sample()
        return Memory(self.pid, self.start, self.now, self.peak)
