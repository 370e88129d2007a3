"""grpc.health.v1: liveness and readiness, which are separate.

The empty name stands for the process, which is SERVING as soon as it serves anything. A service's
name stands for its readiness: NOT_SERVING while the model loads, when the engine has stopped and
when the server drains. Services that need no model are always SERVING. Watches end when the server
drains; otherwise an open Watch would delay the shutdown for its whole grace period. Any client may
watch, so the number of Watches is limited; Check and List need no place.
`service.door.health_listener` answers health checks at a separate address. The trailing metadata of
a Check says why a service is not ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.admission.places import Places

REASON = "headrace-reason"
"""The trailing metadata key that says why a service is not ready."""
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # untyped base
    """Answers health checks."""

    def __init__(
        self,
        services: Iterable[str],
        always: Iterable[str] = (),
        *,
        watches: Places,
        why: Callable[[], str] = lambda: "",
    ) -> None:
        """Start with nothing ready.

        Args:
            services: names of services that become ready with the model.
            watches: the places for Watches.
            always: names of services that need no model.
            why: returns in words why services are not ready. May be called from any thread.
        """
        self._ready = dict.fromkeys(services, False)
        self._why = why
        self._always = tuple(always)
        self.watches = watches
        self._changed = asyncio.Event()
        self._ending = False

    def set_ready(self, ready: bool) -> None:
        """Set whether the services can be used now."""
        for name in self._ready:
            self._ready[name] = ready
        self._wake()

    def end(self) -> None:
        """Set everything to not ready and end the Watches, because the server drains."""
        self._ending = True
        self.set_ready(False)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _status(self, service: str) -> int:
        if not service or service in self._always:
            return int(_SERVING)
        ready = self._ready.get(service)
        if ready is None:
            return int(_UNKNOWN)
        return int(_SERVING if ready else _NOT_SERVING)

    def check(self, service: str) -> Any:
        """Return the status of one service, or None if no service has that name. May be called from
        any thread.
        """
        status = self._status(service)
        return None if status == _UNKNOWN else health_pb2.HealthCheckResponse(status=status)

    def metadata(self, answer: Any) -> tuple[tuple[str, str], ...]:
        """Return the metadata for an answer of `check`: the reason, for which the message has no
        field.
        """
        reason = self._why() if answer.status == _NOT_SERVING else ""
        return ((REASON, reason),) if reason else ()

    def list(self) -> Any:
        """Return the status of all services. May be called from any thread."""
        return health_pb2.HealthListResponse(
            statuses={
                name: health_pb2.HealthCheckResponse(status=self._status(name))
                for name in ("", *self._ready, *self._always)
            }
        )

    async def Check(self, request: Any, context: Any) -> Any:
        """Return the status of one service."""
        answer = self.check(request.service)
        if answer is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        context.set_trailing_metadata(self.metadata(answer))
        return answer

    async def List(self, request: Any, context: Any) -> Any:
        """Return the status of all services."""
        return self.list()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Send the status of one service, now and whenever it changes, until the server drains."""
        self.watches.take(context)
        last = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            if self._ending:
                return
            if changed is self._changed:
                await changed.wait()
