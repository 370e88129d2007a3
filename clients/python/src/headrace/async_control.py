"""Operator functions for asyncio: `AsyncClient.control`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any

import grpc

from headrace._async_link import is_for_task
from headrace.control import (
    LogLevel,
    cancel_requests,
    cancel_statuses,
    drain_request,
    first_page,
    level_name,
    level_request,
    load_request,
    unload_request,
    watch_request,
)
from headrace.errors import CallCancelledError, Peer, error_from_rpc
from headrace.results import CancelStatus
from headrace.v1 import control_service_pb2 as pb

if TYPE_CHECKING:
    from headrace.v1.control_service_pb2_grpc import ControlServiceAsyncStub


class AsyncControl:
    """Monitors and controls a server; the methods are those of `headrace.control.Control`.

    async with headrace.AsyncClient() as client:
        print((await client.control.statistics()).engine.running)
    """

    def __init__(
        self,
        stub: Callable[[], ControlServiceAsyncStub],
        call: Callable[[Any, Any], Any],
        target: Peer,
        metadata: Any,
    ) -> None:
        """Called by `AsyncClient`."""
        self._make_stub = stub
        self._call = call
        self._target = target
        self._metadata = metadata

    @property
    def _stub(self) -> ControlServiceAsyncStub:
        return self._make_stub()

    async def statistics(self) -> pb.Statistics:
        """Returns the server's current statistics. Also works while its model is loading.

        Raises:
            HeadraceError: the server cannot be reached, or refuses the caller.
        """
        answer: pb.GetStatisticsResponse = await self._call(
            self._stub.GetStatistics, pb.GetStatisticsRequest()
        )
        return answer.statistics

    async def watch(self, interval: float = 1.0) -> AsyncIterator[pb.Statistics]:
        """Yields the server's statistics, now and every `interval` seconds (0.1 to 3600).

        Rates are included from the second message on. Ends when the server stops or the iterator is
        closed.

        Raises:
            HeadraceError: the server cannot be reached, or refuses the caller.
        """
        call: Any = self._stub.WatchStatistics(watch_request(interval), metadata=self._metadata)
        try:
            async for message in call:
                yield message.statistics
        except grpc.RpcError as error:
            cause = error.with_traceback(None)  # it has the call, as below
            raise error_from_rpc(error, target=self._target) from cause
        except asyncio.CancelledError as cancelled:
            if is_for_task(cancelled):
                raise
            raise CallCancelledError("the client was closed") from None
        finally:
            call.cancel()
            del call  # gRPC keeps a closed channel's connection while a call is kept

    async def requests(self, identity: str = "") -> AsyncIterator[pb.LiveRequest]:
        """Returns the live requests, oldest first, of one identity or of all.

        Raises:
            HeadraceError: the server cannot be reached, or refuses the caller.
        """
        request = first_page(identity)
        while True:
            answer: pb.ListRequestsResponse = await self._call(self._stub.ListRequests, request)
            for one in answer.requests:
                yield one
            if not answer.next_page_token:
                return
            request.page_token = answer.next_page_token

    async def cancel(self, names: Iterable[tuple[str, str]]) -> dict[tuple[str, str], CancelStatus]:
        """Ends requests of any identity, given as (identity, request id). Returns each result.

        Raises:
            HeadraceError: the server cannot be reached, or refuses the caller.
        """
        found: dict[tuple[str, str], CancelStatus] = {}
        for request in cancel_requests(names):
            found |= cancel_statuses(await self._call(self._stub.CancelRequests, request))
        return found

    async def pause(self, reason: str = "") -> pb.PauseResponse:
        """Pauses the engine between two steps, and returns when it is paused. Requests are kept.

        Raises:
            UnavailableError: the server is loading or draining, or has no engine.
        """
        request = pb.PauseRequest(reason=reason)
        answer: pb.PauseResponse = await self._call(self._stub.Pause, request)
        return answer

    async def resume(self) -> bool:
        """Ends the pause. Returns whether the engine was paused.

        Raises:
            UnavailableError: the server is loading, or has no engine.
        """
        answer: pb.ResumeResponse = await self._call(self._stub.Resume, pb.ResumeRequest())
        return answer.was_paused

    async def drain(
        self,
        timeout: float | None = None,  # noqa: ASYNC109  # the server's, not this call's
        reason: str = "",
    ) -> pb.DrainResponse:
        """Shuts the server down gracefully, without waiting for the end.

        Live requests may continue for `timeout` seconds (default: the server's `--drain-timeout`).

        Raises:
            HeadraceError: the server cannot be reached, or refuses the caller.
        """
        request = drain_request(timeout, reason)
        answer: pb.DrainResponse = await self._call(self._stub.Drain, request)
        return answer

    async def reset_prefix_cache(self) -> None:
        """Makes the server drop all cached prefixes.

        Raises:
            UnavailableError: the server is loading, or has no engine.
        """
        await self._call(self._stub.ResetPrefixCache, pb.ResetPrefixCacheRequest())

    async def load_adapter(
        self, name: str, source: str, *, pinned: bool = False, replace: bool = False
    ) -> pb.LoadAdapterResponse:
        """Loads an adapter, and returns when requests may name it; see `Control.load_adapter`.

        Raises:
            HeadraceError: the server cannot be reached, or refuses it; the class indicates why.
        """
        request = load_request(name, source, pinned=pinned, replace=replace)
        answer: pb.LoadAdapterResponse = await self._call(self._stub.LoadAdapter, request)
        return answer

    async def unload_adapter(
        self,
        name: str,
        timeout: float | None = None,  # noqa: ASYNC109  # the requests', not this call's
    ) -> int:
        """Unloads an adapter, and returns how many requests have it; see `Control.unload_adapter`.

        Raises:
            NotFoundError: the server has no adapter with this name.
            HeadraceError: the server cannot be reached, or refuses the caller.
        """
        request = unload_request(name, timeout)
        answer: pb.UnloadAdapterResponse = await self._call(self._stub.UnloadAdapter, request)
        return answer.live_requests

    async def set_log_level(self, level: LogLevel) -> LogLevel:
        """Sets the server's log level. Returns the previous one.

        Raises:
            ValueError: there is no such level.
            HeadraceError: the server cannot be reached, or refuses the caller.
        """
        request = level_request(level)
        answer: pb.SetLogLevelResponse = await self._call(self._stub.SetLogLevel, request)
        return level_name(answer.previous_level)
