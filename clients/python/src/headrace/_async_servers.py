"""A client's servers, for asyncio: the only one, or several that it chooses among."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Unpack

from headrace._async_link import A, AsyncLink, Method, Q
from headrace._async_streams import AsyncOneStream
from headrace._attempts import Attempts
from headrace._channel import ChannelSettings
from headrace._fold import Fold
from headrace._placement import prefix_keys
from headrace._session import SessionOptions
from headrace._targets import Address
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
    """What a client needs of its server or servers."""

    async def call(
        self, pick: Callable[[AsyncLink], Method[Q, A]], request: Q, seconds: float | None
    ) -> A:
        """A unary call that any server may answer."""

    async def start(
        self,
        pick: Callable[[AsyncLink], Method[Q, A]],
        request: Q,
        seconds: float | None,
        spec: GenerationSpec,
    ) -> A:
        """A unary call that starts a request."""

    async def get_result(
        self, request: GetResultRequest, seconds: float | None
    ) -> GetResultResponse:
        """Reads a request's results, at the server that has it."""

    async def cancel(self, request: CancelRequest, seconds: float | None) -> CancelResponse:
        """Ends requests, at the servers that have them."""

    def stream(self, request: GenerateStreamRequest, fold: Fold) -> AsyncEventSource:
        """Opens a stream for one request."""

    def session(self, **options: Unpack[SessionOptions]) -> AsyncSession:
        """Opens a session."""

    def batch_session(self, room_timeout: float | None = 0) -> AsyncSession:
        """Opens a session for a batch, of which only ends count."""

    async def close(self) -> None:
        """Closes all connections; calls that still run are cancelled."""


class AsyncOneServer:
    """The only server of a client."""

    def __init__(self, settings: ChannelSettings) -> None:
        self._settings = settings
        self._link: AsyncLink | None = None
        self._is_closed = False

    @property
    def link(self) -> AsyncLink:
        """The connection, opened at its first use: it belongs to the event loop that runs then.

        Raises:
            UnavailableError: the client is closed.
        """
        if self._link is None:
            if self._is_closed:
                raise UnavailableError("the client is closed")
            self._link = AsyncLink(self._settings, Address(self._settings.target))
        return self._link

    async def call(
        self, pick: Callable[[AsyncLink], Method[Q, A]], request: Q, seconds: float | None
    ) -> A:
        """A unary call."""
        return await self.link.call(pick(self.link), request, seconds)

    async def start(
        self,
        pick: Callable[[AsyncLink], Method[Q, A]],
        request: Q,
        seconds: float | None,
        spec: GenerationSpec,
    ) -> A:
        """A unary call that starts a request."""
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

    def stream(self, request: GenerateStreamRequest, fold: Fold) -> AsyncEventSource:
        """Opens a stream for one request."""
        metadata = self._settings.metadata
        return AsyncCallEvents(self.link.generation.GenerateStream(request, metadata=metadata))

    def session(self, **options: Unpack[SessionOptions]) -> AsyncSession:
        """Opens a session."""
        streams = AsyncOneStream(lambda: self.link, self._settings.metadata, **options)
        return AsyncSession(streams)

    def batch_session(self, room_timeout: float | None = 0) -> AsyncSession:
        """Opens a session for a batch."""
        return self.session(room_timeout=room_timeout)

    async def close(self) -> None:
        """Closes the connection."""
        self._is_closed = True
        if self._link is not None:
            await self._link.channel.close()
            self._link = None


class AsyncManyServers(AsyncFleet):
    """The servers of a client that has several."""

    def stream(self, request: GenerateStreamRequest, fold: Fold) -> AsyncEventSource:
        """Opens a stream for one request."""
        attempts = Attempts(self.state, prefix_keys(request.spec), retries=self.settings.retries)
        metadata = self.settings.metadata
        return AsyncFleetEvents(
            self,
            attempts,
            lambda server: server.link.generation.GenerateStream(request, metadata=metadata),
            fold,
        )

    def session(self, **options: Unpack[SessionOptions]) -> AsyncSession:
        """Opens a session over all servers."""
        return AsyncSession(AsyncManyStreams(self, **options))

    def batch_session(self, room_timeout: float | None = 0) -> AsyncSession:
        """Opens a session for a batch."""
        return AsyncSession(AsyncManyStreams(self, restarts=True, room_timeout=room_timeout))
