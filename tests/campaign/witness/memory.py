"""Resident memory of processes, read from /proc. The witness needs no package but the client, so
this does not come from the benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.campaign.witness.report import Memory


@dataclass(slots=True)
class Watched:
    """A process whose memory is watched.

    Attributes:
        pid: the process id.
        start, peak, now: as in `Memory`.
    """

    pid: int
    start: int = 0
    peak: int = 0
    now: int = 0
    _mark: int = 0

    def begin(self) -> None:
        """Begin a new window."""
        self.now, self._mark = resident(self.pid)
        self.start = self.peak = self.now

    def sample(self) -> None:
        """Read the current memory and update the peak."""
        self.now, mark = resident(self.pid)
        self.peak = max(self.peak, self.now)
        if mark > self._mark:  # the peak lay between two samples
            self.peak = max(self.peak, mark)

    def memory(self) -> Memory:
        """Return the current figures."""
        self.sample()
        return Memory(self.pid, self.start, self.now, self.peak)


def resident(pid: int) -> tuple[int, int]:
    """Return a process's current and peak resident memory in bytes; 0 once the process is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0, 0
    found = dict.fromkeys(("VmRSS", "VmHWM"), 0)  # a zombie has neither
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name in found:
            found[name] = int(value.split()[0]) * 1024
    return found["VmRSS"], found["VmHWM"]
