"""Calls to the engine that nobody waits for: each in a task, begun in the order of the calls. What
one of them raises is logged, but for the engine's death, which ends the requests by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from engine.client import EngineClient
from engine.errors import EngineUnavailableError
from engine.types import RequestId

logger = logging.getLogger(__name__)


class EngineCalls:
    """Tells the engine what is to become of requests."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        """Calls that are under way."""
        return len(self._tasks)

    def cancel(self, request_id: RequestId) -> None:
        """End a request with CANCELLED."""
        self._tell("cancelling", request_id, self._client.cancel(request_id))

    def finish(self, request_id: RequestId, num_tokens: int, choice: int) -> None:
        """End a choice as of its first tokens."""
        call = self._client.finish(request_id, num_tokens, choice)
        self._tell("finishing", request_id, call)

    def hold(self, request_id: RequestId) -> None:
        """Take no step for a request."""
        self._tell("holding", request_id, self._client.hold(request_id))

    def unhold(self, request_id: RequestId) -> None:
        """Let a held request go on."""
        self._tell("releasing", request_id, self._client.unhold(request_id))

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Have something done that is waited for at the end."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def settle(self) -> None:
        """Wait for all that is under way."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _tell(self, what: str, request_id: RequestId, call: Coroutine[Any, Any, object]) -> None:
        self.spawn(self._watch(what, request_id, call))

    async def _watch(
        self, what: str, request_id: RequestId, call: Coroutine[Any, Any, object]
    ) -> None:
        try:
            await call
        except EngineUnavailableError as error:
            logger.info("%s %s in the engine: %s", what, request_id, error)
        except Exception:
            logger.exception("%s %s in the engine failed", what, request_id)
