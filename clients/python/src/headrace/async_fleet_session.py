"""The streams of a session over several servers, under asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Unpack

from headrace._async_streams import AsyncWire
from headrace._fleet_record import ServerLink
from headrace._fleet_session import FleetCore
from headrace._session import Record, SessionOptions, wake
from headrace.async_fleet import AsyncFleet
from headrace.async_session import CLOSE_SECONDS
from headrace.errors import CallCancelledError, HeadraceError, UnavailableError
from headrace.v1.generation_service_pb2 import StreamResultResponse


class AsyncManyStreams:
    """One stream for each server that has requests of the session, opened with its first request.

    Implements `headrace.async_session.AsyncStreams`.

    Args:
        fleet: the servers.
        restarts: whether output counts as delivered only when the request has ended.
        options: the session's options.
    """

    def __init__(
        self, fleet: AsyncFleet, *, restarts: bool = False, **options: Unpack[SessionOptions]
    ) -> None:
        self.core = FleetCore(
            fleet.state,
            contextlib.nullcontext(),  # one thread
            self._open,
            self._do_later,
            restarts=restarts,
            **options,
        )
        self.is_open = False
        self._fleet = fleet
        self._ended = asyncio.Event()
        self._timers: set[asyncio.TimerHandle] = set()

    def start(self) -> None:
        """Starts listening for servers that become ready."""
        self.is_open = True
        self._fleet.begin()
        self._fleet.listen(self._server_changed)

    def flush(self) -> None:
        """Sends the pending commands of all streams."""
        for link in self.core.links:
            link.wire.flush()
        if self.core.is_done:
            self._ended.set()

    async def finish(self, seconds: float | None) -> None:
        """Waits up to `seconds` for all requests to end, then closes all streams."""
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), seconds)
        finally:
            wires = [link.wire for link in self.core.links]
            wake(self.core.end(UnavailableError("the session was closed")))
            self.flush()
            self._fleet.forget(self._server_changed)
            for timer in self._timers:
                timer.cancel()
            self._timers.clear()
            end = time.monotonic() + CLOSE_SECONDS
            for wire in wires:
                await wire.finish(max(end - time.monotonic(), 0.0))

    def _open(self, link: ServerLink) -> None:
        self._fleet.begin()  # raises if the client is closed
        metadata = self._fleet.settings.metadata
        link.wire = AsyncWire(link.server.link, metadata, link.core, self, link)

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        """Calls `act` after `seconds`."""
        asyncio.get_running_loop().call_later(max(seconds, 0.0), act)

    def drop(self) -> None:
        """Abandons the streams."""
        self._fleet.forget(self._server_changed)
        for timer in self._timers:
            timer.cancel()
        wires = [link.wire for link in self.core.links]
        self.core.end(CallCancelledError("the session was dropped"))
        for wire in wires:
            wire.drop()

    def received(self, place: ServerLink, response: StreamResultResponse) -> bool:
        """Processes a received message; implements `AsyncReader.received`."""
        self._done(self.core.receive(place, response))
        return not place.core.ended

    def lost(self, place: ServerLink, error: HeadraceError | None) -> None:
        """Handles the end of a stream; implements `AsyncReader.lost`."""
        self._done(self.core.lost(place, error))
        if self._fleet.is_closed:
            self._done(self.core.end(UnavailableError("the client was closed")))
        place.wire.flush()
        self._fleet.look()

    def _server_changed(self) -> None:
        self._done(self.core.server_changed())

    def _do_later(self, seconds: float, act: Callable[[], list[Record]]) -> None:
        def run() -> None:
            self._timers.discard(timer)
            self._done(act())

        timer = asyncio.get_running_loop().call_later(seconds, run)
        self._timers.add(timer)

    def _done(self, changed: list[Record]) -> None:
        self.flush()
        wake(changed)
