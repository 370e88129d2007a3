"""The channel to one server, for asyncio."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2_grpc

from headrace import _forks
from headrace._channel import ChannelSettings
from headrace._targets import Address
from headrace._trace import with_trace
from headrace.errors import CallCancelledError, UnavailableError, error_from_rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub
from headrace.v1.model_service_pb2_grpc import ModelServiceStub

if TYPE_CHECKING:
    from headrace.v1.generation_service_pb2_grpc import GenerationServiceAsyncStub
    from headrace.v1.model_service_pb2_grpc import ModelServiceAsyncStub

Q = TypeVar("Q")
A = TypeVar("A")
Method: TypeAlias = "aio.UnaryUnaryMultiCallable[Q, A]"


class AsyncLink:
    """The channel to one server, and its stubs.

    It belongs to the event loop that is running when it is created.

    Raises:
        FailedPreconditionError: gRPC cannot connect because this process was forked.
    """

    is_asyncio = True

    def __init__(self, settings: ChannelSettings, address: Address) -> None:
        _forks.watch(self)
        options = settings.options_for(address)
        self.channel: aio.Channel
        if settings.credentials is None:
            self.channel = aio.insecure_channel(address.target, options)
        else:
            self.channel = aio.secure_channel(address.target, settings.credentials, options)
        self.target = settings.peer(address.target)
        self.generation: GenerationServiceAsyncStub = GenerationServiceStub(self.channel)
        self.models: ModelServiceAsyncStub = ModelServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)
        self._settings = settings

    @property
    def open_calls(self) -> list[Any]:
        """Always empty: the event loop holds the calls, so a forked child has none to release."""
        return []

    async def close(self) -> None:
        """Closes the connection and cancels the calls still running on it."""
        await self.channel.close()
        _forks.forget(self)

    async def call(
        self, method: Method[Q, A], request: Q, seconds: float | None, request_id: str = ""
    ) -> A:
        """Makes one unary call. Cancelling the waiting task cancels the call.

        Raises:
            HeadraceError: the call failed.
        """
        metadata = with_trace(self._settings.metadata)
        try:
            return await method(request, timeout=seconds, metadata=metadata)
        except grpc.RpcError as error:
            # Its traceback has the call, which keeps a closed channel's connection.
            cause = error.with_traceback(None)
            raise error_from_rpc(error, target=self.target, request_id=request_id) from cause
        except aio.UsageError as error:  # gRPC's word for a channel that was closed
            raise UnavailableError(f"the client is closed: {error}") from error
        except asyncio.CancelledError as cancelled:
            if is_for_task(cancelled):
                raise
            raise CallCancelledError("the client was closed", request_id=request_id) from None


def is_for_task(cancelled: asyncio.CancelledError) -> bool:
    """Whether the running task itself is cancelled, not only the call it was waiting for.

    Clears the error's traceback. Its frames refer to the call, a cancelled task keeps its error,
    and gRPC keeps a closed channel's connection as long as a call is referenced. For the same
    reason, no frame that the error passes through may refer to the task: that would create a
    reference cycle.
    """
    cancelled.__traceback__ = None
    current = asyncio.current_task()
    return current is not None and current.cancelling() > 0
