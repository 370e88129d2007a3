"""Limits how much freed memory the C library keeps.

glibc gives threads their own arenas, up to eight for each core, and memory freed in one is not
reused by another. Tokenizing a long text takes tens of megabytes, in any of several threads; with
many arenas, each keeps as much. Two are enough for a process in which threads mostly wait or hold
the interpreter's lock.
"""

from __future__ import annotations

import ctypes

ARENAS = 2
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
