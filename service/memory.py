"""How the C library keeps memory that was given back.

glibc gives threads arenas of their own, up to eight for each core, and what was freed in one serves
no other. Tokenizing a long text takes tens of megabytes, in whatever thread it runs: with many
arenas, each keeps its share of that. Two are enough for a process whose threads mostly hold the
interpreter's lock, or wait.
"""

from __future__ import annotations

import ctypes

ARENAS = 2
_M_ARENA_MAX = -8  # of malloc.h


def bound_arenas() -> bool:
    """Let this process have ARENAS from now on, at most; whether that was done. Other C libraries
    have no arenas, or no such setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_ARENA_MAX, ARENAS))
