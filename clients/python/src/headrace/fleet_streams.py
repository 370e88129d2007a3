"""One request with streamed output from one of several servers, for threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import grpc

from headrace._attempts import Attempts, failed_undelivered
from headrace._fleet import Server
from headrace._fold import Fold
from headrace.errors import CallCancelledError, HeadraceError, error_from_rpc
from headrace.fleet import Fleet
from headrace.v1.generation_pb2 import ResultEvent


class FleetEvents:
    """The events of a server-streaming call to one of several servers: as long as nothing was
    delivered, a call that fails is made again elsewhere.
    """

    def __init__(
        self,
        fleet: Fleet,
        attempts: Attempts,
        open_at: Callable[[Server], Any],
        fold: Fold,
    ) -> None:
        self._fleet = fleet
        self._attempts = attempts
        self._open_at = open_at
        self._fold = fold
        self._server: Server | None = None
        self._call: Any = None
        self._cancelled = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Iterable[ResultEvent]:
        while True:
            if self._server is None:
                self._server = self._fleet.place(self._attempts)
                if not self._cancelled:
                    self._call = self._open_at(self._server)
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
                self._again(server, error_from_rpc(failure, target=server.link.target))
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
        """Has the next read try another server.

        Raises:
            HeadraceError: there is no further try; the error itself.
        """
        self._fleet.failed(self._attempts, server, error)
        self._fold.restart()

    def cancel(self) -> None:
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()
        self._over()

    def _over(self) -> None:
        if self._server is not None:
            self._fleet.over(self._server)
            self._server = None
