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
from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import grpc

from headrace._calls import open_call
from headrace._session import Record, SessionCore, SessionOptions
from headrace.errors import HeadraceError, error_from_rpc
from headrace.session import CLOSE_SECONDS
from headrace.v1.generation_service_pb2 import StreamResultRequest, StreamResultResponse
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

_log = logging.getLogger("headrace")


class Wire:
    """One call: commands go out from a queue, a thread reads what comes in.

    Args:
        stub: of the server.
        metadata: sent with the call.
        target: the server, for messages.
        core: whose commands are sent.
        received: called with each message, in the reading thread; returns whether to read on.
        lost: called once, there, with the reason of the call's end; None: in order.

    Raises:
        UnavailableError: the client is closed.
    """

    def __init__(
        self,
        stub: GenerationServiceStub,
        metadata: Any,
        target: str,
        core: SessionCore,
        received: Callable[[StreamResultResponse], bool],
        lost: Callable[[HeadraceError | None], None],
    ) -> None:
        self._core = core
        self._target = target
        self._received = received
        self._lost = lost
        self._outgoing: queue.SimpleQueue[StreamResultRequest | None] = queue.SimpleQueue()
        self._half_closed = False
        commands = iter(self._outgoing.get, None)  # None ends it
        self._call = open_call(stub.StreamResult, commands, metadata)
        self._reader = threading.Thread(target=self._read, name="headrace-session", daemon=True)

    def start(self) -> None:
        """Begins to read; what the core wants sent goes out first."""
        self.flush()
        self._reader.start()

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
            self._reader.join(timeout)
        finally:
            if self._reader.is_alive():
                self._call.cancel()
                self._reader.join(CLOSE_SECONDS)

    def _read(self) -> None:
        error: HeadraceError | None = None
        try:
            for response in self._call:
                if not self._received(response):
                    self._call.cancel()
                    return
        except grpc.RpcError as failure:
            error = error_from_rpc(failure, target=self._target)
        except Exception as failure:  # of a callback: nobody may be left waiting for this thread
            _log.exception("the session's reader failed")
            error = HeadraceError(f"the session's reader failed: {failure}")
            self._call.cancel()
        finally:
            self._lost(error)


class OneStream:
    """A session's only stream; see `headrace.session.Streams`."""

    def __init__(
        self,
        stub: GenerationServiceStub,
        metadata: Any,
        target: str,
        **options: Unpack[SessionOptions],
    ) -> None:
        self.core = SessionCore(**options)
        self.lock = threading.Lock()
        self._later = Later()
        self._wire = Wire(stub, metadata, target, self.core, self._received, self._lost)
        self._wire.start()

    def flush(self) -> None:
        """Sends what the core wants sent."""
        self._wire.flush()

    def finish(self, timeout: float | None) -> None:
        """Waits for the stream's end."""
        self._wire.finish(timeout)

    def _received(self, response: StreamResultResponse) -> bool:
        with self.lock:
            changed = self.core.receive(response)
            self.flush()
            for delay, record in self.core.retries:
                self._later.add(delay, partial(self._again, record))
            self.core.retries.clear()
            wake(changed)
            return not self.core.ended

    def _again(self, record: Record) -> None:
        with self.lock:
            changed = self.core.again(record)
            self.flush()
            wake(changed)

    def _lost(self, error: HeadraceError | None) -> None:
        with self.lock:
            if not self.core.ended:
                wake(self.core.end(error))
            self._later.close()
            self.flush()  # lets gRPC's sending thread go


class Later:
    """What is to be done later, in one thread for all of it."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._changed = threading.Condition()
        self._serial = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, delay: float, act: Callable[[], None]) -> None:
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


def wake(records: list[Record]) -> None:
    """Wakes the readers of what changed; the lock is held."""
    for record in records:
        record.wake()
        if record.fold.done and record.on_done is not None:
            record.on_done()
