"""The span of each RPC, made by OpenTelemetry's own interceptor.

    Recovery ──▶ the library's coroutine ──▶ ours ────────────────▶ Entrance ──▶ servicer
                 begins and ends the span    says how it ended

The library does not know how gRPC calls end. It records cancelled, timed-out and failed calls as
OK, and adds a traceback to the span for each error that it sees, including refusals. Therefore no
error passes through it: our coroutine sets the status and keeps the error, and `Recovery` takes it
from there.

Streams also pass through it as coroutines, which write to gRPC's own context, so that their
messages do not pass through the library. gRPC abandons a generator if its caller leaves while a
message is being written. The generator would be closed later, by another task, where the library
can neither restore the previous context nor learn of the end.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc
from opentelemetry.instrumentation import grpc as instrumentation

from service.errors.call_outcome import Continuation, Handler, Unary, current_call
from service.errors.status_table import code_of, reason_of
from service.telemetry.request_spans import Spans

_HEALTH: Final = "/grpc.health."


class CallSpans(grpc.aio.ServerInterceptor):
    """Makes a span for each RPC except health checks. It is between `Recovery` and `Entrance`."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        library: Any = instrumentation  # without types
        self._library = library.aio_server_interceptor(tracer_provider=spans.provider)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Wrap one RPC's handler."""
        # A handler's attributes are untyped in grpcio. `Entrance` has made each receive a stream.
        source: Any = await continuation(handler_call_details)
        if str(handler_call_details.method).startswith(_HEALTH):
            return source

        async def write(requests: Any, context: Any) -> None:
            async for response in source.stream_stream(requests, context):
                await context.write(response)

        behavior = write if source.response_streaming else source.stream_unary

        async def inner(_details: Any) -> Any:
            return grpc.stream_unary_rpc_method_handler(self._told(behavior))

        spanned: Any = await self._library.intercept_service(inner, handler_call_details)
        make: Any = (
            grpc.stream_stream_rpc_method_handler
            if source.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(
            spanned.stream_unary,
            request_deserializer=source.request_deserializer,
            response_serializer=source.response_serializer,
        )

    def _told(self, behavior: Unary) -> Unary:
        spans = self._spans

        async def call(requests: Any, spanned: Any) -> Any:
            ending = current_call.get()
            context = spanned.__wrapped__  # gRPC's own: what the library adds to it, we do here
            spans.enter(context)
            try:
                response = await behavior(requests, context)
            except (asyncio.CancelledError, GeneratorExit):
                spans.leave(ending.code_at_end())
                raise
            except grpc.aio.BaseError as error:  # an abort; or the call has ended, or gRPC
                ending.aborted(context)
                spans.leave(ending.code_at_end())
                ending.kept = error
            except Exception as error:
                spans.leave(code_of(error), reason_of(error))
                ending.kept = error
            else:
                spans.leave(grpc.StatusCode.OK)
                return response
            return None

        return call
