"""To wait for a task that goes on without whoever waits for it."""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

from engine.contract.errors import HeadraceError

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def join(task: asyncio.Task[T]) -> T:
    """A task's result. If this wait is cancelled, the task goes on, and no one is left to be told
    of its error: a refusal, or the engine's death, is then nothing to tell, and a defect is logged.
    (asyncio would report either with a traceback, as an error that was lost.)
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
