"""An executor whose work a test does by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class Hands(Executor):
    """An executor whose work is done when the test says so, one at a time."""

    def __init__(self) -> None:
        self.begun: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.begun.append((future, call))
        return future

    async def finish(self) -> Any:
        """Do the first piece of work that was begun, and let what follows begin."""
        future, call = self.begun.pop(0)
        future.set_running_or_notify_cancel()
        try:
            future.set_result(result := call())
        except Exception as error:
            future.set_exception(error)
            result = error
        for _ in range(5):
            await asyncio.sleep(0)
        return result


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
