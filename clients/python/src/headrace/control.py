"""Operator functions for threads: `Client.control`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias

import grpc
from google.protobuf.duration_pb2 import Duration

from headrace._calls import PAGE_SIZE
from headrace._from_proto import cancel_status_from_proto
from headrace._link import Link
from headrace.errors import CallCancelledError, error_from_rpc
from headrace.results import CancelStatus
from headrace.v1 import control_service_pb2 as pb
from headrace.v1.control_service_pb2_grpc import ControlServiceStub

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

_CANCELS_PER_CALL = 1024  # the contract's limit
_LEVELS: dict[LogLevel, pb.LogLevel.ValueType] = {
    "debug": pb.LOG_LEVEL_DEBUG,
    "info": pb.LOG_LEVEL_INFO,
    "warning": pb.LOG_LEVEL_WARNING,
    "error": pb.LOG_LEVEL_ERROR,
}
_LEVEL_NAMES = {number: name for name, number in _LEVELS.items()}


class Control:
    """Monitors and controls a server. All methods are thread-safe.

        with headrace.Client() as client:
            print(client.control.statistics().engine.running)

    It applies to the server process that answers, and to the requests of all identities. By
    default, a server offers it on loopback addresses and Unix sockets only. Elsewhere, every method
    raises NotSupportedError. Messages are those of the contract (`headrace.v1`).
    """

    def __init__(self, link: Callable[[], Link], timeout: float | None) -> None:
        """Called by `Client`."""
        self._link = link
        self._timeout = timeout

    @property
    def _stub(self) -> ControlServiceStub:
        return self._link().control

    def _call(self, method: Any, request: Any) -> Any:
        return self._link().call(method, request, self._timeout)

    def statistics(self) -> pb.Statistics:
        """Returns the server's current statistics. Also works while its model is loading.

        Raises:
            HeadraceError: the server cannot be reached, or refuses the caller.
        """
        answer: pb.GetStatisticsResponse = self._call(
            self._stub.GetStatistics, pb.GetStatisticsRequest()
        )
        return answer.statistics

    def watch(self, interval: float = 1.0) -> Iterator[pb.Statistics]:
        """Yields the server's statistics, now and every `interval` seconds (0.1 to 3600).

        Rates are included from the second message on. Ends when the server stops or the iterator is
        closed.

        Raises:
            HeadraceError: the server cannot be reached, or refuses the caller.
        """
        link = self._link()
        call = link.open(link.control.WatchStatistics, watch_request(interval))
        try:
            for message in call:
                yield message.statistics
        except grpc.FutureCancelledError:
            raise CallCancelledError("the client was closed") from None
        except grpc.RpcError as error:
            raise error_from_rpc(error, target=link.target) from error
        finally:
            call.cancel()
            link.ended(call)

    def requests(self, identity: str = "") -> Iterator[pb.LiveRequest]:
        """Returns the live requests, oldest first, of one identity or of all.

        Raises:
            HeadraceError: the server cannot be reached, or refuses the caller.
        """
        request = first_page(identity)
        while True:
            answer: pb.ListRequestsResponse = self._call(self._stub.ListRequests, request)
            yield from answer.requests
            if not answer.next_page_token:
                return
            request.page_token = answer.next_page_token

    def cancel(self, names: Iterable[tuple[str, str]]) -> dict[tuple[str, str], CancelStatus]:
        """Ends requests of any identity, given as (identity, request id). Returns each result.

        Raises:
            HeadraceError: the server cannot be reached, or refuses the caller.
        """
        found: dict[tuple[str, str], CancelStatus] = {}
        for request in cancel_requests(names):
            found |= cancel_statuses(self._call(self._stub.CancelRequests, request))
        return found

    def pause(self, reason: str = "") -> pb.PauseResponse:
        """Pauses the engine between two steps, and returns when it is paused. Requests are kept.

        Raises:
            UnavailableError: the server is loading or draining, or has no engine.
        """
        answer: pb.PauseResponse = self._call(self._stub.Pause, pb.PauseRequest(reason=reason))
        return answer

    def resume(self) -> bool:
        """Ends the pause. Returns whether the engine was paused.

        Raises:
            UnavailableError: the server is loading, or has no engine.
        """
        answer: pb.ResumeResponse = self._call(self._stub.Resume, pb.ResumeRequest())
        return answer.was_paused

    def drain(self, timeout: float | None = None, reason: str = "") -> pb.DrainResponse:
        """Shuts the server down gracefully, without waiting for the end.

        Live requests may continue for `timeout` seconds (default: the server's `--drain-timeout`).

        Raises:
            HeadraceError: the server cannot be reached, or refuses the caller.
        """
        answer: pb.DrainResponse = self._call(self._stub.Drain, drain_request(timeout, reason))
        return answer

    def reset_prefix_cache(self) -> None:
        """Makes the server drop all cached prefixes.

        Raises:
            UnavailableError: the server is loading, or has no engine.
        """
        self._call(self._stub.ResetPrefixCache, pb.ResetPrefixCacheRequest())

    def load_adapter(
        self, name: str, source: str, *, pinned: bool = False, replace: bool = False
    ) -> pb.LoadAdapterResponse:
        """Loads an adapter, and returns when requests may name it.

        Args:
            name: what requests will call it.
            source: the name of its directory below the server's `--adapter-root`.
            pinned: whether it stays when others need the memory.
            replace: whether it may take the place of a loaded adapter with this name. Requests that
                were accepted before go on with what they began with.

        Raises:
            AlreadyExistsError: the name is taken.
            FailedPreconditionError: the adapter cannot be served; the message gives the reason.
            ResourceExhaustedError: there is no room for it.
            HeadraceError: the server cannot be reached, or refuses the caller.
        """
        request = load_request(name, source, pinned=pinned, replace=replace)
        answer: pb.LoadAdapterResponse = self._call(self._stub.LoadAdapter, request)
        return answer

    def unload_adapter(self, name: str, timeout: float | None = None) -> int:
        """Unloads an adapter: requests can no longer name it. Returns how many have it.

        These may go on for `timeout` seconds (default: to their end), and are then cancelled.

        Raises:
            NotFoundError: the server has no adapter with this name.
            HeadraceError: the server cannot be reached, or refuses the caller.
        """
        answer: pb.UnloadAdapterResponse = self._call(
            self._stub.UnloadAdapter, unload_request(name, timeout)
        )
        return answer.live_requests

    def set_log_level(self, level: LogLevel) -> LogLevel:
        """Sets the server's log level. Returns the previous one.

        Raises:
            ValueError: there is no such level.
            HeadraceError: the server cannot be reached, or refuses the caller.
        """
        answer: pb.SetLogLevelResponse = self._call(self._stub.SetLogLevel, level_request(level))
        return level_name(answer.previous_level)


# ---- messages, the same for both clients --------------------------------------------------------


def watch_request(interval: float) -> pb.WatchStatisticsRequest:
    """Returns the message that subscribes to statistics every `interval` seconds."""
    return pb.WatchStatisticsRequest(interval=_duration(interval))


def first_page(identity: str) -> pb.ListRequestsRequest:
    """Returns the message that lists the first page of live requests."""
    return pb.ListRequestsRequest(identity=identity, page_size=PAGE_SIZE)


def cancel_requests(names: Iterable[tuple[str, str]]) -> Iterator[pb.CancelRequestsRequest]:
    """Yields the messages that cancel these requests."""
    wanted = list(dict.fromkeys(names))
    for start in range(0, len(wanted), _CANCELS_PER_CALL):
        yield pb.CancelRequestsRequest(
            requests=[
                pb.RequestName(identity=identity, request_id=request_id)
                for identity, request_id in wanted[start : start + _CANCELS_PER_CALL]
            ]
        )


def cancel_statuses(answer: pb.CancelRequestsResponse) -> dict[tuple[str, str], CancelStatus]:
    """Maps each request to its cancellation status."""
    return {
        (one.identity, one.request_id): cancel_status_from_proto(one.status)
        for one in answer.results
    }


def drain_request(timeout: float | None, reason: str) -> pb.DrainRequest:
    """Returns the message that drains the server."""
    return pb.DrainRequest(reason=reason, timeout=None if timeout is None else _duration(timeout))


def load_request(name: str, source: str, *, pinned: bool, replace: bool) -> pb.LoadAdapterRequest:
    """Returns the message that loads an adapter."""
    return pb.LoadAdapterRequest(name=name, source=source, pinned=pinned, replace=replace)


def unload_request(name: str, timeout: float | None) -> pb.UnloadAdapterRequest:
    """Returns the message that unloads an adapter."""
    return pb.UnloadAdapterRequest(
        name=name, timeout=None if timeout is None else _duration(timeout)
    )


def level_request(level: LogLevel) -> pb.SetLogLevelRequest:
    """Returns the message that sets the log level.

    Raises:
        ValueError: there is no such level.
    """
    if level not in _LEVELS:
        raise ValueError(f"level is {level!r}; it must be one of {', '.join(_LEVELS)}")
    return pb.SetLogLevelRequest(level=_LEVELS[level])


def level_name(level: pb.LogLevel.ValueType) -> LogLevel:
    """Returns the name of a log level."""
    return _LEVEL_NAMES[level]


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
