"""Pools whose threads are there from the start.

A pool of the standard library starts a thread when work comes. If the system then refuses one
(a limit of processes or of memory), the work stays in the pool's queue though its caller is told
that it failed, and whoever counted it as running waits for ever.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool that never starts a thread later.

    Args:
        threads: how many.
        name: the first part of their names.

    Raises:
        RuntimeError: the system refuses a thread; none is left.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    all_there = threading.Barrier(threads + 1)
    try:
        for _ in range(threads):
            pool.submit(all_there.wait)  # none is idle before all are there
        all_there.wait()
    except BaseException:
        all_there.abort()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    return pool
