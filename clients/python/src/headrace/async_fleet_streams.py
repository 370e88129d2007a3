"""One request with streamed output from one of several servers, for asyncio."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import grpc

from headrace._attempts import Attempts, failed_undelivered
from headrace._deadline import Deadline
from headrace._fleet import Server
from headrace._fold import Fold
from headrace.async_fleet import AsyncFleet
from headrace.errors import CallCancelledError, HeadraceError, error_from_stream
from headrace.v1.generation_pb2 import ResultEvent


class AsyncFleetEvents:
    """The events of a server-streaming call to one of several servers.

    If a call fails before anything was delivered, it is retried on another server.
    """

    def __init__(
        self,
        fleet: AsyncFleet,
        attempts: Attempts,
        open_at: Callable[[Server], Any],
        fold: Fold,
        deadline: Deadline,
    ) -> None:
        self._fleet = fleet
        self._attempts = attempts
        self._open_at = open_at
        self._fold = fold
        self._deadline = deadline
        self._server: Server | None = None
        self._call: Any = None
        self._cancelled = False

    async def read(self) -> Iterable[ResultEvent] | None:
        """Returns the next message's events, or None at the end."""
        while True:
            if self._server is None:
                self._server = await self._fleet.place(self._attempts, self._deadline)
                if self._cancelled:  # while it waited
                    self._over()
                    raise CallCancelledError("the stream was closed")
                self._call = self._open_at(self._server)
            server = self._server
            try:
                message = await self._call.read()
            except grpc.RpcError as failure:
                self._over()
                if self._cancelled or self._fold.chunks or self._fold.done:
                    raise
                # Its traceback has the call, which keeps a closed channel's connection.
                error = error_from_stream(failure.with_traceback(None), target=server.link.target)
                await self._again(server, error)
                continue
            except BaseException:
                self._over()
                raise
            if message is grpc.aio.EOF:
                self._over()
                return None
            if message.instance_id:
                self._fleet.owned(self._fold.request_id, server, message.instance_id)
            lost = failed_undelivered(self._fold, message.events)
            if lost is None:
                events: Iterable[ResultEvent] = message.events
                return events
            self._over()
            await self._again(server, lost)

    async def _again(self, server: Server, error: HeadraceError) -> None:
        """Makes the next read try another server.

        Raises:
            HeadraceError: the given error, if there is no further attempt.
        """
        await self._fleet.failed(self._attempts, server, error, self._deadline)
        self._fold.restart()

    def cancel(self) -> None:
        """Cancels the call. Does nothing if it has ended."""
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()
            self._call = None  # gRPC keeps a closed channel's connection while a call is kept
        self._over()

    def __del__(self) -> None:
        self._over()

    def _over(self) -> None:
        if self._server is not None:
            self._fleet.over(self._server)
            self._server = None
