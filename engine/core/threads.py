"""Runs a function on a new thread that ends with it.

torch's OpenMP runtime keeps a team of worker threads for every thread that ever ran a parallel
region. If there are more workers in total than CPUs, they sleep instead of spinning between the
regions of a step, and waking them takes longer than many regions do. As a result, a model that was
loaded on one thread and runs on another decodes about eight percent slower. When a thread ends, its
team ends too. Everything that runs the model before the engine's thread does is therefore called
through this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def call_on_own_thread(function: Callable[[], T], name: str) -> T:
    """Call `function` on a new thread, wait for it, and return its result or raise its exception.

    An interrupt (Ctrl-C) is raised in the waiting thread immediately. The new thread is a daemon,
    so it does not keep the process alive.
    """
    outcome: Future[T] = Future()
    try:
        _start(function, name, outcome).join()
        return outcome.result()
    finally:
        del outcome  # otherwise an error, its traceback and this frame would keep each other alive


async def await_on_own_thread(function: Callable[[], T], name: str) -> T:
    """Like `call_on_own_thread`, but for coroutines: the event loop is not blocked.

    If the caller is cancelled, it does not wait for the thread. The thread runs to completion, and
    its result or error is dropped.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    outcome: Future[T] = Future()

    def tell(_: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is gone, and nobody waits
            loop.call_soon_threadsafe(ended.set)

    outcome.add_done_callback(tell)
    try:
        _start(function, name, outcome)
        await ended.wait()
        return outcome.result()
    finally:
        del outcome


def _start(function: Callable[[], T], name: str, outcome: Future[T]) -> threading.Thread:
    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # handed over, not hidden: the caller raises it
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
