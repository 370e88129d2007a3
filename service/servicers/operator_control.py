"""What operators see and control: the server's statistics, the pause, the drain and the log level.
The wiring is in `service.server`, the messages are in `convert.control_messages`.

    ControlServicer ──▶ Control ──▶ EngineClient    pause, resume, stats, …
                           └──────▶ Registry        live requests, kept results
                           └──────▶ HeadraceServer  begin_drain

All operators share one pause and one drain. If an operator's call is cancelled, the operation that
it started is still completed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from engine.contract.adapters import AdapterLoad, AdapterLoaded
from engine.contract.engine_client import EngineClient, EngineVerbs
from engine.contract.errors import HeadraceError
from engine.contract.stats import EngineStats
from engine.logs.levels import set_levels
from service.admission.phases import Drain, Phase
from service.convert.snapshot import OperatorPause, Snapshot
from service.delivery.joining import join
from service.delivery.registry import Registry
from service.state import ServerState
from service.telemetry.figures import Figures

logger = logging.getLogger(__name__)

ENGINE_ANSWER_S = 2.0
"""If the engine does not answer within this time, its statistics are left out."""

T = TypeVar("T")


class Control:
    """Implements the operations of operators; see the module. All methods run on one event loop.

    Attributes:
        ending: set when the server stops, so that watchers send their last update.
        log_level: the current log level.
        tasks: the operations in progress, whether or not their callers wait.
    """

    def __init__(
        self,
        client: EngineClient,
        state: ServerState,
        registry: Registry,
        *,
        log_level: str,
        figures: Figures,
        begin_drain: Callable[[float | None, str], object],
    ) -> None:
        """Create the controls.

        Args:
            client, state, registry: the objects to observe and control.
            log_level: the log level with which the server was started.
            figures: the source of the other metrics.
            begin_drain: starts a drain, with a timeout in seconds or None (the configured one), and
                a reason.
        """
        self._client = client
        self._state = state
        self.registry = registry
        self._figures = figures
        self._begin_drain = begin_drain
        self._began = time.monotonic()
        self._pause: OperatorPause | None = None
        self._steering = asyncio.Lock()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.ending = asyncio.Event()
        self.log_level = log_level

    # Looking

    async def snapshot(self) -> Snapshot:
        """Return the current statistics."""
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
            front_end=self.registry.stats(),
            engine=engine,
            figures=self._figures.read(),
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

    async def pause(self, reason: str) -> tuple[OperatorPause, bool]:
        """Pause the engine between two steps. Return the pause, and whether there was one already.

        Raises:
            NotReadyError, EngineUnavailableError: the server loads, drains or has no engine.
        """
        return await self._carry_out(self._pause_engine(reason))

    async def _pause_engine(self, reason: str) -> tuple[OperatorPause, bool]:
        async with self._steering:
            self._state.check(new_work=True)
            before = self._pause
            # Recorded first, so that an engine that is restarted meanwhile is paused too.
            self._pause = OperatorPause(reason, before.since if before is not None else time.time())
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
        """End the pause and return whether there was one.

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
        """End any pause because the server drains, whether or not the engine is running."""
        async with self._steering:
            if self._pause is None:
                return
            try:
                await self._client.resume()
            except HeadraceError as error:
                logger.debug("no engine to resume: %s", error)
            self._pause = None

    async def engine_started(self) -> None:
        """Pause the engine that has just started, if there is a pause."""
        if self._pause is not None:
            await self._client.pause()

    async def load_adapter(self, load: AdapterLoad) -> AdapterLoaded:
        """Load an adapter.

        Raises:
            FieldError: it cannot have this name.
            AdapterRefusedError, AdapterRoomError, AdapterExistsError: see EngineVerbs.
            NotReadyError, EngineUnavailableError: the server loads, drains or has no engine.
        """
        return await self._carry_out(self._load_adapter(load))

    async def _load_adapter(self, load: AdapterLoad) -> AdapterLoaded:
        front = self._state.check(new_work=True)
        front.adapters.check_name(load.name)
        loaded = await self._client.load_adapter(load)
        front.adapters.loaded(loaded)
        if front.metrics is not None:
            front.metrics.adapter_loaded(loaded.took_s)
        one = loaded.adapter
        logger.warning("adapter %s was loaded, digest %s", one.name, one.digest[:16])
        for name in loaded.evicted:
            logger.warning("adapter %s was unloaded, because memory was short", name)
        return loaded

    async def unload_adapter(self, name: str, timeout_s: float | None) -> int:
        """Unload an adapter, and return how many requests have it.

        Raises:
            AdapterNotLoadedError: there is none with this name.
            NotReadyError, EngineUnavailableError: the server loads or has no engine.
        """
        return await self._carry_out(self._unload_adapter(name, timeout_s))

    async def _unload_adapter(self, name: str, timeout_s: float | None) -> int:
        engine, adapters = self.engine(), self._state.front.adapters
        requests = await engine.unload_adapter(name, timeout_s)
        adapters.unloaded(name)
        logger.warning("adapter %s was unloaded; %d requests have it", name, requests)
        return requests

    async def set_log_level(self, level: str) -> str:
        """Set the log level of the server's processes and return the previous one."""
        before = self.log_level
        logging.getLogger().setLevel(level.upper())
        logger.warning("the log level is %s; it was %s", level, before)
        await self.set_log_levels(level)
        return before

    async def set_log_levels(self, level: str, level_of: tuple[str, ...] = ()) -> None:
        """Set the log level of the server's processes, and the levels of modules."""
        self.log_level = level
        logging.getLogger().setLevel(level.upper())
        set_levels(level_of)
        await self._client.set_log_level(level, level_of)

    def drain(self, timeout_s: float | None, reason: str) -> tuple[Drain, bool]:
        """Start a drain. Return it, and whether it had already begun."""
        before = self._state.drain
        if before is not None:
            return before, True
        self._begin_drain(timeout_s, reason)
        drain = self._state.drain
        if drain is None:
            raise RuntimeError("the server did not begin to drain")
        return drain, False

    def engine(self) -> EngineVerbs:
        """Return the engine's operations.

        Raises:
            NotReadyError, EngineUnavailableError: the server loads or has no engine.
        """
        if self._state.phase is not Phase.DRAINING:
            self._state.check(new_work=True)
        return self._client

    async def _carry_out(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for an operation that is completed even if the waiting task is cancelled."""
        task = asyncio.create_task(call)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return await join(task)
