"""Sessions for threads: many requests on one stream, or on one stream for each of several
servers.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol, Self, Unpack

from headrace import _forks
from headrace._deadline import Deadline
from headrace._fold import Fold
from headrace._session import Core, Record, fold_to_attach, wake
from headrace._trace import label_trace
from headrace.errors import DeadlineExceededError, HeadraceError
from headrace.messages import Prompt
from headrace.options import GenerationOptions, build_spec
from headrace.results import Accepted, Chunk, PromptInfo, Result, ServerLoad
from headrace.v1.generation_pb2 import GenerationSpec

CLOSE_SECONDS = 5.0
"""How long `close` waits for the servers to answer when it cancels requests."""


class Streams(Protocol):
    """The transport of a session: its bookkeeping, and the calls that carry it out."""

    @property
    def core(self) -> Core:
        """The session's bookkeeping. Use it with the lock held."""

    @property
    def lock(self) -> threading.Lock:
        """Held around every use of the core and its records."""

    def flush(self) -> None:
        """Sends the core's pending commands. The lock is held."""

    def finish(self, timeout: float | None) -> None:
        """Waits up to `timeout` seconds for all streams to end, then cancels the remaining ones."""

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        """Calls `act` after `seconds`."""

    def drop(self) -> None:
        """Abandons all streams. Takes no lock, because it is called during garbage collection."""


class Session:
    """A session: many requests on one stream, their results interleaved. Created by
    `Client.session`.

    All methods are thread-safe. Leaving the `with` block waits for the requests that are still
    running; leaving it with an exception cancels them.

        with client.session() as session:
            handles = [session.submit(prompt, max_tokens=32) for prompt in prompts]
            for handle in handles:
                print(handle.result().text)
    """

    def __init__(self, streams: Streams, timeout: float | None = None) -> None:
        """Called by `Client.session`."""
        self._timeout = timeout
        self._armed = math.inf  # when the next look at what is over comes
        self._generation = _forks.generation()
        self._streams = streams
        self._core = streams.core
        self._own_lock = streams.lock
        weakref.finalize(self, _drop, streams, self._generation).atexit = False

    @property
    def _lock(self) -> threading.Lock:
        """The session's lock.

        Raises:
            FailedPreconditionError: another process opened the session.
        """
        _forks.check(self._generation, "session")
        return self._own_lock

    def submit(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> RequestHandle:
        """Starts a request and returns immediately.

        If the server refuses the request, the handle raises the error, not this method. If the
        server has no room, the request is sent again when there may be room (see `room_timeout`).

        Args:
            prompt: text, token ids or a conversation.
            timeout: the time limit of the request in seconds, from now. When it passes, the request
                is cancelled and its handle raises DeadlineExceededError. None for the client's
                default.
            options: see `GenerationOptions`.

        Raises:
            InvalidArgumentError: a value cannot be sent at all.
            AlreadyExistsError: a live request of this session has this `request_id`.
            UnavailableError: the session has ended or is being closed.
        """
        return self._submit(build_spec(prompt, options), timeout=timeout)

    def attach(self, request_id: str, *, from_seq: int = 1, n: int | None = None) -> RequestHandle:
        """Continues a request of an earlier session, or of `Client.add_request`, on this one.

        Args:
            request_id: the request's id.
            from_seq: the number of the first event to read.
            n: the request's number of choices; needed if `from_seq` is above 1, because only the
                first event contains it.

        Raises:
            InvalidArgumentError: `n` is needed.
            AlreadyExistsError: a live request of this session has this `request_id`.
            UnavailableError: the session has ended or is being closed.
        """
        return self._attach(fold_to_attach(request_id, from_seq=from_seq, n=n))

    def resume(self, handle: RequestHandle) -> RequestHandle:
        """Continues a request whose session was lost, where its handle left off.

        The new handle has all output from the beginning. This works until the lost session's lease
        ends. If the request's end had already arrived, the new handle has ended in the same way.

        Raises:
            AlreadyExistsError: the request is live on this session.
            UnavailableError: the session has ended or is being closed.
        """
        return self._attach(handle._record.fold.reopened())

    @property
    def live(self) -> int:
        """The number of requests that have not ended."""
        with self._lock:
            return len(self._core.records)

    @property
    def lease(self) -> float | None:
        """The granted lease in seconds; with several servers, the shortest.

        None if none was requested or the server has not answered yet.
        """
        with self._lock:
            return self._core.lease

    @property
    def load(self) -> ServerLoad | None:
        """The load that the server reported last. With several servers, the totals and the usage of
        the fullest cache. None before the first report, or if `load_interval` was not given.
        """
        with self._lock:
            return self._core.load

    def close(self, *, cancel: bool = False) -> None:
        """Ends the session: accepts no more requests, and returns when the live ones have ended.

        The live requests need no reader for that, even with credits. They can still be cancelled
        meanwhile.

        Args:
            cancel: whether to cancel the live requests instead of waiting for them.
        """
        if self._generation != _forks.generation():  # it is its own process' to close
            return
        with self._lock:
            self._core.close(cancel=cancel)
            self._flush()
        self._streams.finish(CLOSE_SECONDS if cancel else None)

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
        self,
        spec: GenerationSpec,
        on_done: Callable[[RequestHandle], None] | None = None,
        timeout: float | None = None,
    ) -> RequestHandle:
        label_trace(spec)
        timeout = self._timeout if timeout is None else timeout
        Deadline(timeout)  # which checks it
        with self._lock:
            record = self._core.add(spec)
            handle = self._handle(record, on_done)
            if timeout is not None:
                record.timeout, record.due = timeout, time.monotonic() + timeout
                self._arm(record.due)
            return handle

    def _arm(self, due: float) -> None:
        """Schedules the check for requests whose time has run out. The lock is held."""
        if due < self._armed:
            self._armed = due
            expire = weakref.WeakMethod(self._expire)
            self._streams.later(due - time.monotonic(), lambda: (there := expire()) and there())

    def _expire(self) -> None:
        with self._lock:
            self._armed = math.inf
            changed = self._core.expire(time.monotonic())
            self._flush()
            wake(changed)
            self._arm(min((one.due for one in self._core.records.values()), default=math.inf))

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
        """Sends the core's pending commands. The lock is held."""
        self._streams.flush()


def _drop(streams: Streams, generation: int) -> None:
    if generation == _forks.generation():
        streams.drop()


class RequestHandle:
    """One request of a session. Iterate over it for its chunks. Several threads may wait for it.

    handle = session.submit("Once upon a time")
    for chunk in handle:
        print(chunk.text, end="")
    result = handle.result()
    """

    def __init__(self, session: Session, record: Record) -> None:
        self._session = session
        self._record = record
        self._condition = threading.Condition(session._lock)
        record.wake = self._condition.notify_all

    @property
    def _changed(self) -> threading.Condition:
        """The condition that is notified when the request has changed.

        Raises:
            FailedPreconditionError: another process opened the session.
        """
        _forks.check(self._session._generation, "session")
        return self._condition

    @property
    def request_id(self) -> str:
        """The request's id, set by you or generated by the client."""
        return self._record.request_id

    @property
    def next_seq(self) -> int:
        """The number of the next event, where `Session.attach` would continue."""
        return self._record.fold.next_seq

    @property
    def prompt(self) -> PromptInfo | None:
        """Information about the processed prompt; None before it was processed."""
        return self._record.fold.prompt

    @property
    def done(self) -> bool:
        """Whether the request has ended, successfully or not."""
        return self._record.fold.done

    def __iter__(self) -> Iterator[Chunk]:
        """Yields all chunks from the first, as they arrive. Can be iterated more than once.

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
        """Waits for the end and returns the complete result, which a cancelled request has as well.

        Args:
            timeout: the maximum number of seconds to wait; the request continues afterwards.

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
        """Waits until the server has accepted the request. Returns the effective parameters.

        Args:
            timeout: the maximum number of seconds to wait.

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
        """Asks the server to end the request, which then ends with CANCELLED and the output so
        far.
        """
        with self._session._lock:
            self._session._core.cancel(self._record)
            self._session._flush()
