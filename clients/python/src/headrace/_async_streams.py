"""The streams of asyncio sessions: their send queues and reader tasks.

An `AsyncWire` is one StreamResult call. A session with a single server needs only an
`AsyncOneStream`.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Protocol, Unpack

import grpc
from grpc import aio

from headrace._async_link import is_for_task
from headrace._session import Record, SessionCore, SessionOptions, wake
from headrace._trace import with_trace
from headrace.errors import HeadraceError, UnavailableError, error_from_stream
from headrace.v1.generation_service_pb2 import (
    GetResultRequest,
    StreamResultRequest,
    StreamResultResponse,
)

_log = logging.getLogger("headrace")
_REFUSAL_S = 5.0
_NO_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
"""What GetResult without an id may end with where its caller is served."""


class AsyncReader(Protocol):
    """Receives what an `AsyncWire` reads. `place` is the value that the wire was created with."""

    def received(self, place: Any, response: StreamResultResponse) -> bool:
        """Handles a received message. Returns whether to continue reading."""

    def lost(self, place: Any, error: HeadraceError | None) -> None:
        """Handles the end of the call. `error` is None if the call ended normally."""


class AsyncWire:
    """One call: commands are sent from a queue, and a task reads the responses.

    The task holds no strong reference to the wire or its reader.

    Args:
        link: the connection to the server.
        metadata: sent with the call.
        core: the source of the commands to send.
        reader: notified of messages and of the call's end.
        place: passed to the reader with each notification.
    """

    def __init__(
        self, link: Any, metadata: Any, core: SessionCore, reader: AsyncReader, place: Any = None
    ) -> None:
        self._core = core
        self._target = link.target
        self._told = weakref.ref(reader)
        self._place = place
        self._outgoing: asyncio.Queue[StreamResultRequest | None] = asyncio.Queue()
        self._half_closed = False
        self._call: Any = link.generation.StreamResult(
            _commands(self._outgoing), metadata=with_trace(metadata)
        )
        self.flush()
        refusal = partial(_refusal, link.generation, metadata)
        self._task = asyncio.create_task(_read(self._call, weakref.ref(self), refusal))

    def flush(self) -> None:
        """Sends the core's pending commands."""
        if not self._half_closed:
            for command in self._core.outbox:
                self._outgoing.put_nowait(command)
            if self._core.has_said_all:
                self._half_closed = True
                self._outgoing.put_nowait(None)
        self._core.outbox.clear()

    async def finish(self, seconds: float | None) -> None:
        """Waits up to `seconds` for the call to end, then cancels it."""
        try:
            await asyncio.wait([self._task], timeout=seconds)
        finally:
            if self._call is not None:
                self._call.cancel()
            await asyncio.wait([self._task])

    def drop(self) -> None:
        """Abandons the call."""
        self._outgoing.put_nowait(None)
        if self._call is not None:
            self._call.cancel()

    def received(self, response: StreamResultResponse) -> bool:
        """Passes on a received message. Returns whether to continue reading."""
        reader = self._told()
        return reader is not None and reader.received(self._place, response)

    def ended(self, failure: aio.AioRpcError | HeadraceError | None) -> None:
        """Tells the reader that the call has ended, and releases the call."""
        if isinstance(failure, aio.AioRpcError):
            failure = error_from_stream(failure, target=self._target)
        if (reader := self._told()) is not None:
            reader.lost(self._place, failure)
        self._call = None  # gRPC keeps a closed channel's connection while a call is kept


async def _commands(
    outgoing: asyncio.Queue[StreamResultRequest | None],
) -> AsyncIterator[StreamResultRequest]:
    while (command := await outgoing.get()) is not None:
        yield command


async def _refusal(generation: Any, metadata: Any) -> aio.AioRpcError | None:
    """Asks why a session was refused, by a call that is refused for the same reasons.

    If a call ends while its first message is being written, gRPC's asyncio forgets the call's
    status and reports that it could not write.
    """
    try:
        await generation.GetResult(
            GetResultRequest(), timeout=_REFUSAL_S, metadata=with_trace(metadata)
        )
    except aio.AioRpcError as error:
        if error.code() not in _NO_REFUSALS:
            return error.with_traceback(None)
    return None


async def _read(
    call: Any,
    wire: weakref.ref[AsyncWire],
    refusal: Callable[[], Awaitable[aio.AioRpcError | None]],
) -> None:
    """Reads a call until it ends or its wire is gone."""
    error: aio.AioRpcError | HeadraceError | None = None
    is_new = True
    try:
        async for response in call:
            is_new = False
            if (there := wire()) is None or not there.received(response):
                call.cancel()
                return
            del there, response  # not kept while the next one is waited for
    except aio.AioRpcError as failure:
        # Its traceback has the call, and this frame, which has the error.
        error = failure.with_traceback(None)
        if is_new and failure.code() is grpc.StatusCode.INTERNAL:
            error = await refusal() or error
    except asyncio.CancelledError as cancelled:
        error = UnavailableError("the session was closed")
        if is_for_task(cancelled):
            raise
    except Exception as failure:  # of a callback: nobody may be left waiting for this task
        _log.exception("the session's reader failed")
        error = HeadraceError(f"the session's reader failed: {failure}")
    finally:
        if (there := wire()) is not None:
            there.ended(error)
        call.cancel()
        del call  # an error's traceback has this frame


class AsyncOneStream:
    """The stream of a session that has only one. Implements
    `headrace.async_session.AsyncStreams`.
    """

    def __init__(
        self,
        link: Callable[[], Any],
        metadata: Any,
        **options: Unpack[SessionOptions],
    ) -> None:
        """Initializes the stream. `link` returns the connection, and is called by `start`."""
        self.core = SessionCore(**options)
        self._link = link
        self._metadata = metadata
        self._wire: AsyncWire | None = None

    @property
    def is_open(self) -> bool:
        """Whether the stream was started."""
        return self._wire is not None

    def start(self) -> None:
        """Opens the stream."""
        self._wire = AsyncWire(self._link(), self._metadata, self.core, self)

    def flush(self) -> None:
        """Sends the core's pending commands."""
        if self._wire is not None:
            self._wire.flush()

    async def finish(self, seconds: float | None) -> None:
        """Waits up to `seconds` for the stream to end, then cancels it."""
        if self._wire is not None:
            await self._wire.finish(seconds)

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        """Calls `act` after `seconds`."""
        asyncio.get_running_loop().call_later(max(seconds, 0.0), act)

    def drop(self) -> None:
        """Abandons the stream."""
        if self._wire is not None:
            self._wire.drop()

    def received(self, _place: Any, response: StreamResultResponse) -> bool:
        """Processes a received message; implements `AsyncReader.received`."""
        changed = self.core.receive(response)
        self.flush()
        loop = asyncio.get_running_loop()
        for delay, record in self.core.retries:
            loop.call_later(delay, self._again, record)
        self.core.retries.clear()
        wake(changed)
        return not self.core.ended

    def _again(self, record: Record) -> None:
        changed = self.core.again(record)
        self.flush()
        wake(changed)

    def lost(self, _place: Any, error: HeadraceError | None) -> None:
        """Ends the session with its stream; implements `AsyncReader.lost`."""
        if not self.core.ended:
            wake(self.core.end(error))
        self.flush()
