"""Many requests on one stream, from ordinary threads."""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Self, Unpack

import grpc

from headrace._calls import open_call
from headrace._channel import ChannelSettings
from headrace._fold import Fold
from headrace._session import Record, SessionCore, fold_to_attach
from headrace.errors import DeadlineExceededError, HeadraceError, error_from_rpc
from headrace.messages import Prompt
from headrace.options import GenerationOptions, build_spec
from headrace.results import Accepted, Chunk, Result, ServerLoad
from headrace.v1.generation_pb2 import GenerationSpec
from headrace.v1.generation_service_pb2 import StreamResultRequest
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

_CLOSE_SECONDS = 5.0  # how long close() waits for the server to answer cancels

_log = logging.getLogger("headrace")


class Session:
    """A session: many requests on one stream, their results interleaved. Made by `Client.session`.

    All methods may be called from any thread. Leaving the `with` block waits for the requests that
    are still running; leaving it by an exception cancels them.

        with client.session() as session:
            handles = [session.submit(prompt, max_tokens=32) for prompt in prompts]
            for handle in handles:
                print(handle.result().text)
    """

    def __init__(
        self,
        stub: GenerationServiceStub,
        settings: ChannelSettings,
        *,
        lease: float | timedelta | None = None,
        initial_credit: int = 0,
        room_timeout: float | None = None,
        load_interval: float | timedelta | None = None,
    ) -> None:
        self._core = SessionCore(
            lease=lease,
            initial_credit=initial_credit,
            room_timeout=room_timeout,
            load_interval=load_interval,
        )
        self._target = settings.target
        self._lock = threading.Lock()
        self._outgoing: queue.SimpleQueue[StreamResultRequest | None] = queue.SimpleQueue()
        self._half_closed = False
        self._later = _Later(self._again)
        commands = iter(self._outgoing.get, None)  # None ends it
        self._call = open_call(stub.StreamResult, commands, settings.metadata)
        self._flush()
        self._reader = threading.Thread(target=self._read, name="headrace-session", daemon=True)
        self._reader.start()

    def submit(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> RequestHandle:
        """Starts a request and returns at once.

        Refusals by the server are raised by the handle, not here. A request for which the server
        has no room is sent again when it may have some (see `room_timeout`).

        Raises:
            InvalidArgumentError: a value cannot be sent at all.
            AlreadyExistsError: a live request of this session has that `request_id`.
            UnavailableError: the session has ended, or is being closed.
        """
        return self._submit(build_spec(prompt, options))

    def attach(self, request_id: str, *, from_seq: int = 1, n: int | None = None) -> RequestHandle:
        """Continues a request of an earlier session, or of `Client.add_request`, on this one.

        Args:
            request_id: the request.
            from_seq: the number of the first event wanted; the handle has only what follows.
            n: how many choices the request has; needed if `from_seq` is above 1, since the first
                event has it.

        Raises:
            InvalidArgumentError: `n` is needed.
            AlreadyExistsError: a live request of this session has that `request_id`.
            UnavailableError: the session has ended, or is being closed.
        """
        return self._attach(fold_to_attach(request_id, from_seq=from_seq, n=n))

    def resume(self, handle: RequestHandle) -> RequestHandle:
        """Continues a request whose session was lost, where its handle left off.

        The new handle has all output from the beginning. This works until the lost session's lease
        ends. If the request's end had arrived, the new handle has the same end at once.

        Raises:
            AlreadyExistsError: the request is live on this session.
            UnavailableError: the session has ended, or is being closed.
        """
        return self._attach(handle._record.fold.reopened())

    @property
    def live(self) -> int:
        """How many requests have not ended."""
        with self._lock:
            return len(self._core.records)

    @property
    def lease(self) -> float | None:
        """The lease that the server granted, in seconds; None until it answered, or if none was
        asked for.
        """
        with self._lock:
            opened = self._core.opened
        return None if opened is None else opened.lease.seconds + opened.lease.nanos / 1e9

    @property
    def load(self) -> ServerLoad | None:
        """The server's load, as it was told last; None before that, or if `load_interval` was not
        given.
        """
        with self._lock:
            return self._core.load

    def close(self, *, cancel: bool = False) -> None:
        """Ends the session: accepts no more requests, and returns when the live ones have ended.

        They need no reader for that, even with credits; they may still be cancelled meanwhile.

        Args:
            cancel: whether to cancel the live requests instead of waiting for them.
        """
        with self._lock:
            self._core.close(cancel=cancel)
            self._flush()
        try:
            self._reader.join(_CLOSE_SECONDS if cancel else None)
        finally:
            if self._reader.is_alive():
                self._call.cancel()
                self._reader.join(_CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(cancel=kind is not None)

    def _submit(
        self, spec: GenerationSpec, on_done: Callable[[RequestHandle], None] | None = None
    ) -> RequestHandle:
        with self._lock:
            return self._handle(self._core.add(spec), on_done)

    def _attach(self, fold: Fold) -> RequestHandle:
        with self._lock:
            return self._handle(self._core.attach(fold), None)

    def _handle(
        self, record: Record, on_done: Callable[[RequestHandle], None] | None
    ) -> RequestHandle:
        handle = RequestHandle(self, record)
        if on_done is not None:
            record.on_done = lambda: on_done(handle)
        self._flush()
        return handle

    def _flush(self) -> None:
        """Sends what the core wants sent; the lock is held, or nobody else is there yet."""
        if not self._half_closed:
            for command in self._core.outbox:
                self._outgoing.put(command)
            if self._core.has_said_all:
                self._half_closed = True
                self._outgoing.put(None)
        self._core.outbox.clear()

    def _schedule(self) -> None:
        """Sends refused requests again when it is time; the lock is held."""
        for delay, record in self._core.retries:
            self._later.add(delay, record)
        self._core.retries.clear()

    def _again(self, record: Record) -> None:
        with self._lock:
            changed = self._core.again(record)
            self._flush()
            _wake(changed)

    def _read(self) -> None:
        error: HeadraceError | None = None
        try:
            for response in self._call:
                with self._lock:
                    changed = self._core.receive(response)
                    self._flush()
                    self._schedule()
                    _wake(changed)
                    if self._core.ended:
                        self._call.cancel()
                        return
        except grpc.RpcError as failure:
            error = error_from_rpc(failure, target=self._target)
        except Exception as failure:  # of a callback: nobody may be left waiting for this thread
            _log.exception("the session's reader failed")
            error = HeadraceError(f"the session's reader failed: {failure}")
            self._call.cancel()
        finally:
            with self._lock:
                if not self._core.ended:
                    _wake(self._core.end(error))
                self._later.close()
                self._flush()  # lets gRPC's sending thread go


class _Later:
    """Requests that are to be sent again, in one thread for all of them."""

    def __init__(self, again: Callable[[Record], None]) -> None:
        self._again = again
        self._due: list[tuple[float, int, Record]] = []
        self._changed = threading.Condition()
        self._serial = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, delay: float, record: Record) -> None:
        """Send one again in so many seconds."""
        with self._changed:
            due = time.monotonic() + delay
            heapq.heappush(self._due, (due, next(self._serial), record))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="headrace-retries", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Send no more."""
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
                _, _, record = heapq.heappop(self._due)
            self._again(record)


def _wake(records: list[Record]) -> None:
    for record in records:
        record.wake()
        if record.fold.done and record.on_done is not None:
            record.on_done()


class RequestHandle:
    """One request of a session. Iterating gives its chunks; several threads may wait for it.

    handle = session.submit("Once upon a time")
    for chunk in handle:
        print(chunk.text, end="")
    result = handle.result()
    """

    def __init__(self, session: Session, record: Record) -> None:
        self._session = session
        self._record = record
        self._changed = threading.Condition(session._lock)
        record.wake = self._changed.notify_all

    @property
    def request_id(self) -> str:
        """The request's id, set by you or made by the client."""
        return self._record.request_id

    @property
    def next_seq(self) -> int:
        """The number of the event that comes next: where `Session.attach` would continue."""
        return self._record.fold.next_seq

    @property
    def done(self) -> bool:
        """Whether the request has ended, successfully or not."""
        return self._record.fold.done

    def __iter__(self) -> Iterator[Chunk]:
        """All chunks from the first on, as they come; may be iterated more than once.

        Raises:
            HeadraceError: the request was refused, failed, or its session was lost.
        """
        record, position = self._record, 0
        while True:
            with self._changed:
                while position >= len(record.fold.chunks) and not record.fold.done:
                    self._changed.wait()
                if position >= len(record.fold.chunks):
                    break
                chunk = record.fold.chunks[position]
                position += 1
                self._session._core.pay(record, position)
                self._session._flush()
            yield chunk
        if record.fold.error is not None:
            raise record.fold.error

    def result(self, timeout: float | None = None) -> Result:
        """Waits for the end and returns the whole result. A cancelled request has one too.

        Args:
            timeout: most seconds to wait; the request goes on afterwards.

        Raises:
            DeadlineExceededError: `timeout` passed first.
            HeadraceError: the request was refused, failed, or its session was lost.
        """
        with self._changed:
            self._session._core.pay_all(self._record)
            self._session._flush()
            if not self._changed.wait_for(lambda: self._record.fold.done, timeout):
                raise DeadlineExceededError(
                    f"request {self.request_id} has not ended within {timeout} s",
                    request_id=self.request_id,
                )
        return self._record.fold.result()

    def accepted(self, timeout: float | None = None) -> Accepted:
        """Waits until the server has accepted the request; returns the effective parameters.

        Args:
            timeout: most seconds to wait.

        Raises:
            DeadlineExceededError: `timeout` passed first.
            HeadraceError: the request was refused, or its session was lost.
        """
        fold = self._record.fold
        with self._changed:
            if not self._changed.wait_for(lambda: fold.accepted or fold.done, timeout):
                raise DeadlineExceededError(
                    f"request {self.request_id} was not accepted within {timeout} s",
                    request_id=self.request_id,
                )
        if fold.accepted is None:
            raise fold.error or HeadraceError("the request was attached after its acceptance")
        return fold.accepted

    def cancel(self) -> None:
        """Asks the server to end the request; it then ends with CANCELLED and the output so far."""
        with self._session._lock:
            self._session._core.cancel(self._record)
            self._session._flush()
