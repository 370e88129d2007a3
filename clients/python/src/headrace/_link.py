"""The channel to one server, for threads."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import grpc
from grpc_health.v1 import health_pb2_grpc

from headrace._channel import ChannelSettings
from headrace._targets import Address
from headrace._trace import with_trace
from headrace.errors import CallCancelledError, UnavailableError, error_from_rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub
from headrace.v1.model_service_pb2_grpc import ModelServiceStub

Q = TypeVar("Q")
A = TypeVar("A")
Method: TypeAlias = "grpc.UnaryUnaryMultiCallable[Q, A]"


class Link:
    """The channel to one server, and its stubs."""

    def __init__(self, settings: ChannelSettings, address: Address) -> None:
        options = settings.options_for(address)
        if settings.credentials is None:
            self.channel = grpc.insecure_channel(address.target, options)
        else:
            self.channel = grpc.secure_channel(address.target, settings.credentials, options)
        self.target = address.target
        self.generation = GenerationServiceStub(self.channel)
        self.models = ModelServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        self._metadata = settings.metadata

    def call(
        self, method: Method[Q, A], request: Q, timeout: float | None, request_id: str = ""
    ) -> A:
        """One unary call; an exception during the wait, such as Ctrl-C, cancels it.

        Raises:
            HeadraceError: it failed.
        """
        call = None
        try:
            metadata = with_trace(self._metadata)
            call = method.future(request, timeout=timeout, metadata=metadata)
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
