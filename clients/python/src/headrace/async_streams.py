"""One request with streamed output, under asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Protocol, Self

import grpc

from headrace import _forks
from headrace._async_link import is_for_task
from headrace._calls import next_poll
from headrace._deadline import Deadline, timed_out
from headrace._fold import Fold
from headrace.errors import (
    CallCancelledError,
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


class AsyncEventSource(Protocol):
    """The source of a stream's events, message by message."""

    async def read(self) -> Iterable[ResultEvent] | None:
        """The next message's events; None: there are no more."""

    def cancel(self) -> None:
        """Ends it; does nothing if it has ended."""


class AsyncCallEvents:
    """The events of a server-streaming call."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def read(self) -> Iterable[ResultEvent] | None:
        if self._call is None:
            return None
        message = await self._call.read()
        return None if message is grpc.aio.EOF else message.events

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None  # gRPC keeps a closed channel's connection while a call is kept


class AsyncPolledEvents:
    """The events of a request that runs without a stream, read by repeated `GetResult` calls."""

    def __init__(
        self,
        fetch: Callable[[GetResultRequest, float | None], Awaitable[GetResultResponse]],
        fold: Fold,
        deadline: Deadline,
        read_timeout: float | None,
    ) -> None:
        self._fetch = fetch
        self._fold = fold
        self._deadline = deadline
        self._read_timeout = read_timeout
        self._done = False

    async def read(self) -> Iterable[ResultEvent] | None:
        pause = Deadline(self._read_timeout)
        while not self._done:
            response = await self._fetch(*next_poll(self._fold, self._deadline, pause))
            self._done = response.done
            if response.events:
                return response.events
        self._fold.end()
        return None

    def cancel(self) -> None:
        self._done = True


class AsyncStream:
    """The output of one request, as it comes. Made by `AsyncClient.stream` and
    `AsyncClient.attach`.

    The request starts when the `async with` block is entered, or with the first chunk. Leaving the
    block before the end cancels it (a stream of `AsyncClient.attach` only stops reading). Use the
    block: asyncio does not notify a stream when `break` leaves its loop.

        async with client.stream("Once upon a time", max_tokens=64) as stream:
            async for chunk in stream:
                print(chunk.text, end="", flush=True)
        result = await stream.result()
    """

    def __init__(
        self,
        source: Callable[[], AsyncEventSource],
        fold: Fold,
        *,
        cancel: Callable[[str], Awaitable[Any]],
        target: Peer,
        read_timeout: float | None = None,
    ) -> None:
        self._source = source
        self._fold = fold
        self._cancel = cancel
        self._target = target
        self._read_timeout = read_timeout
        self._events: AsyncEventSource | None = None
        self._generation = 0
        """The process that opened it."""
        self._position = 0
        self._closed = False

    @property
    def request_id(self) -> str:
        """The request's id, set by you or made by the client."""
        return self._fold.request_id

    @property
    def accepted(self) -> Accepted | None:
        """The request's `Accepted` event; None before the first chunk."""
        return self._fold.accepted

    @property
    def prompt(self) -> PromptInfo | None:
        """What is known of the prompt since it was processed; None before the first chunk."""
        return self._fold.prompt

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        """The next piece of output.

        Raises:
            StopAsyncIteration: the request has ended.
            HeadraceError: the request was refused, failed, or the connection was lost.
        """
        while self._position >= len(self._fold.chunks):
            if self._closed or not await self._read():
                if self._fold.error is not None:
                    raise self._fold.error
                raise StopAsyncIteration
        self._position += 1
        return self._fold.chunks[self._position - 1]

    async def result(self) -> Result:
        """Reads to the end, if necessary, and returns the whole result.

        After `close` it is the output that had arrived until then, with the reason UNKNOWN if the
        end had not arrived.

        Raises:
            HeadraceError: the request was refused, failed, or the connection was lost.
        """
        while not self._closed and await self._read():
            pass
        return self._fold.result()

    async def cancel(self) -> None:
        """Asks the server to end the request; the stream then ends with CANCELLED and the output so
        far.

        Raises:
            HeadraceError: the server cannot be reached.
        """
        if not self._fold.done:
            await self._cancel(self._fold.request_id)

    def close(self) -> None:
        """Stops reading; cancels the request if it has not ended."""
        self._closed = True
        if self._events is not None and self._generation == _forks.generation():
            self._events.cancel()

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The last resort for a loop that was left without the block: gRPC would let the server
        # go on.
        events, closed = getattr(self, "_events", None), getattr(self, "_closed", True)
        is_own = getattr(self, "_generation", 0) == _forks.generation()
        if events is not None and is_own and not closed and not self._has_ended():
            with contextlib.suppress(RuntimeError):  # the loop is gone, and the call with it
                events.cancel()

    def _start(self) -> AsyncEventSource:
        if self._events is None:
            self._generation = _forks.generation()
            self._events = self._source()
        _forks.check(self._generation, "stream")
        return self._events

    def _has_ended(self) -> bool:
        return self._fold.done

    async def _read(self) -> bool:
        """Processes the next message; False: there is none."""
        if self._has_ended():
            return False
        if self._read_timeout is None:
            return await self._read_message()
        try:
            async with asyncio.timeout(self._read_timeout):
                return await self._read_message()
        except TimeoutError:
            self._fold.fail(timed_out(self._read_timeout, self.request_id))
            return False

    async def _read_message(self) -> bool:
        try:
            events = await self._start().read()
        except grpc.RpcError as failure:
            made = error_from_rpc if self._closed else error_from_stream
            error = made(failure, target=self._target, request_id=self.request_id)
            self._fold.fail(error)
            return False
        except asyncio.CancelledError as cancelled:
            if is_for_task(cancelled):
                self.close()
                raise
            closed = CallCancelledError("the stream was closed")
            self._fold.fail(closed if self._closed else UnavailableError("the client was closed"))
            return False
        except HeadraceError as error:  # of a source that makes unary calls
            self._fold.fail(error)
            return False
        if events is None:
            if not self._fold.done:
                self._fold.fail(UnavailableError("the server ended the stream before the request"))
            return False
        for event in events:
            self._fold.add(event)
        if self._has_ended():
            await self._finish()
        return True

    async def _finish(self) -> None:
        """Lets the call end normally, so that the server does not count it as lost."""
        events = self._start()
        try:
            if not isinstance(self._fold.error, ProtocolError):
                await events.read()
        except (grpc.RpcError, HeadraceError):
            pass  # the status of a failure that its last event has told already
        except asyncio.CancelledError as cancelled:
            if is_for_task(cancelled):
                raise
        finally:
            events.cancel()
