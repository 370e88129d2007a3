"""The calls of sessions, from threads: their sending queues and reading threads.

A `Wire` is one StreamResult call. `OneStream` is all that a session with one server needs.
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
    """Who is told what a wire reads, in its reading thread. `place`: as the wire was given it."""

    def received(self, place: Any, response: StreamResultResponse) -> bool:
        """A message has come; whether to read on."""

    def lost(self, place: Any, error: HeadraceError | None) -> None:
        """The call has ended, with this reason; None: in order."""


class Wire:
    """One call: commands go out from a queue, a thread reads what comes in. The thread keeps
    neither the wire nor its reader.

    Args:
        link: the connection to the server.
        core: whose commands are sent.
        reader: who is told what comes.
        place: told to the reader.

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
        """Begins to read; what the core wants sent goes out first."""
        self.flush()
        self._thread.start()

    def flush(self) -> None:
        """Sends what the core wants sent; its lock is held, or nobody else is there yet."""
        if not self._half_closed:
            for command in self._core.outbox:
                self._outgoing.put(command)
            if self._core.has_said_all:
                self._half_closed = True
                self._outgoing.put(None)
        self._core.outbox.clear()

    def finish(self, timeout: float | None) -> None:
        """Waits for the call's end, at most so many seconds, then cancels it."""
        try:
            self._thread.join(timeout)
        finally:
            if self._thread.is_alive():
                self._call.cancel()
                self._thread.join(CLOSE_SECONDS)

    def drop(self) -> None:
        """Ends the call, of which nobody wants to know any more. Takes no lock."""
        self._outgoing.put(None)  # lets gRPC's sending thread go
        self._call.cancel()

    def received(self, response: StreamResultResponse) -> bool:
        """A message has come; whether to read on."""
        reader = self._told()
        return reader is not None and reader.received(self._place, response)

    def ended(self, failure: grpc.RpcError | HeadraceError | None) -> None:
        """The call has ended."""
        self._link.ended(self._call)
        if isinstance(failure, grpc.RpcError):
            failure = error_from_stream(failure, target=self._link.target)
        if (reader := self._told()) is not None:
            reader.lost(self._place, failure)


def _read(call: Any, wire: weakref.ref[Wire]) -> None:
    """Reads a call to its end, or until its wire is gone."""
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
    """A session's only stream; see `headrace.session.Streams`."""

    def __init__(self, link: Link, **options: Unpack[SessionOptions]) -> None:
        self.core = SessionCore(**options)
        self.lock = threading.Lock()
        self._later = Later()
        self._wire = Wire(link, self.core, self)
        self._wire.start()

    def flush(self) -> None:
        """Sends what the core wants sent."""
        self._wire.flush()

    def finish(self, timeout: float | None) -> None:
        """Waits for the stream's end."""
        self._wire.finish(timeout)

    def drop(self) -> None:
        """Ends the stream, of which nobody wants to know any more."""
        self._later.close()
        self._wire.drop()

    def received(self, _place: Any, response: StreamResultResponse) -> bool:
        """See `Reader`."""
        with self.lock:
            changed = self.core.receive(response)
            self.flush()
            for delay, record in self.core.retries:
                self._later.add(delay, partial(self._again, record))
            self.core.retries.clear()
            wake(changed)
            return not self.core.ended

    def lost(self, _place: Any, error: HeadraceError | None) -> None:
        """See `Reader`."""
        with self.lock:
            if not self.core.ended:
                wake(self.core.end(error))
            self._later.close()
            self.flush()  # lets gRPC's sending thread go

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        """Does something after so many seconds."""
        self._later.add(seconds, act)

    def _again(self, record: Record) -> None:
        with self.lock:
            changed = self.core.again(record)
            self.flush()
            wake(changed)


class Later:
    """What is to be done later, in one thread for all of it."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._changed = threading.Condition()
        self._serial = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, delay: float, act: Callable[[], object]) -> None:
        """Do this in so many seconds."""
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
        """Do no more."""
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
