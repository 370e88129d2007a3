"""What surrounds every RPC of a method that is served (`service.unknown_methods` has the others).

    call ──▶ Recovery ──▶ telemetry's own ──▶ Entrance ──────────────────────▶ servicer
             (errors)     (spans)             who calls, is it served, its message

Servicers raise; `Recovery` turns what they raise into the RPC's status by the table of
`service.status_table`. CancelledError is never caught: it must reach gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from engine.errors import HeadraceError
from service.auth import Authenticator, current_permit
from service.call_errors import AnswerTooLargeError
from service.reading import OPEN_TO_EVERYONE, Reading
from service.state import ServerState, current_front
from service.status_table import abort, to_status

logger = logging.getLogger(__name__)

Handler = Any  # grpc.RpcMethodHandler: generic in its stubs, not at run time
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]
Unary = Callable[[Any, Any], Awaitable[Any]]
Stream = Callable[[Any, Any], AsyncIterator[Any]]

_ALWAYS_SERVED = ("/grpc.health.", "/grpc.reflection.", "/headrace.v1.ControlService/")
_LOG_INTERVAL_S = 1.0
_MAX_LOGGED = 300
_SERVED_WHILE_DRAINING = (
    "/headrace.v1.GenerationService/GetResult",
    "/headrace.v1.GenerationService/Cancel",
    "/headrace.v1.ModelService/",
)


def wrap(
    handler: Handler | None,
    unary: Callable[[Unary], Unary],
    stream: Callable[[Stream], Stream],
) -> Handler:
    """The handler with its behaviour wrapped, according to whether it answers once or with a
    stream.
    """
    if handler is None:  # an unknown method: gRPC answers UNIMPLEMENTED
        return None
    # What a handler holds is untyped in grpcio.
    source: Any = handler
    codec = {
        "request_deserializer": source.request_deserializer,
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


class Recovery(grpc.aio.ServerInterceptor):
    """Turns exceptions into statuses: outermost, so that it sees those of the other interceptors
    too. So is an answer that no message can hold: gRPC would refuse it without a reason.

    From the same place it knows which calls have not ended, so that a drain can wait for the last
    of them. gRPC stops politely: it says GOAWAY and pings, and knows by the answer that the client
    has read what was sent before. But from then on it closes the connection with the last of its
    calls, and a client that is writing at that moment finds the connection broken, and throws away
    what it has not read: its end. So a server is stopped only when its calls have ended: then all
    ends come before the ping.

    Attributes:
        open: one for each call whose handler runs, or whose status is being sent; done when it has
            ended.
    """

    def __init__(self, max_send_bytes: int) -> None:
        self._max_send_bytes = max_send_bytes
        self.open: set[asyncio.Future[None]] = set()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Wrap one RPC's handler."""
        return wrap(await continuation(handler_call_details), self._unary, self._stream)

    def begin(self, context: Any) -> None:
        """A call has begun; its context tells when its status was sent, or it was cut."""
        ended = asyncio.get_running_loop().create_future()
        self.open.add(ended)

        def end(_context: Any) -> None:
            self.open.discard(ended)
            if not ended.done():  # else the loop is being closed
                ended.set_result(None)

        context.add_done_callback(end)

    async def settle(self, timeout_s: float) -> None:
        """Wait until those that are open now have ended, for so many seconds at most: not for later
        ones, for clients may try again and again.
        """
        if self.open:
            await asyncio.wait(self.open, timeout=timeout_s)

    def _unary(self, behavior: Unary) -> Unary:
        async def call(request: Any, context: Any) -> Any:
            self.begin(context)
            try:
                response = await behavior(request, context)
                if (size := response.ByteSize()) > self._max_send_bytes:
                    raise AnswerTooLargeError(size, self._max_send_bytes)
                return response
            except grpc.aio.BaseError:  # an abort; or the call has ended, or gRPC
                raise
            except Exception as error:
                status = to_status(error)
            # Not within `except`: the call would keep the error, and all that its frames hold.
            return await abort(context, status)

        return call

    def _stream(self, behavior: Stream) -> Stream:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            self.begin(context)
            try:
                async for response in behavior(request, context):
                    yield response
            except grpc.aio.BaseError:  # an abort; or the call has ended, or gRPC
                raise
            except Exception as error:
                status = to_status(error)
            else:
                return
            await abort(context, status)  # as above

        return call


class Entrance(grpc.aio.ServerInterceptor):
    """Before every servicer: finds out who calls and whether they may (`service.auth`), whether the
    method is served now (`service.state`), reads the message of a method that has one
    (`service.reading`), and looks at it (`service.convert.incoming`). In this order: what is
    refused is not read, so strangers cannot make the server hold megabytes. Who calls, and the
    front end, stand in `current_permit` and `current_front` from then on.

    Health checks are everybody's. Health and reflection are always served; ControlService looks at
    the phase itself.
    """

    def __init__(self, authenticator: Authenticator, state: ServerState, reading: Reading) -> None:
        self._authenticator = authenticator
        self._state = state
        self._reading = reading
        self._refusals = _RefusalLog()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Wrap one RPC's handler. It is registered as one that takes a stream, for gRPC would read
        a single message before it asks anybody.
        """
        # What a handler holds is untyped in grpcio.
        source: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        metadata = handler_call_details.invocation_metadata or ()
        is_open = method.startswith(OPEN_TO_EVERYONE)
        is_checked = not method.startswith(_ALWAYS_SERVED)
        new_work = not method.startswith(_SERVED_WHILE_DRAINING)
        is_ours = method.startswith("/headrace.")
        read = self._reading.read_open if is_open else self._reading.read

        def enter(context: Any) -> None:
            if not is_open:
                try:
                    permit = self._authenticator.by_token(
                        method, metadata
                    ) or self._authenticator.by_certificate(method, certificate_names(context))
                except HeadraceError as error:
                    self._refusals.add(method, context, error)
                    raise
                current_permit.set(permit.of_call(metadata, context.peer()))
            if is_checked:
                current_front.set(self._state.check(new_work=new_work))

        async def received(context: Any) -> Any:
            enter(context)
            message = await read(context)
            if is_ours:
                self._state.incoming.check(message)
            return message

        async def unary_unary(_requests: Any, context: Any) -> Any:
            return await source.unary_unary(await received(context), context)

        async def unary_stream(_requests: Any, context: Any) -> AsyncIterator[Any]:
            async for response in source.unary_stream(await received(context), context):
                yield response

        def stream_stream(requests: Any, context: Any) -> AsyncIterator[Any]:
            # The behaviour's own iterator is handed on: messages pass no further generator.
            enter(context)
            iterator: AsyncIterator[Any] = source.stream_stream(requests, context)
            return iterator

        codec = {
            "request_deserializer": partial(
                self._reading.received, source.request_deserializer, is_open
            ),
            "response_serializer": source.response_serializer,
        }
        wrapped: Any
        if source.request_streaming:
            wrapped = grpc.stream_stream_rpc_method_handler(stream_stream, **codec)
        elif source.response_streaming:
            wrapped = grpc.stream_stream_rpc_method_handler(unary_stream, **codec)
        else:
            wrapped = grpc.stream_unary_rpc_method_handler(unary_unary, **codec)
        result: Handler = wrapped
        return result


def certificate_names(context: Any) -> tuple[str, ...]:
    """The common name and the alternative names of the client's verified certificate; empty where
    it has shown none.
    """
    found = context.auth_context()
    keys = ("x509_common_name", "x509_subject_alternative_name")
    names = [raw.decode("utf-8", "replace") for key in keys for raw in found.get(key, ())]
    return tuple(dict.fromkeys(names))


class _RefusalLog:
    """Logs refused callers, at most one line a second: strangers must not fill the disk."""

    def __init__(self) -> None:
        self._quiet_until = 0.0
        self._skipped = 0

    def add(self, method: str, context: Any, error: HeadraceError) -> None:
        """One was refused."""
        now = time.monotonic()
        if now < self._quiet_until:
            self._skipped += 1
            return
        logger.warning(
            "refused %s from %s (and %d others since the last such line): %s",
            ascii(method[:_MAX_LOGGED]),
            context.peer(),
            self._skipped,
            ascii(str(error)[:_MAX_LOGGED]),
        )
        self._quiet_until = now + _LOG_INTERVAL_S
        self._skipped = 0
