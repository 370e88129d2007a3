"""A process for attacks, at low priority, so that it takes no CPU time from the server that it
attacks on the same machine.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
from multiprocessing.pool import Pool

NICENESS = 10


def low_priority() -> Pool:
    """Return a pool of one such process, which is killed with its block."""
    return multiprocessing.get_context("spawn").Pool(1, _prepare)


def _prepare() -> None:
    os.setsid()  # Ctrl-C is for whoever started it to handle
    os.nice(NICENESS)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
