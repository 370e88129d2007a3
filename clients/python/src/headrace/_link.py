"""The channel to one server, for threads."""

from __future__ import annotations

import weakref
from typing import Any, TypeAlias, TypeVar

import grpc
from grpc_health.v1 import health_pb2_grpc

from headrace import _forks
from headrace._channel import ChannelSettings
from headrace._targets import Address
from headrace._trace import with_trace
from headrace.errors import CallCancelledError, UnavailableError, error_from_rpc
from headrace.v1.control_service_pb2_grpc import ControlServiceStub
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub
from headrace.v1.model_service_pb2_grpc import ModelServiceStub

Q = TypeVar("Q")
A = TypeVar("A")
Method: TypeAlias = "grpc.UnaryUnaryMultiCallable[Q, A]"


class Link:
    """The channel to one server, and its stubs.

    Raises:
        FailedPreconditionError: gRPC cannot connect because this process was forked.
    """

    is_asyncio = False

    def __init__(self, settings: ChannelSettings, address: Address) -> None:
        _forks.watch(self)
        options = settings.options_for(address)
        if settings.credentials is None:
            self.channel = grpc.insecure_channel(address.target, options)
        else:
            self.channel = grpc.secure_channel(address.target, settings.credentials, options)
        self.target = settings.peer(address.target)
        self.generation = GenerationServiceStub(self.channel)
        self.models = ModelServiceStub(self.channel)
        self.control = ControlServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        self._settings = settings
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def open_calls(self) -> list[Any]:
        """The calls not yet known to have ended."""
        return list(self._open)

    def open(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        """Opens a streaming call with an optional timeout. Report its end with `ended`.

        Raises:
            UnavailableError: the client is closed.
        """
        metadata = with_trace(self._settings.metadata)
        try:
            call = method(request, timeout=timeout, metadata=metadata)
        except ValueError as error:  # gRPC's word for a channel that was closed
            raise UnavailableError(f"the client is closed: {error}") from error
        self._open.add(call)
        return call

    def close(self) -> None:
        """Closes the connection and cancels the calls still running on it."""
        self.channel.close()
        _forks.forget(self)

    def ended(self, call: Any) -> None:
        """Records that a streaming call has ended or was cancelled."""
        self._open.discard(call)

    def call(
        self, method: Method[Q, A], request: Q, timeout: float | None, request_id: str = ""
    ) -> A:
        """Makes one unary call. An exception during the wait, such as Ctrl-C, cancels the call.

        Raises:
            HeadraceError: the call failed.
        """
        call = None
        metadata = with_trace(self._settings.metadata)
        try:
            call = method.future(request, timeout=timeout, metadata=metadata)
            self._open.add(call)
            return call.result()
        except grpc.FutureCancelledError:
            raise CallCancelledError("the client was closed", request_id=request_id) from None
        except grpc.RpcError as error:
            raise error_from_rpc(error, target=self.target, request_id=request_id) from error
        except ValueError as error:  # gRPC's word for a channel that was closed
            raise UnavailableError(f"the client is closed: {error}") from error
        except BaseException:
            if call is not None:
                call.cancel()
            raise
        finally:
            if call is not None:
                self._open.discard(call)
