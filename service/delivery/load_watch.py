"""Reports the engine's load to sessions.

    engine ◀── stats, once a second at most ── LoadWatch ──▶ current ──▶ sessions that ask for it

All sessions share one measurement, which is repeated while any of them is open, so a message costs
the engine nothing. The measurement is at most about a second old, or as old as the shortest
interval that a session asked for. If the engine does not answer, no load is reported.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from engine.contract.engine_client import EngineClient
from engine.contract.errors import HeadraceError
from engine.contract.stats import EngineStats

logger = logging.getLogger(__name__)

MAX_AGE_S = 1.0
"""The interval between questions to the engine, if no session's interval is shorter."""
ANSWER_S = 2.0
"""If the engine has not answered after this time, its load is unknown."""


class LoadFollower(Protocol):
    """A session that wants load reports.

    Attributes:
        is_over: whether the session has ended.
    """

    is_over: bool


class LoadWatch:
    """Asks the engine for its load while a session wants reports.

    Attributes:
        current: the latest statistics, or None if they are unknown.
    """

    def __init__(self, client: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: returns monotonic seconds, for the intervals of sessions."""
        self.current: EngineStats | None = None
        self._client = client
        self._clock = clock
        self._followers: dict[LoadFollower, float] = {}
        self._task: asyncio.Task[None] | None = None

    def follow(self, follower: LoadFollower, interval_s: float) -> LoadReport:
        """Start to report the load to a session, at most once every `interval_s` seconds, until the
        session ends.
        """
        self._followers[follower] = interval_s
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        return LoadReport(self, interval_s, self._clock)

    async def close(self) -> None:
        """Stop asking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _poll(self) -> None:
        while self._followers:
            try:
                async with asyncio.timeout(ANSWER_S):
                    self.current = await self._client.stats()
            except (HeadraceError, TimeoutError) as error:  # being stopped or started, or dead
                self.current = None
                logger.debug("the engine's load is not known: %s", error)
            await asyncio.sleep(min(MAX_AGE_S, *self._followers.values()))
            self._followers = {
                one: interval for one, interval in self._followers.items() if not one.is_over
            }
        self.current = None  # it would be too old for the next session


class LoadReport:
    """The load reports of one session."""

    def __init__(self, watch: LoadWatch, interval_s: float, clock: Callable[[], float]) -> None:
        self._watch = watch
        self._interval_s = interval_s
        self._clock = clock
        self._due = clock()

    def take(self) -> EngineStats | None:
        """Return the statistics for the next message, or None if no report is due or the load is
        unknown.
        """
        stats = self._watch.current
        if stats is None or (now := self._clock()) < self._due:
            return None
        self._due = now + self._interval_s
        return stats
