"""The calls of sessions under asyncio: their sending queues and reading tasks.

An `AsyncWire` is one StreamResult call. `AsyncOneStream` is all that a session with one server
needs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Unpack

import grpc
from grpc import aio

from headrace._async_link import is_for_task
from headrace._session import Record, SessionCore, SessionOptions
from headrace._trace import with_trace
from headrace.errors import HeadraceError, UnavailableError, error_from_rpc
from headrace.v1.generation_service_pb2 import StreamResultRequest, StreamResultResponse

# What grpc.aio says in place of a call's status, if it was writing when the call ended.
_UNKNOWN_END = (grpc.StatusCode.INTERNAL, "Internal error from Core")

_log = logging.getLogger("headrace")


class AsyncWire:
    """One call: commands go out from a queue, a task reads what comes in.

    Args:
        stub: of the server.
        metadata: sent with the call.
        target: the server, for messages.
        core: whose commands are sent.
        received: called with each message; returns whether to read on.
        lost: called once with the reason of the call's end; None: in order.
    """

    def __init__(
        self,
        stub: Any,
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
        self._outgoing: asyncio.Queue[StreamResultRequest | None] = asyncio.Queue()
        self._half_closed = False
        self._call: Any = stub.StreamResult(self._commands(), metadata=with_trace(metadata))
        self.flush()
        self._reader = asyncio.create_task(self._read())

    def flush(self) -> None:
        """Sends what the core wants sent."""
        if not self._half_closed:
            for command in self._core.outbox:
                self._outgoing.put_nowait(command)
            if self._core.has_said_all:
                self._half_closed = True
                self._outgoing.put_nowait(None)
        self._core.outbox.clear()

    async def finish(self, seconds: float | None) -> None:
        """Waits for the call's end, at most so many seconds, then cancels it."""
        try:
            await asyncio.wait([self._reader], timeout=seconds)
        finally:
            if self._call is not None:
                self._call.cancel()
            await asyncio.wait([self._reader])

    async def _commands(self) -> AsyncIterator[StreamResultRequest]:
        while (command := await self._outgoing.get()) is not None:
            yield command

    async def _read(self) -> None:
        error: HeadraceError | None = None
        try:
            async for response in self._call:
                if not self._received(response):
                    self._call.cancel()
                    return
        except aio.AioRpcError as failure:
            if (failure.code(), failure.details()) != _UNKNOWN_END:  # else as a session that ended
                error = error_from_rpc(failure, target=self._target)
        except asyncio.CancelledError as cancelled:
            error = UnavailableError("the session was closed")
            if is_for_task(cancelled):
                raise
        except Exception as failure:  # of a callback: nobody may be left waiting for this task
            _log.exception("the session's reader failed")
            error = HeadraceError(f"the session's reader failed: {failure}")
        finally:
            self._lost(error)
            self._call.cancel()
            self._call = None  # gRPC keeps a closed channel's connection while a call is kept


class AsyncOneStream:
    """A session's only stream; see `headrace.async_session.AsyncStreams`."""

    def __init__(
        self,
        link: Callable[[], Any],
        metadata: Any,
        **options: Unpack[SessionOptions],
    ) -> None:
        """`link`: the connection, opened when the session is entered."""
        self.core = SessionCore(**options)
        self._link = link
        self._metadata = metadata
        self._wire: AsyncWire | None = None

    @property
    def is_open(self) -> bool:
        """Whether it was started."""
        return self._wire is not None

    def start(self) -> None:
        """Opens the stream."""
        link = self._link()
        self._wire = AsyncWire(
            link.generation, self._metadata, link.target, self.core, self._received, self._lost
        )

    def flush(self) -> None:
        """Sends what the core wants sent."""
        if self._wire is not None:
            self._wire.flush()

    async def finish(self, seconds: float | None) -> None:
        """Waits for the stream's end."""
        if self._wire is not None:
            await self._wire.finish(seconds)

    def _received(self, response: StreamResultResponse) -> bool:
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

    def _lost(self, error: HeadraceError | None) -> None:
        if not self.core.ended:
            wake(self.core.end(error))
        self.flush()


def wake(records: list[Record]) -> None:
    """Wakes the readers of what changed."""
    for record in records:
        record.wake()
        if record.fold.done and record.on_done is not None:
            record.on_done()
