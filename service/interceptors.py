"""What surrounds every RPC of a method that is served (`service.unknown_methods` has the others):
recovery first, then telemetry's own (`service.telemetry`), authentication, readiness, and the
reading of the call's message (`service.reading`).

Servicers raise; `Recovery` turns what they raise into the RPC's status by the table of
`service.status_table`. CancelledError is never caught: it must reach gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from engine.errors import HeadraceError
from service.auth import Authenticator, Permit, set_permit
from service.call_errors import AnswerTooLargeError, MalformedMessageError, MessageTooLargeError
from service.calls import OpenCalls
from service.state import ServerState
from service.status_table import status_code, to_status, trailers

logger = logging.getLogger(__name__)

Handler = Any  # grpc.RpcMethodHandler: generic in its stubs, not at run time
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]
Unary = Callable[[Any, Any], Awaitable[Any]]
Stream = Callable[[Any, Any], AsyncIterator[Any]]

LARGE_BYTES = 64 << 10
"""Messages up to this size are parsed as they come: at worst some milliseconds."""
OPEN_TO_EVERYONE = "/grpc.health."  # probes have no token
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
    """End the RPC with a status and its details; always raises."""
    await context.abort(status_code(status), status.message, trailers(status))


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a message that could not be read. gRPC's own answer would be UNKNOWN, with the
    parser's inside; for a stream it would be a reader that ends without a word.
    """

    error: HeadraceError


@dataclass(frozen=True, slots=True)
class Unparsed:
    """Stands for a large message until it is its turn to be parsed."""

    raw: bytes
    parse: Callable[[bytes], Any]
    turn: asyncio.Lock


async def parsed(message: Any) -> Any:
    """The message that a call has received. Large ones are parsed one after the other, and whoever
    else has something to do comes in between: many that arrive together stop nobody for longer than
    one does.

    Raises:
        MalformedMessageError, MessageTooLargeError: it cannot be read.
    """
    if isinstance(message, Unparsed):
        async with message.turn:
            message = message.parse(message.raw)
            await asyncio.sleep(0)
    if isinstance(message, Unreadable):
        raise message.error
    return message


class Recovery(grpc.aio.ServerInterceptor):
    """Turns exceptions into statuses: outermost, so that it sees those of the other interceptors
    too. So is an answer that no message can hold: gRPC would refuse it without a reason. For the
    same place in the chain it also tells `calls` of every call.
    """

    def __init__(self, max_receive_bytes: int, max_send_bytes: int, calls: OpenCalls) -> None:
        self._calls = calls
        self._max_receive_bytes = max_receive_bytes
        self._max_send_bytes = max_send_bytes
        self._turn = asyncio.Lock()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Wrap one RPC's handler."""
        handler = await continuation(handler_call_details)
        return wrap(handler, self._unary, self._stream, self._deserializer)

    def _deserializer(self, deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        most = self._max_receive_bytes

        def parse(raw: bytes) -> Any:
            try:
                return deserialize(raw)
            except DecodeError:
                return Unreadable(MalformedMessageError())

        def read(raw: bytes) -> Any:
            if len(raw) > most:  # it is not parsed
                return Unreadable(MessageTooLargeError(len(raw), most))
            return parse(raw) if len(raw) <= LARGE_BYTES else Unparsed(raw, parse, self._turn)

        return read

    def _unary(self, behavior: Unary) -> Unary:
        async def call(request: Any, context: Any) -> Any:
            self._calls.add(context)
            try:
                response = await behavior(request, context)
                if (size := response.ByteSize()) > self._max_send_bytes:
                    raise AnswerTooLargeError(size, self._max_send_bytes)
                return response
            except grpc.aio.BaseError:  # an abort; or the call has ended, or gRPC
                raise
            except Exception as error:
                status = to_status(error, "spec.")
            # Not within `except`: the call would keep the error, and all that its frames hold.
            return await abort(context, status)

        return call

    def _stream(self, behavior: Stream) -> Stream:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            self._calls.add(context)
            try:
                async for response in behavior(request, context):
                    yield response
            except grpc.aio.BaseError:  # an abort; or the call has ended, or gRPC
                raise
            except Exception as error:
                status = to_status(error, "spec.")
            else:
                return
            await abort(context, status)  # as above

        return call


class Authentication(grpc.aio.ServerInterceptor):
    """Refuses RPCs whose caller is not known or may not make them, and sets the permit of the
    others (`service.auth`). Health checks are everybody's.

    A stranger's message is not read: they cannot make the server hold megabytes. A token is judged
    before anybody looks for the method, so strangers do not learn which there are; a certificate
    is known only when the RPC runs.
    """

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._refusals = _RefusalLog()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Wrap one RPC's handler."""
        method = str(handler_call_details.method)
        if method.startswith(OPEN_TO_EVERYONE):
            return await continuation(handler_call_details)
        metadata = handler_call_details.invocation_metadata or ()
        try:
            permit = self._authenticator.by_token(method, metadata)
        except HeadraceError as error:
            return self._refusal(method, error)

        def enter(context: Any) -> None:
            known = permit or self._by_certificate(method, context)
            set_permit(known.of_call(metadata, context.peer()))

        def unary(behavior: Unary) -> Unary:
            async def call(request: Any, context: Any) -> Any:
                enter(context)
                return await behavior(request, context)

            return call

        def stream(behavior: Stream) -> Stream:
            # The behaviour's own iterator is handed on: messages pass no further generator.
            def call(request: Any, context: Any) -> AsyncIterator[Any]:
                enter(context)
                return behavior(request, context)

            return call

        return wrap(await continuation(handler_call_details), unary, stream)

    def _by_certificate(self, method: str, context: Any) -> Permit:
        try:
            return self._authenticator.by_certificate(method, certificate_names(context))
        except HeadraceError as error:
            self._refusals.add(method, context, error)
            raise

    def _refusal(self, method: str, refused: HeadraceError) -> Handler:
        """A handler for any kind of RPC, which reads nothing."""

        async def refuse(_requests: Any, context: Any) -> AsyncIterator[bytes]:
            self._refusals.add(method, context, refused)
            await abort(context, to_status(refused))
            yield b""  # never: this makes it a generator, as `wrap` wants it

        handler: Any = grpc.stream_stream_rpc_method_handler(refuse)
        return handler


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


class Readiness(grpc.aio.ServerInterceptor):
    """Refuses RPCs that the server does not serve in its phase. Health and reflection are always
    served; ControlService looks at the phase itself.
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
            # As in Authentication: messages pass no further generator.
            def call(request: Any, context: Any) -> AsyncIterator[Any]:
                self._state.check(new_work=new_work)
                return behavior(request, context)

            return call

        return wrap(handler, unary, stream)
