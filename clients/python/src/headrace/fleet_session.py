"""The streams of a session over several servers, for threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Unpack

from headrace._fleet_record import ServerLink
from headrace._fleet_session import FleetCore
from headrace._session import Record, SessionOptions, wake
from headrace._streams import Later, Wire
from headrace.errors import CallCancelledError, HeadraceError, UnavailableError
from headrace.fleet import Fleet
from headrace.session import CLOSE_SECONDS
from headrace.v1.generation_service_pb2 import StreamResultResponse


class ManyStreams:
    """One stream for each server that has requests of the session, opened with its first request.

    Implements `headrace.session.Streams`.

    Args:
        fleet: the servers.
        restarts: whether output counts as delivered only when the request has ended.
        options: the session's options.
    """

    def __init__(
        self, fleet: Fleet, *, restarts: bool = False, **options: Unpack[SessionOptions]
    ) -> None:
        self.lock = threading.Lock()
        self.core = FleetCore(
            fleet.state, fleet.changed, self._open, self._do_later, restarts=restarts, **options
        )
        self._fleet = fleet
        self._later = Later()
        self._ended = threading.Condition(self.lock)
        self._is_dropped = False
        fleet.listen(self._server_changed)

    def flush(self) -> None:
        """Sends the pending commands of all streams."""
        for link in self.core.links:
            link.wire.flush()
        if self.core.is_done:
            self._ended.notify_all()

    def finish(self, timeout: float | None) -> None:
        """Waits up to `timeout` seconds for all requests to end, then closes all streams."""
        with self.lock:
            try:
                self._ended.wait_for(lambda: self.core.is_done, timeout)
            finally:
                wires = [link.wire for link in self.core.links]
                wake(self.core.end(UnavailableError("the session was closed")))
                self.flush()
                self._fleet.forget(self._server_changed)
                self._later.close()
        end = time.monotonic() + CLOSE_SECONDS
        for wire in wires:
            wire.finish(max(end - time.monotonic(), 0.0))

    def _open(self, link: ServerLink) -> None:
        """Opens the stream to a server. The lock is held."""
        link.wire = Wire(link.server.link, link.core, self, link)
        link.wire.start()

    def drop(self) -> None:
        """Abandons the streams."""
        self._is_dropped = True
        self._fleet.forget(self._server_changed)
        self._later.close()
        for link in self.core.links:
            link.wire.drop()

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        """Calls `act` after `seconds`."""
        self._later.add(seconds, act)

    def received(self, place: ServerLink, response: StreamResultResponse) -> bool:
        """Processes a received message; implements `Reader.received`."""
        with self.lock:
            self._done(self.core.receive(place, response))
            return not place.core.ended

    def lost(self, place: ServerLink, error: HeadraceError | None) -> None:
        """Handles the end of a stream; implements `Reader.lost`."""
        with self.lock:
            if self._is_dropped:
                self.core.end(CallCancelledError("the session was dropped"))
            self._done(self.core.lost(place, error))
            if self._fleet.is_closed:
                self._done(self.core.end(UnavailableError("the client was closed")))
            place.wire.flush()  # lets gRPC's sending thread go
        self._fleet.look()

    def _server_changed(self) -> None:
        with self.lock:
            self._done(self.core.server_changed())

    def _do_later(self, seconds: float, act: Callable[[], list[Record]]) -> None:
        def run() -> None:
            with self.lock:
                self._done(act())

        self._later.add(seconds, run)

    def _done(self, changed: list[Record]) -> None:
        self.flush()
        wake(changed)
