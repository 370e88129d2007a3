"""GenerationService: requests and their results.

All RPCs start a request in the same way: its spec is drafted, then passed to `start_request`. They
differ in where the results go: to a session, to the RPC's own stream, or to no stream (those of
AddRequest are read later, and Generate waits for the end). AddRequest and Generate may be retried
(`called_request`). Streaming methods are async generators that take batches and yield messages.

A stream tells delivery that it is over in two ways, whichever comes first: the generator's
`finally`, and the RPC's done callback. The callback is needed because a generator that is suspended
in a `yield` (its message is being written) learns of the RPC's end only when it is collected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from headrace.v1 import generation_service_pb2, generation_service_pb2_grpc

from service.admission.places import Places
from service.convert.converter import check_request_id
from service.convert.response import cancel_result
from service.convert.values import seconds
from service.delivery.events import in_flight
from service.delivery.session import Batch, ResultStream
from service.delivery.states import State
from service.delivery.submission import LivesBy
from service.door.auth import current_permit
from service.errors.call_errors import AnswerTooLargeError, FieldError
from service.servicers.commands import read_commands
from service.servicers.submit import called_request, start_request
from service.state import FrontEnd, ServerState, current_front

MAX_CANCEL_IDS = 1024
MAX_WAIT_S = 60.0
MOST_OVERESTIMATED = 4
"""The factor by which an answer's size may be overestimated (`events.detail_bytes`)."""


class GenerationServicer(generation_service_pb2_grpc.GenerationServiceServicer):
    """Implements GenerationService."""

    def __init__(self, state: ServerState, sessions: Places) -> None:
        """Create the servicer. `sessions` limits the open sessions."""
        self._state = state
        self._sessions = sessions

    # Starting requests

    async def AddRequest(
        self, request: generation_service_pb2.AddRequestRequest, context: Any
    ) -> generation_service_pb2.AddRequestResponse:
        """Start a request and keep its results."""
        front, permit = current_front.get(), current_permit.get()
        draft = front.converter.draft(request, permit.caller.may_use)
        async with called_request(front, permit, draft, LivesBy.ITSELF) as started:
            response = generation_service_pb2.AddRequestResponse(
                request_id=started.request_id, instance_id=self._state.instance_id
            )
            if started.log.accepted is not None:
                response.accepted.CopyFrom(front.responder.accepted(started.log.accepted))
            return response

    async def Generate(
        self, request: generation_service_pb2.GenerateRequest, context: Any
    ) -> generation_service_pb2.GenerateResponse:
        """Run one request and return its whole result."""
        front, permit = current_front.get(), current_permit.get()
        draft = front.converter.draft(request, permit.caller.may_use)
        async with called_request(front, permit, draft, LivesBy.CALLS) as started:
            run = await started.whole()
            size = sum(numbered.event.size for numbered in run)
            if size > MOST_OVERESTIMATED * front.max_send_bytes:
                raise AnswerTooLargeError(size, front.max_send_bytes)  # nor is it made
            held = sum(in_flight(numbered.event) for numbered in run)
            front.registry.answers.add(
                permit.account, held, context, may_wait=started.state is State.KEPT
            )
            make = partial(front.responder.result, started.request_id, started.log.n, run)
            return await front.text_pool.answer(permit.account, size, make)

    async def GenerateStream(
        self, request: generation_service_pb2.GenerateStreamRequest, context: Any
    ) -> AsyncIterator[generation_service_pb2.GenerateStreamResponse]:
        """Run one request and stream its events."""
        front, permit = current_front.get(), current_permit.get()
        registry = front.registry
        stream = registry.open_stream(permit.account)
        context.add_done_callback(lambda _: registry.lost(stream))
        try:
            draft = front.converter.draft(request, permit.caller.may_use)
            started = await start_request(front, permit, draft, stream)
            instance_id = self._state.instance_id  # said once
            while (batch := await stream.receive()) is not None:
                yield await front.text_pool.answer(
                    permit.account, batch.size, partial(_streamed, front, batch, instance_id)
                )
                instance_id = ""
                del batch  # its texts are not kept while the next one is awaited
            registry.complete(stream)
            stream.check_end(started)
        finally:
            registry.lost(stream)

    async def StreamResult(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[generation_service_pb2.StreamResultResponse]:
        """Run a session: the reader carries out commands, and this method sends the results."""
        front, permit = current_front.get(), current_permit.get()
        self._sessions.take(context, permit.account)
        registry = front.registry
        stream = registry.open_stream(permit.account, is_session=True)
        context.add_done_callback(lambda _: registry.lost(stream))
        reader = asyncio.create_task(read_commands(request_iterator, self._state, permit, stream))
        reader.add_done_callback(partial(_reader_ended, stream))
        try:
            instance_id = self._state.instance_id
            while (batch := await stream.receive()) is not None:
                load = None if stream.load is None else stream.load.take()
                make = partial(front.responder.batch, batch, instance_id, load)
                yield await front.text_pool.answer(permit.account, batch.size, make)
                instance_id = ""
                del batch, make  # nor its texts, nor the frames of a refusal
            registry.complete(stream)
        finally:
            registry.lost(stream)
            reader.cancel()

    # Requests that are there

    async def Cancel(
        self, request: generation_service_pb2.CancelRequest, context: Any
    ) -> generation_service_pb2.CancelResponse:
        """Cancel requests by their ids. All of them are cancelled before anything is awaited."""
        registry, identity = current_front.get().registry, current_permit.get().caller.identity
        self._state.check_instance(request.instance_id)
        ids = request.request_ids
        if not 1 <= len(ids) <= MAX_CANCEL_IDS:
            raise FieldError(
                "request_ids", f"has {len(ids)} entries; give between 1 and {MAX_CANCEL_IDS}"
            )
        return generation_service_pb2.CancelResponse(
            instance_id=self._state.instance_id,
            results=[
                cancel_result(request_id, registry.cancel(identity, request_id))
                for request_id in ids
            ],
        )

    async def GetResult(
        self, request: generation_service_pb2.GetResultRequest, context: Any
    ) -> generation_service_pb2.GetResultResponse:
        """Read a request's events, starting at a given number."""
        front, account = current_front.get(), current_permit.get().account
        self._state.check_instance(request.instance_id)
        wait_s = _check_read(request)
        read = await front.registry.read(
            account.identity,
            request.request_id,
            request.from_seq or 1,
            until_done=request.until_done,
            wait_s=wait_s,
        )
        response = generation_service_pb2.GetResultResponse(
            next_seq=read.next_seq, done=read.done, instance_id=self._state.instance_id
        )

        def fill() -> generation_service_pb2.GetResultResponse:
            front.responder.add_events(response.events, [(0, read.events)])
            return response

        held = sum(in_flight(numbered.event) for numbered in read.events)
        front.registry.answers.add(account, held, context)
        size = sum(numbered.event.size for numbered in read.events)
        return await front.text_pool.answer(account, size, fill)


def _check_read(request: generation_service_pb2.GetResultRequest) -> float:
    """Check a GetResult request and return how many seconds it waits at most."""
    wait_s = seconds(request.wait, "wait")
    check_request_id(request.request_id)
    if wait_s > MAX_WAIT_S:
        raise FieldError("wait", f"is {wait_s:g} s; at most {MAX_WAIT_S:g} s are allowed")
    return wait_s


def _streamed(
    front: FrontEnd, batch: Batch, instance_id: str
) -> generation_service_pb2.GenerateStreamResponse:
    message = generation_service_pb2.GenerateStreamResponse(instance_id=instance_id)
    front.responder.add_events(message.events, batch.events)
    return message


def _reader_ended(stream: ResultStream, reader: asyncio.Task[None]) -> None:
    """End the session if its reader ended with an error. A reader that ends without one has ended
    at the half-close.
    """
    if reader.cancelled():
        stream.refuse(asyncio.CancelledError())
    elif (error := reader.exception()) is not None:
        stream.refuse(error)
    else:
        stream.nudge()
