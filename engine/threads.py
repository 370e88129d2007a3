"""Runs a function on a thread of its own, which then ends.

torch's OpenMP runtime keeps a team of worker threads for every thread that ever ran a parallel
region, and counts them all: with more of them than CPUs, workers no longer spin between the regions
of a step but sleep, and waking them costs more than many of those regions take. A model that was
loaded on one thread and runs on another so decodes some eight percent slower. A thread that ends
takes its team with it: whatever runs the model before the engine's thread does, runs here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def call_on_own_thread(function: Callable[[], T], name: str) -> T:
    """Call `function` on a new thread, wait for it, and return what it returns or raise what it
    raises.

    While it runs, an interrupt (Ctrl-C) of the waiting thread is raised there at once; the new
    thread is a daemon, and does not keep the process alive.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # handed over, not hidden: the caller raises it
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
