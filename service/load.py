"""The engine's load, as sessions are told it.

    engine ◀── stats, once a second at most ── LoadWatch ──▶ current ──▶ sessions that ask for it

All sessions share one figure, which is asked for while one of them is open: a message costs the
engine nothing. It is at most about a second old, or as old as the shortest interval that a session
asked for; where the engine does not answer there is none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from engine.client import EngineClient
from engine.errors import HeadraceError
from engine.stats import EngineStats

logger = logging.getLogger(__name__)

MAX_AGE_S = 1.0
"""How often the engine is asked, where no session's interval is shorter."""
ANSWER_S = 2.0
"""If it has not answered after this, its load is not known."""


class Follower(Protocol):
    """Who wants to know the load: a session.

    Attributes:
        is_over: whether it does no more.
    """

    is_over: bool


class LoadWatch:
    """Asks the engine while anybody wants to know.

    Attributes:
        current: the last figures; None: they are not known.
    """

    def __init__(self, client: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds, for the intervals of sessions."""
        self.current: EngineStats | None = None
        self._client = client
        self._clock = clock
        self._followers: dict[Follower, float] = {}
        self._task: asyncio.Task[None] | None = None

    def follow(self, follower: Follower, interval_s: float) -> LoadReport:
        """Tell a session the load, at most once in so many seconds, until it is over."""
        self._followers[follower] = interval_s
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        return LoadReport(self, interval_s, self._clock)

    async def close(self) -> None:
        """Ask no more."""
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
        self.current = None  # it would be old when the next one asks


class LoadReport:
    """What one session is told."""

    def __init__(self, watch: LoadWatch, interval_s: float, clock: Callable[[], float]) -> None:
        self._watch = watch
        self._interval_s = interval_s
        self._clock = clock
        self._due = clock()

    def take(self) -> EngineStats | None:
        """The figures for the message that is about to be sent; None: it says none."""
        stats = self._watch.current
        if stats is None or (now := self._clock()) < self._due:
            return None
        self._due = now + self._interval_s
        return stats
