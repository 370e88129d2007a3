"""The interceptors around every RPC of a known method (`service.door.unknown_methods` handles the
others).

    call ──▶ Recovery ──▶ CallSpans ──▶ Entrance ──────────────────────────▶ servicer
             errors       if traces     who calls, is it served, its message
                          are on

Servicers raise exceptions, and `Recovery` converts them to the RPC's status by
`service.errors.status_table`. Code between them may catch an exception and keep it for `Recovery`
(`CallOutcome.kept`). CancelledError is never caught, because it must reach gRPC.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message
from google.rpc import status_pb2

from engine.contract.errors import HeadraceError
from service.door.auth import Authenticator, current_permit
from service.door.reading import OPEN_TO_EVERYONE, Reading
from service.errors.call_errors import AnswerTooLargeError
from service.errors.call_outcome import (
    CallOutcome,
    Continuation,
    Handler,
    Unary,
    Watcher,
    current_call,
)
from service.errors.refusals import Refusals
from service.errors.status_table import abort, status_code, to_status

logger = logging.getLogger(__name__)

Stream = Callable[[Any, Any], AsyncIterator[Any]]

_ALWAYS_SERVED = ("/grpc.health.", "/grpc.reflection.", "/headrace.v1.ControlService/")
_LOG_INTERVAL_S = 1.0
_MAX_LOGGED = 300
_SERVED_WHILE_DRAINING = (
    "/headrace.v1.GenerationService/GetResult",
    "/headrace.v1.GenerationService/Cancel",
    "/headrace.v1.GenerationService/StreamResult",  # attach; see service.servicers.commands
    "/headrace.v1.ModelService/",
    "/vllm.grpc.engine.VllmEngine/Abort",
    "/vllm.grpc.engine.VllmEngine/Get",
)
_CHECKED_PARTS = ("/headrace.", "/vllm.")


def wrap(
    handler: Handler | None,
    unary: Callable[[Unary], Unary],
    stream: Callable[[Stream], Stream],
) -> Handler:
    """Wrap a handler's behaviour. `unary` wraps one with a single response, `stream` one that
    streams.
    """
    if handler is None:  # an unknown method: gRPC answers UNIMPLEMENTED
        return None
    # A handler's attributes are untyped in grpcio.
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
    """Turns exceptions into statuses. It is outermost, so that it also sees exceptions of the other
    interceptors.

    It also tracks the calls that have not ended, so that a drain can wait for them. When gRPC
    stops, it sends GOAWAY and a ping, and the ping's answer shows that the client has read
    everything before it. But after that it closes a connection with its last call. If the client is
    writing at that moment, it sees a broken connection and discards what it has not read, including
    the end of its call. So the server is stopped only when its calls have ended. All ends are then
    sent before the ping.

    It counts refused calls, and notifies its watchers of each call.

    Attributes:
        open: a future for each call whose handler runs, or whose status is being sent. It is done
            when the call has ended.
        watchers: called for each call.
    """

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self.open: set[asyncio.Future[None]] = set()
        self.watchers: tuple[Watcher, ...] = ()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Wrap one RPC's handler."""
        method = str(handler_call_details.method).removeprefix("/")
        return wrap(
            await continuation(handler_call_details),
            partial(self._unary, method),
            partial(self._stream, method),
        )

    def begin(self, method: str, context: Any) -> CallOutcome:
        """Track a new call. The context's done callback reports when the status was sent, or the
        call was cut off.
        """
        ended = asyncio.get_running_loop().create_future()
        self.open.add(ended)
        now, left = time.monotonic(), context.time_remaining()
        call = CallOutcome(now, None if left is None else now + left)
        current_call.set(call)
        ends = [watch(method, context) for watch in self.watchers]

        def end(_context: Any) -> None:
            self.open.discard(ended)
            if not ended.done():  # else the loop is being closed
                ended.set_result(None)
            for tell in ends:
                if tell is not None:
                    tell(call)

        context.add_done_callback(end)
        return call

    def _refuse(self, method: str, call: CallOutcome, error: Exception) -> status_pb2.Status:
        status = to_status(error)
        call.code = status_code(status)
        self._refusals.add(method, error)
        return status

    async def settle(self, timeout_s: float) -> None:
        """Wait until the currently open calls have ended, at most `timeout_s` seconds. Later calls
        are not waited for, because clients may retry for ever.
        """
        if self.open:
            await asyncio.wait(self.open, timeout=timeout_s)

    def _unary(self, method: str, behavior: Unary) -> Unary:
        async def call(request: Any, context: Any) -> Any:
            ending = self.begin(method, context)
            try:
                response = await behavior(request, context)
                ending.raise_kept()
                ending.code = grpc.StatusCode.OK
                return response
            except grpc.aio.BaseError:  # an abort; or the call has ended, or gRPC
                ending.aborted(context)
                raise
            except Exception as error:
                status = self._refuse(method, ending, error)
            # Not within `except`: the call would keep the error alive, with everything in its
            # frames.
            return await abort(context, status)

        return call

    def _stream(self, method: str, behavior: Stream) -> Stream:
        if inspect.iscoroutinefunction(behavior):  # it writes its responses to the context
            writer: Any = self._unary(method, behavior)
            return writer  # type: ignore[no-any-return]

        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            ending = self.begin(method, context)
            try:
                async for response in behavior(request, context):
                    yield response
            except grpc.aio.BaseError:  # an abort; or the call has ended, or gRPC
                ending.aborted(context)
                raise
            except Exception as error:
                status = self._refuse(method, ending, error)
            else:
                ending.code = grpc.StatusCode.OK
                return
            await abort(context, status)  # as above

        return call


class Serving(Protocol):
    """The server's state, as the entrance sees it: what is currently served."""

    def enter(self, *, new_work: bool) -> None:
        """Admit the current task's RPC if this phase serves it. `new_work`: whether the RPC may
        start requests.

        Raises:
            NotReadyError: this phase does not serve it. The error has the reason.
        """
        ...

    def check_message(self, message: Message) -> None:
        """Check a message before any other code reads it.

        Raises:
            FieldError, CapabilityMissingError: it has too many nested messages, or requires a
                missing capability.
        """
        ...


class Entrance(grpc.aio.ServerInterceptor):
    """Runs before every servicer. It identifies the caller and checks its permission
    (`service.door.auth`), checks that the method is currently served (`Serving`), reads the message
    of a unary request (`service.door.reading`), and checks it (`service.convert.incoming`). In this
    order, refused calls are not read, so untrusted clients cannot make the server hold megabytes.
    It sets `current_permit` for the servicer. It also refuses a single answer that is too large for
    a message, which gRPC would refuse without a reason.

    Health checks are open to all callers. Health and reflection are always served; ControlService
    checks the phase itself.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        serving: Serving,
        reading: Reading,
        max_send_bytes: int,
    ) -> None:
        self._authenticator = authenticator
        self._serving = serving
        self._reading = reading
        self._max_send_bytes = max_send_bytes
        self._refusals = _RefusalLog()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Wrap one RPC's handler. The handler is registered as if it received a stream, because
        gRPC would read a single message before it calls any of our code.
        """
        # A handler's attributes are untyped in grpcio.
        source: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        metadata = handler_call_details.invocation_metadata or ()
        is_open = method.startswith(OPEN_TO_EVERYONE)
        is_checked = not method.startswith(_ALWAYS_SERVED)
        new_work = not method.startswith(_SERVED_WHILE_DRAINING)
        counts_parts = method.startswith(_CHECKED_PARTS)
        read = self._reading.read_open if is_open else self._reading.read
        if not is_open and (tables := self._authenticator.tables) is not None:
            await tables.fresh()

        def enter(context: Any) -> None:
            if not is_open:
                try:
                    peer = self._authenticator.peer_of(metadata, context.peer())
                    permit = self._authenticator.by_token(
                        method, metadata
                    ) or self._authenticator.by_certificate(method, certificate_names(context))
                except HeadraceError as error:
                    self._refusals.add(method, context, error)
                    raise
                current_permit.set(permit.of_call(metadata, peer))
            if is_checked:
                self._serving.enter(new_work=new_work)

        async def received(context: Any) -> Any:
            enter(context)
            message = await read(context)
            if counts_parts:
                self._serving.check_message(message)
            return message

        async def unary_unary(_requests: Any, context: Any) -> Any:
            response = await source.unary_unary(await received(context), context)
            if (size := response.ByteSize()) > self._max_send_bytes:
                raise AnswerTooLargeError(size, self._max_send_bytes)
            return response

        async def unary_stream(_requests: Any, context: Any) -> AsyncIterator[Any]:
            async for response in source.unary_stream(await received(context), context):
                yield response

        def stream_stream(requests: Any, context: Any) -> AsyncIterator[Any]:
            # Return the behaviour's own iterator, so that messages pass through no further
            # generator.
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
    """Return the common name and the alternative names in the client's verified certificate; empty
    if it has none.
    """
    found = context.auth_context()
    keys = ("x509_common_name", "x509_subject_alternative_name")
    names = [raw.decode("utf-8", "replace") for key in keys for raw in found.get(key, ())]
    return tuple(dict.fromkeys(names))


class _RefusalLog:
    """Logs refused callers, at most one line per second, so that untrusted clients cannot fill the
    disk.
    """

    def __init__(self) -> None:
        self._quiet_until = 0.0
        self._skipped = 0

    def add(self, method: str, context: Any, error: HeadraceError) -> None:
        """Log or count one refused call."""
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
