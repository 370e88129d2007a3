"""A client's servers, for threads: a single server, or several to choose among."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, Unpack

from headrace._attempts import Attempts
from headrace._channel import ChannelSettings
from headrace._deadline import Deadline
from headrace._fold import Fold
from headrace._link import A, Link, Method, Q
from headrace._placement import prefix_keys
from headrace._session import SessionOptions
from headrace._streams import OneStream
from headrace._targets import Address
from headrace.errors import UnavailableError
from headrace.fleet import Fleet
from headrace.fleet_session import ManyStreams
from headrace.fleet_streams import FleetEvents
from headrace.session import Session
from headrace.streams import CallEvents, EventSource
from headrace.v1.generation_pb2 import GenerationSpec
from headrace.v1.generation_service_pb2 import (
    CancelRequest,
    CancelResponse,
    GenerateStreamRequest,
    GetResultRequest,
    GetResultResponse,
)


class Servers(Protocol):
    """What a client needs from its server or servers."""

    def call(self, pick: Callable[[Link], Method[Q, A]], request: Q, timeout: float | None) -> A:
        """Makes a unary call that any server may answer."""

    def start(
        self,
        pick: Callable[[Link], Method[Q, A]],
        request: Q,
        timeout: float | None,
        spec: GenerationSpec,
    ) -> A:
        """Makes a unary call that starts a request."""

    def get_result(self, request: GetResultRequest, timeout: float | None) -> GetResultResponse:
        """Reads a request's results from the server that has it."""

    def cancel(self, request: CancelRequest, timeout: float | None) -> CancelResponse:
        """Ends requests on the servers that have them."""

    def stream(self, request: GenerateStreamRequest, fold: Fold, deadline: Deadline) -> EventSource:
        """Opens a stream for one request."""

    def session(
        self, *, timeout: float | None = None, **options: Unpack[SessionOptions]
    ) -> Session:
        """Opens a session."""

    def batch_session(self, room_timeout: float | None = 0) -> Session:
        """Opens a session for a batch, where only final results count."""

    def close(self) -> None:
        """Closes all connections and cancels the calls still running on them."""


class OneServer:
    """The server of a client that has only one.

    Sessions with a lease run as those of a one-server fleet, over the same connection, so that lost
    streams resume automatically.
    """

    def __init__(self, settings: ChannelSettings) -> None:
        self._settings = settings
        self.link = Link(settings, Address(settings.target))
        self._fleet: Fleet | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def call(self, pick: Callable[[Link], Method[Q, A]], request: Q, timeout: float | None) -> A:
        """Makes a unary call."""
        return self.link.call(pick(self.link), request, timeout)

    def start(
        self,
        pick: Callable[[Link], Method[Q, A]],
        request: Q,
        timeout: float | None,
        spec: GenerationSpec,
    ) -> A:
        """Makes a unary call that starts a request."""
        return self.link.call(pick(self.link), request, timeout, spec.request_id)

    def get_result(self, request: GetResultRequest, timeout: float | None) -> GetResultResponse:
        """Reads a request's results."""
        method = self.link.generation.GetResult
        return self.link.call(method, request, timeout, request.request_id)

    def cancel(self, request: CancelRequest, timeout: float | None) -> CancelResponse:
        """Ends requests."""
        return self.link.call(self.link.generation.Cancel, request, timeout)

    def stream(self, request: GenerateStreamRequest, fold: Fold, deadline: Deadline) -> EventSource:
        """Opens a stream for one request."""
        return CallEvents(self.link, self.link.generation.GenerateStream, request, deadline.left())

    def session(
        self, *, timeout: float | None = None, **options: Unpack[SessionOptions]
    ) -> Session:
        """Opens a session."""
        if options.get("lease"):
            return Session(ManyStreams(self._fleet_of_one(), **options), timeout)
        return Session(OneStream(self.link, **options), timeout)

    def batch_session(self, room_timeout: float | None = 0) -> Session:
        """Opens a session for a batch."""
        return self.session(room_timeout=room_timeout)

    def close(self) -> None:
        """Closes the connection."""
        with self._lock:
            self._is_closed = True
        if self._fleet is not None:
            self._fleet.close()
        self.link.close()

    @property
    def links(self) -> list[Link]:
        """The connection."""
        return [self.link]

    def _fleet_of_one(self) -> Fleet:
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the client is closed")
            if self._fleet is None:
                places = (Address(self._settings.target),)
                self._fleet = Fleet(replace(self._settings, places=places), self.link)
            return self._fleet


class ManyServers(Fleet):
    """The servers of a client that has several."""

    def stream(self, request: GenerateStreamRequest, fold: Fold, deadline: Deadline) -> EventSource:
        """Opens a stream for one request."""
        attempts = Attempts(self.state, prefix_keys(request.spec), retries=self.settings.retries)
        return FleetEvents(self, attempts, request, fold, deadline)

    def session(
        self, *, timeout: float | None = None, **options: Unpack[SessionOptions]
    ) -> Session:
        """Opens a session over all servers."""
        return Session(ManyStreams(self, **options), timeout)

    def batch_session(self, room_timeout: float | None = 0) -> Session:
        """Opens a session for a batch."""
        return Session(ManyStreams(self, restarts=True, room_timeout=room_timeout))
