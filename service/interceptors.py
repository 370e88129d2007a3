"""What surrounds every RPC: recovery first, then readiness. Telemetry's own stand between them
(`service.telemetry`).

Servicers raise; `Recovery` turns what they raise into the RPC's status by the table of
`service.errors`. CancelledError is never caught: it must reach gRPC.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from service.errors import MalformedMessageError, status_code, to_status, trailers
from service.state import ServerState

Handler = Any  # grpc.RpcMethodHandler: generic in its stubs, not at run time
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]
Unary = Callable[[Any, Any], Awaitable[Any]]
Stream = Callable[[Any, Any], AsyncIterator[Any]]

_ALWAYS_SERVED = ("/grpc.health.", "/grpc.reflection.")
_SERVED_WHILE_DRAINING = (
    "/headrace.v1.GenerationService/GetResult",
    "/headrace.v1.GenerationService/Cancel",
    "/headrace.v1.ModelService/",
)


def wrap(
    handler: Handler | None,
    unary: Callable[[Unary], Unary],
    stream: Callable[[Stream], Stream],
    deserializer: Callable[[Any], Any] = lambda unchanged: unchanged,
) -> Handler:
    """The handler with its behaviour wrapped, according to whether it answers once or with a
    stream.
    """
    if handler is None:  # an unknown method: gRPC answers UNIMPLEMENTED
        return None
    # What a handler holds is untyped in grpcio.
    source: Any = handler
    codec = {
        "request_deserializer": deserializer(source.request_deserializer),
        "response_serializer": source.response_serializer,
    }
    wrapped: Any
    if source.request_streaming and source.response_streaming:
        wrapped = grpc.stream_stream_rpc_method_handler(stream(source.stream_stream), **codec)
    elif source.response_streaming:
        wrapped = grpc.unary_stream_rpc_method_handler(stream(source.unary_stream), **codec)
    elif source.request_streaming:
        wrapped = grpc.stream_unary_rpc_method_handler(unary(source.stream_unary), **codec)
    else:
        wrapped = grpc.unary_unary_rpc_method_handler(unary(source.unary_unary), **codec)
    result: Handler = wrapped
    return result


async def abort(context: Any, status: status_pb2.Status) -> None:
    """End the RPC with a status and its details."""
    await context.abort(status_code(status), status.message, trailers(status))


class Malformed:
    """Stands for a message that could not be read. gRPC's own answer would be UNKNOWN, with the
    parser's inside; for a stream it would be a reader that ends without a word.
    """


def check_readable(message: object) -> None:
    """Refuse a message that could not be read.

    Raises:
        MalformedMessageError: it could not.
    """
    if isinstance(message, Malformed):
        raise MalformedMessageError


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except DecodeError:
            return Malformed()

    return read


class Recovery(grpc.aio.ServerInterceptor):
    """Turns exceptions into statuses: outermost, so that it sees those of the other interceptors
    too.
    """

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Wrap one RPC's handler."""
        handler = await continuation(handler_call_details)
        return wrap(handler, self._unary, self._stream, _tolerant)

    def _unary(self, behavior: Unary) -> Unary:
        async def call(request: Any, context: Any) -> Any:
            try:
                check_readable(request)
                return await behavior(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await abort(context, to_status(error, "spec."))
                raise

        return call

    def _stream(self, behavior: Stream) -> Stream:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                check_readable(request)
                async for response in behavior(request, context):
                    yield response
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await abort(context, to_status(error, "spec."))
                raise

        return call


class Readiness(grpc.aio.ServerInterceptor):
    """Refuses RPCs that the server does not serve in its phase. Health and reflection are always
    served.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Wrap one RPC's handler."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if method.startswith(_ALWAYS_SERVED):
            return handler
        new_work = not method.startswith(_SERVED_WHILE_DRAINING)

        def unary(behavior: Unary) -> Unary:
            async def call(request: Any, context: Any) -> Any:
                self._state.check(new_work=new_work)
                return await behavior(request, context)

            return call

        def stream(behavior: Stream) -> Stream:
            async def call(request: Any, context: Any) -> AsyncIterator[Any]:
                self._state.check(new_work=new_work)
                async for response in behavior(request, context):
                    yield response

            return call

        return wrap(handler, unary, stream)
