"""Pools that start all their threads in advance.

A pool of the standard library starts a thread when work arrives. If the system then refuses one
(because of a limit on processes or memory), the work stays in the pool's queue although its caller
was told that it failed. Code that counts the work as running then waits for ever.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Make a pool that never starts a thread later.

    Args:
        threads: the number of threads.
        name: the prefix of their names.

    Raises:
        RuntimeError: the system refuses a thread. No threads remain in that case.
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
