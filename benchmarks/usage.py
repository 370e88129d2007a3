"""What a process uses, as Linux tells it. Only the standard library is imported, so that a caller
of a server can read this, too.
"""

from __future__ import annotations

import time
from pathlib import Path


def resident(pid: int) -> tuple[int, int]:
    """Return a process's current and peak resident memory in bytes; 0 once it has ended."""
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


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, user and system, in nanoseconds' resolution: of all its
    threads, also of those that have ended. Raises OSError if there is no such process.
    """
    return time.clock_gettime((~pid << 3) | 2)  # Linux's clock of a process, CPUCLOCK_SCHED
