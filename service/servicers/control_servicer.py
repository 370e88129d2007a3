"""ControlService: what operators see and control. It is served in every phase. Without an engine,
`service.servicers.operator_control` refuses the operations that need one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from headrace.v1 import control_service_pb2 as pb
from headrace.v1 import control_service_pb2_grpc

from service.admission.places import Places
from service.convert import control_messages as convert
from service.convert.adapter_messages import adapter_message, load_of
from service.convert.values import bounded_seconds
from service.door.auth import current_permit
from service.servicers.operator_control import Control

logger = logging.getLogger(__name__)


class ControlServicer(control_service_pb2_grpc.ControlServiceServicer):
    """Implements ControlService."""

    def __init__(self, control: Control, watches: Places) -> None:
        """Create the servicer. `watches` limits the open WatchStatistics calls."""
        self._control = control
        self._watches = watches

    # Looking

    async def GetStatistics(
        self, request: pb.GetStatisticsRequest, context: Any
    ) -> pb.GetStatisticsResponse:
        """Return the current statistics."""
        return pb.GetStatisticsResponse(
            statistics=convert.statistics_message(await self._control.snapshot())
        )

    async def WatchStatistics(
        self, request: pb.WatchStatisticsRequest, context: Any
    ) -> AsyncIterator[pb.WatchStatisticsResponse]:
        """Send the statistics at every interval, until the server stops or the caller loses the
        permission.
        """
        permit = current_permit.get()
        interval_s = convert.interval_of(request)
        self._watches.take(context, permit.account)
        ending = self._control.ending
        before = None
        while True:
            is_last = ending.is_set()
            await permit.check()
            snapshot = await self._control.snapshot()
            yield pb.WatchStatisticsResponse(
                statistics=convert.statistics_message(snapshot, before)
            )
            if is_last:
                return
            before = snapshot
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await ending.wait()

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: Any
    ) -> pb.ListRequestsResponse:
        """List live requests, in pages."""
        size, behind = convert.page_of(request)
        live = self._control.registry.live_requests(request.identity or None)
        later = (one for one in live if one.serial > behind)
        page = list(itertools.islice(later, size))
        is_more = bool(page) and page[-1] is not live[-1]
        now = time.monotonic()
        return pb.ListRequestsResponse(
            requests=[convert.live_request(one, now) for one in page],
            next_page_token=str(page[-1].serial) if is_more else "",
            total_size=len(live),
        )

    # Steering

    async def CancelRequests(
        self, request: pb.CancelRequestsRequest, context: Any
    ) -> pb.CancelRequestsResponse:
        """Cancel requests of any identity. All of them are cancelled before anything is awaited."""
        convert.check_names(request.requests)
        cancel = self._control.registry.cancel
        return pb.CancelRequestsResponse(
            results=[
                convert.cancellation(name, cancel(name.identity, name.request_id))
                for name in request.requests
            ]
        )

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:
        """Pause the engine between two steps."""
        pause, was_paused = await self._control.pause(convert.check_reason(request.reason))
        return pb.PauseResponse(pause=convert.pause_message(pause), was_paused=was_paused)

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        """End the pause."""
        return pb.ResumeResponse(was_paused=await self._control.resume())

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        """Start draining the server."""
        timeout_s = bounded_seconds(request, "timeout")
        drain, was_draining = self._control.drain(timeout_s, convert.check_reason(request.reason))
        return pb.DrainResponse(
            drain=convert.drain_message(drain),
            was_draining=was_draining,
            live_requests=self._control.registry.live,
        )

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Any
    ) -> pb.ResetPrefixCacheResponse:
        """Drop all cached prefixes."""
        await self._control.engine().reset_prefix_cache()
        logger.warning("the prefix cache was reset")
        return pb.ResetPrefixCacheResponse()

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: Any
    ) -> pb.LoadAdapterResponse:
        """Load an adapter, or replace one."""
        loaded = await self._control.load_adapter(load_of(request))
        return pb.LoadAdapterResponse(
            adapter=adapter_message(loaded.adapter), evicted=loaded.evicted
        )

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: Any
    ) -> pb.UnloadAdapterResponse:
        """Unload an adapter."""
        timeout_s = bounded_seconds(request, "timeout")
        live = await self._control.unload_adapter(request.name, timeout_s)
        return pb.UnloadAdapterResponse(live_requests=live)

    async def SetLogLevel(
        self, request: pb.SetLogLevelRequest, context: Any
    ) -> pb.SetLogLevelResponse:
        """Set the log level."""
        previous = await self._control.set_log_level(convert.level_of(request.level))
        return pb.SetLogLevelResponse(previous_level=convert.level_number(previous))
