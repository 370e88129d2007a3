"""A client's servers, for asyncio: a single server, or several to choose among."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, Unpack

from headrace._async_link import A, AsyncLink, Method, Q
from headrace._async_streams import AsyncOneStream
from headrace._attempts import Attempts
from headrace._channel import ChannelSettings
from headrace._deadline import Deadline
from headrace._fold import Fold
from headrace._placement import prefix_keys
from headrace._session import SessionOptions
from headrace._targets import Address
from headrace._trace import with_trace
from headrace.async_fleet import AsyncFleet
from headrace.async_fleet_session import AsyncManyStreams
from headrace.async_fleet_streams import AsyncFleetEvents
from headrace.async_session import AsyncSession
from headrace.async_streams import AsyncCallEvents, AsyncEventSource
from headrace.errors import UnavailableError
from headrace.v1.generation_pb2 import GenerationSpec
from headrace.v1.generation_service_pb2 import (
    CancelRequest,
    CancelResponse,
    GenerateStreamRequest,
    GetResultRequest,
    GetResultResponse,
)


class AsyncServers(Protocol):
    """What a client needs from its server or servers."""

    async def call(
        self, pick: Callable[[AsyncLink], Method[Q, A]], request: Q, seconds: float | None
    ) -> A:
        """Makes a unary call that any server may answer."""

    async def start(
        self,
        pick: Callable[[AsyncLink], Method[Q, A]],
        request: Q,
        seconds: float | None,
        spec: GenerationSpec,
    ) -> A:
        """Makes a unary call that starts a request."""

    async def get_result(
        self, request: GetResultRequest, seconds: float | None
    ) -> GetResultResponse:
        """Reads a request's results from the server that has it."""

    async def cancel(self, request: CancelRequest, seconds: float | None) -> CancelResponse:
        """Ends requests on the servers that have them."""

    def stream(
        self, request: GenerateStreamRequest, fold: Fold, deadline: Deadline
    ) -> AsyncEventSource:
        """Opens a stream for one request."""

    def session(
        self, *, timeout: float | None = None, **options: Unpack[SessionOptions]
    ) -> AsyncSession:
        """Opens a session."""

    def batch_session(self, room_timeout: float | None = 0) -> AsyncSession:
        """Opens a session for a batch, where only final results count."""

    async def close(self) -> None:
        """Closes all connections and cancels the calls still running on them."""


class AsyncOneServer:
    """The server of a client that has only one.

    Sessions with a lease run as those of a one-server fleet, over the same connection, so that lost
    streams resume automatically.
    """

    def __init__(self, settings: ChannelSettings) -> None:
        self._settings = settings
        self._link: AsyncLink | None = None
        self.is_closed = False
        self._fleet: AsyncFleet | None = None
        self._streams: weakref.WeakSet[AsyncCallEvents] = weakref.WeakSet()

    @property
    def link(self) -> AsyncLink:
        """The connection. It is opened on first use and belongs to the event loop running then.

        Raises:
            UnavailableError: the client is closed.
        """
        if self._link is None:
            if self.is_closed:
                raise UnavailableError("the client is closed")
            self._link = AsyncLink(self._settings, Address(self._settings.target))
        return self._link

    async def call(
        self, pick: Callable[[AsyncLink], Method[Q, A]], request: Q, seconds: float | None
    ) -> A:
        """Makes a unary call."""
        return await self.link.call(pick(self.link), request, seconds)

    async def start(
        self,
        pick: Callable[[AsyncLink], Method[Q, A]],
        request: Q,
        seconds: float | None,
        spec: GenerationSpec,
    ) -> A:
        """Makes a unary call that starts a request."""
        return await self.link.call(pick(self.link), request, seconds, spec.request_id)

    async def get_result(
        self, request: GetResultRequest, seconds: float | None
    ) -> GetResultResponse:
        """Reads a request's results."""
        method = self.link.generation.GetResult
        return await self.link.call(method, request, seconds, request.request_id)

    async def cancel(self, request: CancelRequest, seconds: float | None) -> CancelResponse:
        """Ends requests."""
        return await self.link.call(self.link.generation.Cancel, request, seconds)

    def stream(
        self, request: GenerateStreamRequest, fold: Fold, deadline: Deadline
    ) -> AsyncEventSource:
        """Opens a stream for one request."""
        metadata = self._settings.metadata
        call = self.link.generation.GenerateStream(
            request, timeout=deadline.left(), metadata=with_trace(metadata)
        )
        self._streams.add(events := AsyncCallEvents(call))
        return events

    def session(
        self, *, timeout: float | None = None, **options: Unpack[SessionOptions]
    ) -> AsyncSession:
        """Opens a session."""
        if options.get("lease"):
            return AsyncSession(AsyncManyStreams(self._fleet_of_one(), **options), timeout)
        streams = AsyncOneStream(lambda: self.link, self._settings.metadata, **options)
        return AsyncSession(streams, timeout)

    def batch_session(self, room_timeout: float | None = 0) -> AsyncSession:
        """Opens a session for a batch."""
        return self.session(room_timeout=room_timeout)

    async def close(self) -> None:
        """Closes the connection."""
        self.is_closed = True
        for events in list(self._streams):
            events.cancel()  # what nobody reads any more would keep the connection
        if self._fleet is not None:
            await self._fleet.close()
        if self._link is not None:
            await self._link.close()
            self._link = None

    def _fleet_of_one(self) -> AsyncFleet:
        if self._fleet is None:
            places = (Address(self._settings.target),)
            self._fleet = AsyncFleet(replace(self._settings, places=places), lambda: self.link)
        return self._fleet


class AsyncManyServers(AsyncFleet):
    """The servers of a client that has several."""

    def __init__(self, settings: ChannelSettings) -> None:
        super().__init__(settings)
        self._streams: weakref.WeakSet[AsyncFleetEvents] = weakref.WeakSet()

    async def close(self) -> None:
        """Closes all connections and cancels the calls still running on them."""
        for events in list(self._streams):
            events.cancel()  # what nobody reads any more would keep the connection
        await super().close()

    def stream(
        self, request: GenerateStreamRequest, fold: Fold, deadline: Deadline
    ) -> AsyncEventSource:
        """Opens a stream for one request."""
        attempts = Attempts(self.state, prefix_keys(request.spec), retries=self.settings.retries)
        metadata = self.settings.metadata
        events = AsyncFleetEvents(
            self,
            attempts,
            lambda server: server.link.generation.GenerateStream(
                request, timeout=deadline.left(), metadata=with_trace(metadata)
            ),
            fold,
            deadline,
        )
        self._streams.add(events)
        return events

    def session(
        self, *, timeout: float | None = None, **options: Unpack[SessionOptions]
    ) -> AsyncSession:
        """Opens a session over all servers."""
        return AsyncSession(AsyncManyStreams(self, **options), timeout)

    def batch_session(self, room_timeout: float | None = 0) -> AsyncSession:
        """Opens a session for a batch."""
        return AsyncSession(AsyncManyStreams(self, restarts=True, room_timeout=room_timeout))
