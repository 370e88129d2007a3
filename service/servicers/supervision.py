"""Watches the engine, and restarts it when it dies, if its client supports that.

serving ──engine dies──▶ restarting ──▶ serving     live requests have failed with "try again";
             │               │ ▲                    the server is not ready meanwhile
             │               └─┘ back-off: 0.5 s, doubled up to 30 s
             └──▶ failed     an engine of this process: only a new process helps
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from engine.contract.engine_client import EngineClient
from engine.contract.errors import HeadraceError
from service.admission.phases import Phase
from service.door.health import HealthServicer
from service.state import ServerState

logger = logging.getLogger(__name__)

RESTART_DELAY_S = 0.5
"""The delay before the first restart of an engine, in seconds."""
_MAX_DELAY_S = 30.0
_STABLE_S = 60.0
"""After an engine has served this long, in seconds, the restart delay is reset to the first one."""


class Supervisor:
    """Supervises the engine; see the module. Runs as one task after the engine first serves."""

    def __init__(
        self,
        client: EngineClient,
        state: ServerState,
        health: HealthServicer,
        load: Callable[[], Awaitable[None]],
        *,
        first_delay_s: float = RESTART_DELAY_S,
    ) -> None:
        """Create a supervisor.

        Args:
            client: the engine.
            state, health: updated for callers.
            load: starts the engine and makes the front end for its model.
            first_delay_s: how long to wait before the first attempt.
        """
        self._client = client
        self._state = state
        self._health = health
        self._load = load
        self._first_delay_s = first_delay_s
        self.restarts = 0

    async def run(self) -> Exception:
        """Watch the engine; return the cause when it is dead for good."""
        loop = asyncio.get_running_loop()
        delay = self._first_delay_s
        while True:
            served_from = loop.time()
            failure = await self._client.wait_failed()
            logger.error("the engine has stopped: %s", failure)
            self._health.set_ready(False)
            if not self._client.is_restartable:
                self._enter(Phase.FAILED)
                return failure
            self._enter(Phase.RESTARTING)
            if loop.time() - served_from > _STABLE_S:
                delay = self._first_delay_s
            delay = await self._restart(delay)
            self.restarts += 1
            logger.warning("the engine serves again (restart %d)", self.restarts)

    async def _restart(self, delay: float) -> float:
        """Start the engine, retrying until it succeeds, and return the delay for the next
        restart.
        """
        while True:
            logger.warning("the engine is started again in %.1f s", delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _MAX_DELAY_S)
            try:
                await self._load()
            # Whatever the cause, it may pass: a device recovers, memory is freed.
            except HeadraceError as error:
                logger.error("the engine could not be started again: %s", error)
            except Exception:
                logger.exception("the engine could not be started again")
            else:
                return delay

    def _enter(self, phase: Phase) -> None:
        if self._state.phase is not Phase.DRAINING:
            self._state.phase = phase
