"""Limits how much freed memory the C library keeps.

    results are freed ──▶ enough of them ──▶ a moment later: malloc_trim, in a thread

glibc gives threads separate arenas, up to eight per core, and memory freed in one is not reused by
another. Tokenizing a long text takes tens of megabytes, in any of several threads, and each arena
keeps that much. Two arenas are enough for a process in which threads mostly wait or hold the
interpreter's lock.

glibc does not return freed memory that lies between blocks still in use: after all but the last of
500 MB of results had been freed, 500 MB were still in use. `malloc_trim` returns whole pages. It
takes up to 90 ms, during which other threads may wait for memory, so it is called only when a lot
has been freed.
"""

from __future__ import annotations

import asyncio
import ctypes
from concurrent.futures import Executor

ARENAS = 2
ENOUGH_BYTES = 32 << 20
"""The number of bytes that must be freed before memory is returned to the system."""
DELAY_S = 1.0
"""The delay before memory is returned, because more may be freed in the meantime."""
_M_ARENA_MAX = -8  # of malloc.h


def bound_arenas() -> bool:
    """Limit this process to ARENAS arenas. Return whether that worked: other C libraries have no
    arenas, or no such setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_ARENA_MAX, ARENAS))


class GivingBack:
    """Returns freed memory to the system; see the module. Used on one event loop."""

    def __init__(self, executor: Executor) -> None:
        """`executor`: has a thread for the work."""
        self._executor = executor
        self._freed = 0
        self._is_due = False

    def freed(self, size: int) -> None:
        """Record that about `size` bytes were freed."""
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
