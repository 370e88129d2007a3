"""A small server that speaks StreamResult and Cancel; its answers follow from the prompt alone.

The journey of a request: its tokens are the bytes of the prompt, shifted by one place, over and
over; a step every `STEP_SECONDS` gives each live request of a stream one token, and one message
carries the events of all of them. Text follows its tokens when its bytes are whole characters.
The prompts below make it fail, or break the contract, on purpose.

Run as a program it listens on a free TCP port and on the Unix socket that it is given, prints the
port, and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import codecs
import sys
from collections.abc import AsyncIterator, Iterator

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as service_pb
from headrace.v1 import generation_service_pb2_grpc as service_grpc

STEP_SECONDS = 0.002
DEFAULT_MAX_TOKENS = 16

# Prompts with a part to play.
LEAVES_A_NUMBER_OUT = "!gap"
SENDS_AN_EVENT_TWICE = "!repeat"
SENDS_AN_EVENT_AFTER_THE_END = "!late"
SENDS_ANOTHER_CHOICE = "!choice"
FAILS = "!fail"
ENDS_THE_STREAM_WITH_AN_ERROR = "!abort"
ENDS_THE_STREAM_WITHOUT_AN_ERROR = "!unended"
MISHAP_AFTER_TOKENS = 3


class _Stop(Exception):
    """Ends the stream as a whole, with this status."""

    def __init__(self, status: status_pb2.Status) -> None:
        self.status = status


def make_status(code: int, message: str, reason: str, *details: Message) -> status_pb2.Status:
    """A google.rpc.Status as the contract describes it: ErrorInfo first, then what else applies."""
    status = status_pb2.Status(code=code, message=message)
    info = error_details_pb2.ErrorInfo(reason=reason, domain="headrace")
    info.metadata.update({"b": "2", "a": "1"})
    for detail in (info, *details):
        status.details.add().Pack(detail)
    return status


class Request:
    """One request: a script of tokens, of which `advance` makes events."""

    def __init__(self, spec: pb.GenerationSpec, command_id: int, number: int) -> None:
        self.id = spec.request_id
        self.prompt = spec.text.text
        self.cancelled = False
        self.ended = False
        self._spec = spec
        self._command_id = command_id
        self._number = number
        self._seq = 0
        self._events = self._script()

    def advance(self) -> list[pb.ResultEvent]:
        """What one step tells of the request."""
        events = next(self._events, [])
        if self.prompt == SENDS_AN_EVENT_TWICE and self._seq == 4:
            events = events * 2
        if self.prompt == SENDS_AN_EVENT_AFTER_THE_END and self.ended:
            events = [*events, self._event(delta=pb.Delta(text="late"))]
        if self.prompt == SENDS_ANOTHER_CHOICE and self._seq == 4:
            finished = self._event(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH))
            finished.choice_index = 1
            events = [*events, finished]
        return events

    def _event(self, **kind: Message) -> pb.ResultEvent:
        self._seq += 1
        if self.prompt == LEAVES_A_NUMBER_OUT and self._seq == 4:
            self._seq += 1
        return pb.ResultEvent(request_number=self._number, seq=self._seq, **kind)  # type: ignore[arg-type]

    def _script(self) -> Iterator[list[pb.ResultEvent]]:
        prompt = self.prompt.encode()
        stop = self._spec.stop
        max_tokens = stop.max_tokens if stop.HasField("max_tokens") else DEFAULT_MAX_TOKENS
        accepted = pb.Accepted(request_id=self.id, command_id=self._command_id)
        yield [self._event(accepted=accepted)]
        yield [self._event(prompt=pb.PromptProcessed(prompt_tokens=len(prompt)))]

        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        done = 0
        while done < max_tokens and not self.cancelled:
            if done == MISHAP_AFTER_TOKENS and self.prompt == FAILS:
                error = make_status(code_pb2.INTERNAL, "the step failed", "INTERNAL_ERROR")
                self.ended = True
                yield [self._event(failed=pb.Failed(status=error, usage=self._usage(done)))]
                return
            if done == MISHAP_AFTER_TOKENS and self.prompt == ENDS_THE_STREAM_WITH_AN_ERROR:
                retry = error_details_pb2.RetryInfo(
                    retry_delay=Duration(seconds=1, nanos=250_000_000)
                )
                raise _Stop(make_status(code_pb2.UNAVAILABLE, "going away", "DRAINING", retry))
            if done == MISHAP_AFTER_TOKENS and self.prompt == ENDS_THE_STREAM_WITHOUT_AN_ERROR:
                raise _Stop(status_pb2.Status())
            token = prompt[(done + 1) % len(prompt)]
            delta = pb.Delta(token_ids=[token], text=decoder.decode(bytes([token])))
            done += 1
            yield [self._event(delta=delta)]
        rest = decoder.decode(b"", final=True)
        reason = pb.FINISH_REASON_CANCELLED if self.cancelled else pb.FINISH_REASON_LENGTH
        self.ended = True
        last = [self._event(delta=pb.Delta(text=rest))] if rest else []
        yield [*last, self._event(finished=pb.Finished(reason=reason, usage=self._usage(done)))]

    def _usage(self, done: int) -> pb.Usage:
        return pb.Usage(prompt_tokens=len(self.prompt.encode()), completion_tokens=done)


class ScriptedService(service_grpc.GenerationServiceServicer):
    """The two RPCs that a session needs. All callers are the same identity."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}

    async def StreamResult(
        self,
        request_iterator: AsyncIterator[service_pb.StreamResultRequest],
        context: grpc.aio.ServicerContext[
            service_pb.StreamResultRequest, service_pb.StreamResultResponse
        ],
    ) -> AsyncIterator[service_pb.StreamResultResponse]:
        """A session: answers to commands as they come, and each step's events in one message."""
        answers: list[service_pb.StreamResultResponse] = []
        live: list[Request] = []
        mine: list[str] = []  # ids, the ended ones too: results are kept until the stream ends

        async def read() -> None:
            async for command in request_iterator:
                answer, request = self._answer(command, len(mine) + 1)
                answers.append(answer)
                if request is not None:
                    self._requests[request.id] = request
                    live.append(request)
                    mine.append(request.id)

        reader = asyncio.create_task(read())
        try:
            while live or answers or not reader.done():
                step = service_pb.StreamResultResponse()
                for answer in answers:
                    step.MergeFrom(answer)
                answers.clear()
                for request in live:
                    step.events.extend(request.advance())
                live[:] = [request for request in live if not request.ended]
                if step.ByteSize():
                    yield step
                await asyncio.sleep(STEP_SECONDS)
        except _Stop as stop:
            if stop.status.code:
                details = (("grpc-status-details-bin", stop.status.SerializeToString()),)
                code = next(c for c in grpc.StatusCode if c.value[0] == stop.status.code)
                await context.abort(code, stop.status.message, details)
        finally:
            reader.cancel()
            for request_id in mine:
                del self._requests[request_id]

    async def Cancel(
        self,
        request: service_pb.CancelRequest,
        context: grpc.aio.ServicerContext[service_pb.CancelRequest, service_pb.CancelResponse],
    ) -> service_pb.CancelResponse:
        """Ends requests, one answer for each."""
        return service_pb.CancelResponse(results=[self._cancel(id_) for id_ in request.request_ids])

    def _answer(
        self, command: service_pb.StreamResultRequest, number: int
    ) -> tuple[service_pb.StreamResultResponse, Request | None]:
        answer = service_pb.StreamResultResponse()
        if command.WhichOneof("command") == "cancel":
            answer.cancelled.append(self._cancel(command.cancel.request_id))
            return answer, None
        refusal = self._refusal(command)
        if refusal is None:
            return answer, Request(command.add.spec, command.command_id, number)
        answer.rejections.add(
            command_id=command.command_id,
            request_id=command.add.spec.request_id,
            status=refusal,
        )
        return answer, None

    def _refusal(self, command: service_pb.StreamResultRequest) -> status_pb2.Status | None:
        if command.WhichOneof("command") != "add":
            return make_status(code_pb2.UNIMPLEMENTED, "only add and cancel", "UNIMPLEMENTED")
        spec = command.add.spec
        if spec.request_id in self._requests:
            return make_status(code_pb2.ALREADY_EXISTS, "the id is taken", "DUPLICATE_ID")
        if not spec.text.text:
            violation = error_details_pb2.BadRequest.FieldViolation(
                field="spec.text.text", description="must come to at least one token"
            )
            bad_request = error_details_pb2.BadRequest(field_violations=[violation])
            return make_status(
                code_pb2.INVALID_ARGUMENT, "the prompt is empty", "INVALID_FIELD", bad_request
            )
        return None

    def _cancel(self, request_id: str) -> service_pb.CancelResult:
        request = self._requests.get(request_id)
        if request is None:
            status = service_pb.CANCEL_STATUS_NOT_FOUND
        elif request.ended:
            status = service_pb.CANCEL_STATUS_ALREADY_FINISHED
        else:
            request.cancelled = True
            status = service_pb.CANCEL_STATUS_CANCELLED
        return service_pb.CancelResult(request_id=request_id, status=status)


async def serve(unix_path: str) -> None:
    """Serves until the standard input ends."""
    server = grpc.aio.server()
    service_grpc.add_GenerationServiceServicer_to_server(ScriptedService(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.add_insecure_port(f"unix:{unix_path}")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(grace=None)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
