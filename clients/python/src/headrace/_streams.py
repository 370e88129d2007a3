"""The streams of threaded sessions: their send queues and reader threads.

A `Wire` is one StreamResult call. A session with a single server needs only a `OneStream`.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, Unpack

import grpc

from headrace._link import Link
from headrace._session import Record, SessionCore, SessionOptions, wake
from headrace.errors import HeadraceError, error_from_stream
from headrace.session import CLOSE_SECONDS
from headrace.v1.generation_service_pb2 import StreamResultRequest, StreamResultResponse

_log = logging.getLogger("headrace")


class Reader(Protocol):
    """Receives what a `Wire` reads, in its reader thread. `place` is the value that the wire was
    created with.
    """

    def received(self, place: Any, response: StreamResultResponse) -> bool:
        """Handles a received message. Returns whether to continue reading."""

    def lost(self, place: Any, error: HeadraceError | None) -> None:
        """Handles the end of the call. `error` is None if the call ended normally."""


class Wire:
    """One call: commands are sent from a queue, and a thread reads the responses.

    The thread holds no strong reference to the wire or its reader.

    Args:
        link: the connection to the server.
        core: the source of the commands to send.
        reader: notified of messages and of the call's end.
        place: passed to the reader with each notification.

    Raises:
        UnavailableError: the client is closed.
    """

    def __init__(self, link: Link, core: SessionCore, reader: Reader, place: Any = None) -> None:
        self._link = link
        self._core = core
        self._told = weakref.ref(reader)
        self._place = place
        self._outgoing: queue.SimpleQueue[StreamResultRequest | None] = queue.SimpleQueue()
        self._half_closed = False
        commands = iter(self._outgoing.get, None)  # None ends it
        self._call = link.open(link.generation.StreamResult, commands)
        self._thread = threading.Thread(
            target=_read, args=(self._call, weakref.ref(self)), name="headrace-session", daemon=True
        )

    def start(self) -> None:
        """Sends the core's pending commands, then starts reading."""
        self.flush()
        self._thread.start()

    def flush(self) -> None:
        """Sends the core's pending commands. The caller holds the core's lock, unless the core is
        not shared yet.
        """
        if not self._half_closed:
            for command in self._core.outbox:
                self._outgoing.put(command)
            if self._core.has_said_all:
                self._half_closed = True
                self._outgoing.put(None)
        self._core.outbox.clear()

    def finish(self, timeout: float | None) -> None:
        """Waits up to `timeout` seconds for the call to end, then cancels it."""
        try:
            self._thread.join(timeout)
        finally:
            if self._thread.is_alive():
                self._call.cancel()
                self._thread.join(CLOSE_SECONDS)

    def drop(self) -> None:
        """Abandons the call. Takes no lock."""
        self._outgoing.put(None)  # lets gRPC's sending thread go
        self._call.cancel()

    def received(self, response: StreamResultResponse) -> bool:
        """Passes on a received message. Returns whether to continue reading."""
        reader = self._told()
        return reader is not None and reader.received(self._place, response)

    def ended(self, failure: grpc.RpcError | HeadraceError | None) -> None:
        """Tells the reader and the link that the call has ended."""
        self._link.ended(self._call)
        if isinstance(failure, grpc.RpcError):
            failure = error_from_stream(failure, target=self._link.target)
        if (reader := self._told()) is not None:
            reader.lost(self._place, failure)


def _read(call: Any, wire: weakref.ref[Wire]) -> None:
    """Reads a call until it ends or its wire is gone."""
    error: grpc.RpcError | HeadraceError | None = None
    try:
        for response in call:
            if (there := wire()) is None or not there.received(response):
                call.cancel()
                return
            del there, response  # not kept while the next one is waited for
    except grpc.RpcError as failure:
        error = failure
    except Exception as failure:  # of a callback: nobody may be left waiting for this thread
        _log.exception("the session's reader failed")
        error = HeadraceError(f"the session's reader failed: {failure}")
        call.cancel()
    finally:
        if (there := wire()) is not None:
            there.ended(error)


class OneStream:
    """The stream of a session that has only one. Implements `headrace.session.Streams`."""

    def __init__(self, link: Link, **options: Unpack[SessionOptions]) -> None:
        self.core = SessionCore(**options)
        self.lock = threading.Lock()
        self._later = Later()
        self._wire = Wire(link, self.core, self)
        self._wire.start()

    def flush(self) -> None:
        """Sends the core's pending commands."""
        self._wire.flush()

    def finish(self, timeout: float | None) -> None:
        """Waits up to `timeout` seconds for the stream to end, then cancels it."""
        self._wire.finish(timeout)

    def drop(self) -> None:
        """Abandons the stream."""
        self._later.close()
        self._wire.drop()

    def received(self, _place: Any, response: StreamResultResponse) -> bool:
        """Processes a received message; implements `Reader.received`."""
        with self.lock:
            changed = self.core.receive(response)
            self.flush()
            for delay, record in self.core.retries:
                self._later.add(delay, partial(self._again, record))
            self.core.retries.clear()
            wake(changed)
            return not self.core.ended

    def lost(self, _place: Any, error: HeadraceError | None) -> None:
        """Ends the session with its stream; implements `Reader.lost`."""
        with self.lock:
            if not self.core.ended:
                wake(self.core.end(error))
            self._later.close()
            self.flush()  # lets gRPC's sending thread go

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        """Calls `act` after `seconds`."""
        self._later.add(seconds, act)

    def _again(self, record: Record) -> None:
        with self.lock:
            changed = self.core.again(record)
            self.flush()
            wake(changed)


class Later:
    """Schedules actions for later and runs them all in one thread."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._changed = threading.Condition()
        self._serial = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, delay: float, act: Callable[[], object]) -> None:
        """Schedules `act` to be called after `delay` seconds."""
        with self._changed:
            due = time.monotonic() + delay
            heapq.heappush(self._due, (due, next(self._serial), act))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="headrace-retries", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Discards all scheduled actions."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed:
                    wait = self._due[0][0] - time.monotonic() if self._due else None
                    if wait is not None and wait <= 0:
                        break
                    self._changed.wait(wait)
                if self._closed:
                    return
                _, _, act = heapq.heappop(self._due)
            act()
