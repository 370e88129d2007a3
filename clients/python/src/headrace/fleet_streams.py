"""One request with streamed output from one of several servers, for threads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import grpc

from headrace import _forks
from headrace._attempts import Attempts, failed_undelivered
from headrace._deadline import Deadline
from headrace._fleet import Server
from headrace._fold import Fold
from headrace._link import Link
from headrace.errors import (
    CallCancelledError,
    DeadlineExceededError,
    HeadraceError,
    error_from_stream,
)
from headrace.fleet import Fleet
from headrace.v1.generation_pb2 import ResultEvent
from headrace.v1.generation_service_pb2 import GenerateStreamRequest


class FleetEvents:
    """The events of a server-streaming call to one of several servers.

    If a call fails before anything was delivered, it is retried on another server.
    """

    def __init__(
        self,
        fleet: Fleet,
        attempts: Attempts,
        request: GenerateStreamRequest,
        fold: Fold,
        deadline: Deadline,
    ) -> None:
        self._fleet = fleet
        self._attempts = attempts
        self._request = request
        self._generation = _forks.generation()
        self._fold = fold
        self._deadline = deadline
        self._server: Server | None = None
        self._call: Any = None
        self._cancelled = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Iterable[ResultEvent]:
        while True:
            if self._server is None:
                try:
                    self._server = self._fleet.place(self._attempts, self._deadline)
                except DeadlineExceededError:
                    if self._cancelled:
                        raise CallCancelledError("the stream was closed") from None
                    raise
                if not self._cancelled:
                    link: Link = self._server.link
                    self._call = link.open(
                        link.generation.GenerateStream, self._request, self._deadline.left()
                    )
                if self._cancelled:  # while it waited, or now
                    self.cancel()
                    raise CallCancelledError("the stream was closed")
            server = self._server
            try:
                message = next(self._call)
            except StopIteration:
                self._over()
                raise
            except grpc.RpcError as failure:
                self._over()
                if self._cancelled or self._fold.chunks or self._fold.done:
                    raise
                self._again(server, error_from_stream(failure, target=server.link.target))
                continue
            if message.instance_id:
                self._fleet.owned(self._fold.request_id, server, message.instance_id)
            lost = failed_undelivered(self._fold, message.events)
            if lost is None:
                events: Iterable[ResultEvent] = message.events
                return events
            self._over()
            self._again(server, lost)

    def _again(self, server: Server, error: HeadraceError) -> None:
        """Makes the next read try another server.

        Raises:
            HeadraceError: the given error, if there is no further attempt.
        """
        self._fleet.failed(self._attempts, server, error, self._deadline)
        self._fold.restart()

    def cancel(self) -> None:
        self._cancelled = True
        self._deadline.end()
        self._fleet.look()  # ends a wait for a server
        if self._call is not None:
            self._call.cancel()
        self._over()

    def __del__(self) -> None:
        if self._generation == _forks.generation():  # else its locks may be nobody's
            self._over()

    def _over(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            if self._call is not None:
                server.link.ended(self._call)
            self._fleet.over(server)
