"""Waiting for a task that continues if its waiter is cancelled."""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

from engine.contract.errors import HeadraceError

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def join(task: asyncio.Task[T]) -> T:
    """Wait for a task and return its result. If the wait is cancelled, the task continues. Its
    error then has no receiver: a refusal or the engine's death is ignored, and a defect is logged.
    (asyncio would report all of them with a traceback, as exceptions that were never retrieved.)
    """
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.add_done_callback(_left)
        raise
    return task.result()


def _left(task: asyncio.Task[T]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    if not isinstance(error, HeadraceError):
        logger.error("what a caller no longer waits for has failed", exc_info=error)
