"""Sessions for asyncio: many requests on one stream, or on one stream for each of several
servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, Unpack

from headrace import _forks
from headrace._deadline import Deadline
from headrace._fold import Fold
from headrace._session import Core, Record, fold_to_attach, wake
from headrace._trace import label_trace
from headrace.errors import HeadraceError, UnavailableError
from headrace.messages import Prompt
from headrace.options import GenerationOptions, build_spec
from headrace.results import Accepted, Chunk, PromptInfo, Result, ServerLoad
from headrace.v1.generation_pb2 import GenerationSpec

CLOSE_SECONDS = 5.0
"""How long `close` waits for the servers to answer when it cancels requests."""


class AsyncStreams(Protocol):
    """The transport of a session: its bookkeeping, and the calls that carry it out."""

    @property
    def core(self) -> Core:
        """The session's bookkeeping."""

    @property
    def is_open(self) -> bool:
        """Whether it was started."""

    def start(self) -> None:
        """Opens whatever must be open before the first request."""

    def flush(self) -> None:
        """Sends the core's pending commands."""

    async def finish(self, seconds: float | None) -> None:
        """Waits up to `seconds` for all streams to end, then cancels the remaining ones."""

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        """Calls `act` after `seconds`."""

    def drop(self) -> None:
        """Abandons all streams."""


class AsyncSession:
    """A session: many requests on one stream, their results interleaved. Created by
    `AsyncClient.session`.

    Enter it to open it. Leaving the block waits for the requests that are still running; leaving
    it with an exception cancels them.

        async with client.session() as session:
            results = await asyncio.gather(*(session.submit(prompt) for prompt in prompts))
    """

    def __init__(self, streams: AsyncStreams, timeout: float | None = None) -> None:
        """Called by `AsyncClient.session`."""
        self._timeout = timeout
        self._armed = math.inf  # when the next look at what is over comes
        self._generation = _forks.generation()
        self._streams = streams
        self._core = streams.core

    def submit(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncRequestHandle:
        """Starts a request and returns immediately. Await the handle for its result.

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
            UnavailableError: the session was not entered, has ended, or is being closed.
        """
        return self._submit(build_spec(prompt, options), timeout=timeout)

    def attach(
        self, request_id: str, *, from_seq: int = 1, n: int | None = None
    ) -> AsyncRequestHandle:
        """Continues a request of an earlier session, or of `AsyncClient.add_request`, on this one.

        Args:
            request_id: the request's id.
            from_seq: the number of the first event to read.
            n: the request's number of choices; needed if `from_seq` is above 1, because only the
                first event contains it.

        Raises:
            InvalidArgumentError: `n` is needed.
            AlreadyExistsError: a live request of this session has this `request_id`.
            UnavailableError: the session was not entered, has ended, or is being closed.
        """
        return self._attach(fold_to_attach(request_id, from_seq=from_seq, n=n))

    def resume(self, handle: AsyncRequestHandle) -> AsyncRequestHandle:
        """Continues a request whose session was lost, where its handle left off.

        The new handle has all output from the beginning. This works until the lost session's lease
        ends. If the request's end had already arrived, the new handle has ended in the same way.

        Raises:
            AlreadyExistsError: the request is live on this session.
            UnavailableError: the session was not entered, has ended, or is being closed.
        """
        return self._attach(handle._record.fold.reopened())

    @property
    def live(self) -> int:
        """The number of requests that have not ended."""
        return len(self._core.records)

    @property
    def lease(self) -> float | None:
        """The granted lease in seconds; with several servers, the shortest.

        None if none was requested or the server has not answered yet.
        """
        return self._core.lease

    @property
    def load(self) -> ServerLoad | None:
        """The load that the server reported last. With several servers, the totals and the usage of
        the fullest cache. None before the first report, or if `load_interval` was not given.
        """
        return self._core.load

    @property
    def ended(self) -> bool:
        """Whether it accepts no more requests, because its server ended it or could not be reached.

        A session of several servers continues with the others.
        """
        return self._core.ended

    async def close(self, *, cancel: bool = False) -> None:
        """Ends the session: accepts no more requests, and returns when the live ones have ended.

        The live requests need no reader for that, even with credits. They can still be cancelled
        meanwhile.

        Args:
            cancel: whether to cancel the live requests instead of waiting for them.
        """
        if not self._streams.is_open or self._generation != _forks.generation():
            return
        self._core.close(cancel=cancel)
        self._flush()
        await self._streams.finish(CLOSE_SECONDS if cancel else None)

    async def __aenter__(self) -> Self:
        if not self._streams.is_open:
            self._streams.start()
            loop = asyncio.get_running_loop()
            weakref.finalize(self, _drop, loop, self._streams, self._generation).atexit = False
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(cancel=kind is not None)

    def _submit(
        self,
        spec: GenerationSpec,
        on_done: Callable[[AsyncRequestHandle], None] | None = None,
        timeout: float | None = None,
    ) -> AsyncRequestHandle:
        self._check_entered()
        label_trace(spec)
        timeout = self._timeout if timeout is None else timeout
        Deadline(timeout)  # which checks it
        record = self._core.add(spec)
        handle = self._handle(record, on_done)
        if timeout is not None:
            record.timeout, record.due = timeout, time.monotonic() + timeout
            self._arm(record.due)
        return handle

    def _arm(self, due: float) -> None:
        """Schedules the check for requests whose time has run out."""
        if due < self._armed:
            self._armed = due
            expire = weakref.WeakMethod(self._expire)
            self._streams.later(due - time.monotonic(), lambda: (there := expire()) and there())

    def _expire(self) -> None:
        self._armed = math.inf
        changed = self._core.expire(time.monotonic())
        self._flush()
        wake(changed)
        self._arm(min((one.due for one in self._core.records.values()), default=math.inf))

    def _attach(self, fold: Fold) -> AsyncRequestHandle:
        self._check_entered()
        return self._handle(self._core.attach(fold), None)

    def _check_entered(self) -> None:
        _forks.check(self._generation, "session")
        if not self._streams.is_open:
            raise UnavailableError("the session is not open: use `async with client.session()`")

    def _handle(
        self, record: Record, on_done: Callable[[AsyncRequestHandle], None] | None
    ) -> AsyncRequestHandle:
        handle = AsyncRequestHandle(self, record)
        if on_done is not None:
            record.on_done = lambda: on_done(handle)
        self._flush()
        return handle

    def _flush(self) -> None:
        self._streams.flush()


def _drop(loop: asyncio.AbstractEventLoop, streams: AsyncStreams, generation: int) -> None:
    """Ends a session's streams, from whichever thread collects the session."""
    if generation == _forks.generation():
        with contextlib.suppress(RuntimeError):  # the loop is closed, and they have ended
            loop.call_soon_threadsafe(streams.drop)


class AsyncRequestHandle:
    """One request of a session. Await it for its result, or iterate over it for its chunks.

    handle = session.submit("Once upon a time")
    async for chunk in handle:
        print(chunk.text, end="")
    result = await handle
    """

    def __init__(self, session: AsyncSession, record: Record) -> None:
        self._session = session
        self._record = record
        self._waiting: set[asyncio.Future[None]] = set()
        record.wake = partial(_wake, self._waiting)  # which does not keep the handle

    @property
    def request_id(self) -> str:
        """The request's id, set by you or generated by the client."""
        return self._record.request_id

    @property
    def next_seq(self) -> int:
        """The number of the next event, where `AsyncSession.attach` would continue."""
        return self._record.fold.next_seq

    @property
    def prompt(self) -> PromptInfo | None:
        """Information about the processed prompt; None before it was processed."""
        return self._record.fold.prompt

    @property
    def done(self) -> bool:
        """Whether the request has ended, successfully or not."""
        return self._record.fold.done

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yields all chunks from the first, as they arrive. Can be iterated more than once.

        Raises:
            HeadraceError: the request was refused, failed, or its session was lost.
        """
        fold, position = self._record.fold, 0
        while True:
            while position >= len(fold.chunks) and not fold.done:
                await self._change()
            if position >= len(fold.chunks):
                break
            position += 1
            self._session._core.pay(self._record, position)
            self._session._flush()
            yield fold.chunks[position - 1]
        if fold.error is not None:
            raise fold.error

    def __await__(self) -> Generator[Any, None, Result]:
        return self.result().__await__()

    async def result(self) -> Result:
        """Waits for the end and returns the complete result, which a cancelled request has as well.

        If the waiting task is cancelled or times out (`asyncio.timeout`), the request continues.

        Raises:
            HeadraceError: the request was refused, failed, or its session was lost.
        """
        self._session._core.pay_all(self._record)
        self._session._flush()
        while not self._record.fold.done:
            await self._change()
        return self._record.fold.result()

    async def accepted(self) -> Accepted:
        """Waits until the server has accepted the request. Returns the effective parameters.

        Raises:
            HeadraceError: the request was refused, or its session was lost.
        """
        fold = self._record.fold
        while fold.accepted is None and not fold.done:
            await self._change()
        if fold.accepted is None:
            raise fold.error or HeadraceError("the request was attached after its acceptance")
        return fold.accepted

    def cancel(self) -> None:
        """Asks the server to end the request, which then ends with CANCELLED and the output so
        far.
        """
        self._session._core.cancel(self._record)
        self._session._flush()

    async def _change(self) -> None:
        _forks.check(self._session._generation, "session")
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:  # a waiter that gave up is nobody to wake
            self._waiting.discard(future)


def _wake(waiting: set[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)


async def feed(
    handle: AsyncRequestHandle,
    take: Callable[[Chunk], bool],
    room: Callable[[], Awaitable[object]],
) -> Result:
    """Passes a handle's chunks to `take` as soon as they arrive, and returns the result.

    For programs that forward output, where an iteration of the event loop is most of the cost of a
    token.

    Args:
        handle: the request.
        take: takes a chunk; returns whether it can take the next one immediately.
        room: waits until `take` has room again.

    Raises:
        HeadraceError: the request was refused, failed, or its session was lost.
    """
    record, session = handle._record, handle._session
    fold, told, position = record.fold, record.wake, 0
    _forks.check(session._generation, "session")
    stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def step() -> None:
        nonlocal position
        told()
        if stopped.done():
            return
        try:
            is_free = True
            while is_free and position < len(fold.chunks):
                position += 1
                is_free = take(fold.chunks[position - 1])
        except Exception as error:  # of `take`: this request's alone
            stopped.set_exception(error)
            return
        session._core.pay(record, position)
        session._flush()
        if fold.done or not is_free:
            stopped.set_result(None)

    record.wake = step
    try:
        while position < len(fold.chunks) or not fold.done:
            stopped = asyncio.get_running_loop().create_future()
            step()
            await stopped
            await room()
    finally:
        record.wake = told
    return fold.result()
