"""One request with streamed output, for threads."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Protocol, Self

import grpc

from headrace import _forks
from headrace._calls import next_poll
from headrace._deadline import Deadline, timed_out
from headrace._fold import Fold
from headrace._link import Link
from headrace._streams import Later
from headrace.errors import (
    HeadraceError,
    Peer,
    ProtocolError,
    UnavailableError,
    error_from_rpc,
    error_from_stream,
)
from headrace.results import Accepted, Chunk, PromptInfo, Result
from headrace.v1.generation_pb2 import ResultEvent
from headrace.v1.generation_service_pb2 import GetResultRequest, GetResultResponse


class EventSource(Protocol):
    """The source of a stream's events, message by message."""

    def __iter__(self) -> Self: ...

    def __next__(self) -> Iterable[ResultEvent]: ...

    def cancel(self) -> None:
        """Cancels the call. Does nothing if it has ended."""


class CallEvents:
    """The events of a server-streaming call."""

    def __init__(self, link: Link, method: Any, request: Any, timeout: float | None) -> None:
        self._link = link
        self._call = link.open(method, request, timeout)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Iterable[ResultEvent]:
        try:
            events: Iterable[ResultEvent] = next(self._call).events
        except (StopIteration, grpc.RpcError):
            self._link.ended(self._call)
            raise
        return events

    def cancel(self) -> None:
        self._call.cancel()
        self._link.ended(self._call)


class PolledEvents:
    """The events of a request that runs without a stream, read by repeated `GetResult` calls."""

    def __init__(
        self,
        fetch: Callable[[GetResultRequest, float | None], GetResultResponse],
        fold: Fold,
        deadline: Deadline,
        read_timeout: float | None,
    ) -> None:
        self._fetch = fetch
        self._fold = fold
        self._deadline = deadline
        self._read_timeout = read_timeout
        self._done = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Iterable[ResultEvent]:
        pause = Deadline(self._read_timeout)
        while not self._done:
            response = self._fetch(*next_poll(self._fold, self._deadline, pause))
            self._done = response.done
            if response.events:
                return response.events
        self._fold.end()
        raise StopIteration

    def cancel(self) -> None:
        self._done = True


class ReadWatch:
    """Cancels a call whose next message does not arrive in time.

    Read each message within the block. The timer thread starts with the first read.

    Args:
        seconds: the time limit of a read.
        cancel: cancels the call.
    """

    def __init__(self, seconds: float, cancel: Callable[[], None]) -> None:
        self.seconds = seconds
        self.has_fired = False
        self._cancel = cancel
        self._due: float | None = None
        self._is_armed = False
        self._lock = threading.Lock()
        self._later = Later()
        weakref.finalize(self, _end_later, self._later, _forks.generation()).atexit = False

    def __enter__(self) -> None:
        with self._lock:
            self._due = time.monotonic() + self.seconds
            if not self._is_armed:
                self._arm(self.seconds)

    def __exit__(self, *_: object) -> None:
        self._due = None

    def _arm(self, seconds: float) -> None:
        self._is_armed = True
        look = weakref.WeakMethod(self._look)
        self._later.add(seconds, lambda: (there := look()) and there())

    def _look(self) -> None:
        with self._lock:
            self._is_armed = False
            if self._due is None:
                return
            left = self._due - time.monotonic()
            if left > 0:
                self._arm(left)
                return
            self.has_fired = True
        self._cancel()


def _end_later(later: Later, generation: int) -> None:
    if generation == _forks.generation():
        later.close()


class Stream:
    """The output of one request, as it arrives. Created by `Client.stream` and `Client.attach`.

    The request starts when the `with` block is entered, or with the first chunk. Leaving the block
    before the end cancels it (a stream of `Client.attach` only stops reading).

        with client.stream("Once upon a time", max_tokens=64) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        result = stream.result()
    """

    def __init__(
        self,
        source: Callable[[], EventSource],
        fold: Fold,
        *,
        cancel: Callable[[str], Any],
        target: Peer,
        read_timeout: float | None = None,
    ) -> None:
        self._source = source
        self._fold = fold
        self._cancel = cancel
        self._target = target
        self._read_timeout = read_timeout
        self._watch: ReadWatch | AbstractContextManager[None] = nullcontext()
        self._events: EventSource | None = None
        self._generation = 0
        """The fork generation of the process that opened it."""
        self._position = 0
        self._closed = False

    @property
    def request_id(self) -> str:
        """The request's id, set by you or generated by the client."""
        return self._fold.request_id

    @property
    def accepted(self) -> Accepted | None:
        """The request's `Accepted` event; None before the first chunk."""
        return self._fold.accepted

    @property
    def prompt(self) -> PromptInfo | None:
        """Information about the processed prompt; None before the first chunk."""
        return self._fold.prompt

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        """Returns the next chunk of output.

        Raises:
            StopIteration: the request has ended.
            HeadraceError: the request was refused, failed, or the connection was lost.
        """
        while self._position >= len(self._fold.chunks):
            if self._closed or not self._read():
                if self._fold.error is not None:
                    raise self._fold.error
                raise StopIteration
        self._position += 1
        return self._fold.chunks[self._position - 1]

    def result(self) -> Result:
        """Reads to the end, if necessary, and returns the complete result.

        After `close`, the result is the output that had arrived by then. If the end had not
        arrived, its finish reason is UNKNOWN.

        Raises:
            HeadraceError: the request was refused, failed, or the connection was lost.
        """
        while not self._closed and self._read():
            pass
        return self._fold.result()

    def cancel(self) -> None:
        """Asks the server to end the request, which then ends with CANCELLED and the output so far.

        Raises:
            HeadraceError: the server cannot be reached.
        """
        if not self._fold.done:
            self._cancel(self._fold.request_id)

    def close(self) -> None:
        """Stops reading, and cancels the request if it has not ended."""
        self._closed = True
        if self._events is not None and self._generation == _forks.generation():
            self._events.cancel()

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> EventSource:
        if self._events is None:
            self._generation = _forks.generation()
            self._events = self._source()
            if self._read_timeout is not None:
                self._watch = ReadWatch(self._read_timeout, self._events.cancel)
        _forks.check(self._generation, "stream")
        return self._events

    def _has_ended(self) -> bool:
        return self._fold.done

    def _timed_out(self) -> HeadraceError | None:
        """Returns the error for a message that did not arrive in time, or None if the cause is
        another.
        """
        if isinstance(self._watch, ReadWatch) and self._watch.has_fired:
            return timed_out(self._watch.seconds, self.request_id)
        return None

    def _read(self) -> bool:
        """Processes the next message. Returns False if there is none."""
        if self._has_ended():
            return False
        try:
            events = self._start()
            with self._watch:
                found = next(events)
            for event in found:
                self._fold.add(event)
        except StopIteration:
            if not self._fold.done:
                self._fold.fail(UnavailableError("the server ended the stream before the request"))
            return False
        except grpc.RpcError as failure:
            made = error_from_rpc if self._closed else error_from_stream
            error = made(failure, target=self._target, request_id=self.request_id)
            self._fold.fail(self._timed_out() or error)
            return False
        except HeadraceError as error:  # of a source that makes unary calls
            self._fold.fail(self._timed_out() or error)
            return False
        if self._has_ended():
            self._finish()
        return True

    def _finish(self) -> None:
        """Lets the call end normally, so that the server does not count it as lost."""
        events = self._start()
        if isinstance(self._fold.error, ProtocolError):
            events.cancel()
            return
        try:
            with self._watch:
                next(events, None)
        except (grpc.RpcError, HeadraceError):
            pass  # the status of a failure that its last event has told already
        else:
            events.cancel()
