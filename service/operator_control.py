"""What operators see and steer: the server's figures, the pause, the drain and the log level. The
wiring is in `service.server`, the messages in `convert.control_messages`.

    ControlServicer ──▶ Control ──▶ EngineClient    pause, resume, stats, …
                           └──────▶ Registry        who is live, what is kept
                           └──────▶ HeadraceServer  begin_drain

There is one pause and one drain, not one for each operator. An operator's call that goes away does
not leave a pause half done: what it began is carried out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.client import EngineClient, EngineVerbs
from engine.errors import HeadraceError
from engine.stats import EngineStats
from service.delivery.registry import Registry, RegistryStats
from service.state import Drain, Phase, ServerState

logger = logging.getLogger(__name__)

ENGINE_ANSWER_S = 2.0
"""An engine that does not tell its figures within this time is left out of them."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pause:
    """The engine stands still. `since`: wall-clock seconds."""

    reason: str
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The server's figures at one moment.

    Attributes:
        taken_at, moment: wall-clock and monotonic seconds.
        uptime_s: how long the server has run.
        model: its name; empty while it loads.
        engine: None where it cannot tell.
        engine_restarts: how often it was started again.
    """

    instance_id: str
    model: str
    taken_at: float
    moment: float
    uptime_s: float
    phase: Phase
    pause: Pause | None
    drain: Drain | None
    log_level: str
    engine_restarts: int
    front_end: RegistryStats
    engine: EngineStats | None


class Control:
    """See the module. All methods run on one event loop.

    Attributes:
        ending: set when the server stops: those who watch look a last time.
        log_level: what is in force.
        tasks: what is under way, whether or not its caller waits.
    """

    def __init__(
        self,
        client: EngineClient,
        state: ServerState,
        registry: Registry,
        *,
        log_level: str,
        count_restarts: Callable[[], int],
        begin_drain: Callable[[float | None, str], object],
    ) -> None:
        """Wire it.

        Args:
            client, state, registry: what is looked at and steered.
            log_level: with which the server was started.
            count_restarts: how often the engine was started again.
            begin_drain: begins to end the server: seconds or None (the configuration's), reason.
        """
        self._client = client
        self._state = state
        self.registry = registry
        self._count_restarts = count_restarts
        self._begin_drain = begin_drain
        self._began = time.monotonic()
        self._pause: Pause | None = None
        self._steering = asyncio.Lock()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.ending = asyncio.Event()
        self.log_level = log_level

    # Looking

    async def snapshot(self) -> Snapshot:
        """The figures now."""
        engine = await self._engine_stats()
        state = self._state
        return Snapshot(
            instance_id=state.instance_id,
            model=state.model_name,
            taken_at=time.time(),
            moment=time.monotonic(),
            uptime_s=time.monotonic() - self._began,
            phase=state.phase,
            pause=self._pause,
            drain=state.drain,
            log_level=self.log_level,
            engine_restarts=self._count_restarts(),
            front_end=self.registry.stats(),
            engine=engine,
        )

    async def _engine_stats(self) -> EngineStats | None:
        if self._client.failure is not None:
            return None
        try:
            async with asyncio.timeout(ENGINE_ANSWER_S):
                return await self._client.stats()
        except (HeadraceError, TimeoutError):
            return None

    # Steering

    async def pause(self, reason: str) -> tuple[Pause, bool]:
        """Stop the engine between two steps; returns the pause, and whether there was one before.

        Raises:
            NotReadyError, EngineUnavailableError: the server loads, drains or has no engine.
        """
        return await self._carry_out(self._pause_engine(reason))

    async def _pause_engine(self, reason: str) -> tuple[Pause, bool]:
        async with self._steering:
            self._state.check(new_work=True)
            before = self._pause
            # Noted first: an engine that is started again meanwhile is paused too.
            self._pause = Pause(reason, before.since if before is not None else time.time())
            try:
                await self._client.pause()
            except BaseException:
                self._pause = before
                raise
            pause = self._pause
        if before is None or before.reason != reason:
            logger.warning("the engine is paused: %s", reason or "(no reason given)")
        return pause, before is not None

    async def resume(self) -> bool:
        """End the pause; returns whether there was one.

        Raises:
            NotReadyError, EngineUnavailableError: the server loads or has no engine.
        """
        return await self._carry_out(self._resume_engine())

    async def _resume_engine(self) -> bool:
        async with self._steering:
            engine = self.engine()
            was_paused = self._pause is not None
            await engine.resume()
            self._pause = None
        if was_paused:
            logger.warning("the engine goes on")
        return was_paused

    async def end_pause(self) -> None:
        """Let the engine go on, if it is paused and there: the server drains."""
        async with self._steering:
            if self._pause is None:
                return
            try:
                await self._client.resume()
            except HeadraceError as error:
                logger.debug("no engine to resume: %s", error)
            self._pause = None

    async def engine_started(self) -> None:
        """The engine was started, perhaps again: it is paused if it was."""
        if self._pause is not None:
            await self._client.pause()

    async def set_log_level(self, level: str) -> str:
        """Set what the server's processes log; returns the level before."""
        before, self.log_level = self.log_level, level
        logging.getLogger().setLevel(level.upper())
        logger.warning("the log level is %s; it was %s", level, before)
        await self._client.set_log_level(level)
        return before

    def drain(self, timeout_s: float | None, reason: str) -> tuple[Drain, bool]:
        """Begin to end the server; returns the drain, and whether it had begun before."""
        before = self._state.drain
        if before is not None:
            return before, True
        self._begin_drain(timeout_s, reason)
        drain = self._state.drain
        if drain is None:
            raise RuntimeError("the server did not begin to drain")
        return drain, False

    def engine(self) -> EngineVerbs:
        """What the engine can be asked to do.

        Raises:
            NotReadyError, EngineUnavailableError: the server loads or has no engine.
        """
        if self._state.phase is not Phase.DRAINING:
            self._state.check(new_work=True)
        return self._client

    async def _carry_out(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for a call that goes on when whoever waits for it goes away."""
        task = asyncio.create_task(call)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # Nobody will see how it ends.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
