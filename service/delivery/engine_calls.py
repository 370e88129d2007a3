"""Calls to the engine whose result nothing waits for. Each is a task, and the tasks start in the
order of the calls. Errors are logged, except the engine's death, which ends the requests anyway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from engine.contract.engine_client import EngineClient
from engine.contract.errors import EngineUnavailableError
from engine.contract.types import RequestId

logger = logging.getLogger(__name__)


class EngineCalls:
    """Sends commands about requests to the engine."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        """The number of calls in progress."""
        return len(self._tasks)

    def cancel(self, request_id: RequestId) -> None:
        """End a request with CANCELLED."""
        self._tell("cancelling", request_id, self._client.cancel(request_id))

    def finish(self, request_id: RequestId, num_tokens: int, choice: int) -> None:
        """End a choice after its first tokens."""
        call = self._client.finish(request_id, num_tokens, choice)
        self._tell("finishing", request_id, call)

    def hold(self, request_id: RequestId) -> None:
        """Exclude a request from all steps."""
        self._tell("holding", request_id, self._client.hold(request_id))

    def unhold(self, request_id: RequestId) -> None:
        """Let a held request continue."""
        self._tell("releasing", request_id, self._client.unhold(request_id))

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start a task that `settle` waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def settle(self) -> None:
        """Wait for all calls in progress."""
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
