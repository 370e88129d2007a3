"""Limits how much freed memory the C library keeps.

    results are freed ──▶ enough of them ──▶ a moment later: malloc_trim, in a thread

glibc gives threads their own arenas, up to eight for each core, and memory freed in one is not
reused by another. Tokenizing a long text takes tens of megabytes, in any of several threads; with
many arenas, each keeps as much. Two are enough for a process in which threads mostly wait or hold
the interpreter's lock.

What is freed among memory in use is not given back by itself: after 500 MB of results all but the
last were freed, and 500 MB were still taken. `malloc_trim` gives whole pages back; so that takes up
to 90 ms, during which other threads may wait for memory, it is called only when much was freed.
"""

from __future__ import annotations

import asyncio
import ctypes
from concurrent.futures import Executor

ARENAS = 2
ENOUGH_BYTES = 32 << 20
"""How much must have been freed before any is given back."""
DELAY_S = 1.0
"""How long after that: more may follow."""
_M_ARENA_MAX = -8  # of malloc.h


def bound_arenas() -> bool:
    """Limit this process to ARENAS arenas. Returns whether that worked: other C libraries have no
    arenas, or no such setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_ARENA_MAX, ARENAS))


class GivingBack:
    """Gives freed memory back to the system; see the module. Used on one event loop."""

    def __init__(self, executor: Executor) -> None:
        """`executor`: has a thread for it."""
        self._executor = executor
        self._freed = 0
        self._is_due = False

    def freed(self, size: int) -> None:
        """Note that about so many bytes were freed."""
        self._freed += size
        if self._freed >= ENOUGH_BYTES and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(DELAY_S, self._give_back)

    def _give_back(self) -> None:
        self._is_due = False
        self._freed = 0
        try:
            trim = ctypes.CDLL(None).malloc_trim
        except AttributeError:
            return
        try:
            self._executor.submit(trim, 0)
        except RuntimeError:
            return  # the server stops
