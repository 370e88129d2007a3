"""The scripted server: what it answers is a vector's; it does by itself what every server does
whatever its requests are (health, the model's card, the answers to `open` and `cancel`, the end of
a session that was half-closed).

It stands behind a `Proxy`, on whose address the driver's library connects: the proxy cuts
connections, takes none, and hands bytes on in small pieces. So a cut is what a client sees of a
lost network, and a server's new process can have the old one's address.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2
from headrace.v1 import generation_pb2 as g
from headrace.v1 import generation_service_pb2 as s
from headrace.v1 import model_service_pb2 as m

from tests.conformance.folding import generate_response
from tests.conformance.proxy import Proxy
from tests.conformance.stage import WAIT_SECONDS, Arrival, Call, End, Served, Stage, Unmet

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_LEASE_SECONDS = 30
_TOGETHER_SECONDS = 1.0
"""How long a card waits for the other servers to be asked for theirs."""
_HELD_UP_SECONDS = 1.5
"""After so long a request has waited for a silent server: a library gives a question up after 2 s.
"""


class ScriptedServer:
    """One server of a vector."""

    def __init__(self, stage: Stage, name: str, proxy: Proxy, folder: Path, chance: Any) -> None:
        self.stage = stage
        self.name = name
        self.proxy = proxy
        self.instance_id = ""
        self._serving = True
        self._silent = False  # it answers no question for its health
        self._unanswered: list[Call] = []
        self.token: str | None = None
        self.lease_seconds = _LEASE_SECONDS
        self.secure: grpc.ServerCredentials | None = None
        self._folder = folder
        self._chance = chance
        self._generation = 0
        self._server: grpc.aio.Server | None = None
        self._stopping: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """A new process: another instance, which knows nothing of requests."""
        self._generation += 1
        self.instance_id = f"{self.name}-{self._chance.identifier()}"
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers((_Handler(self),))
        path = self._folder / f"{self.name}{self._generation}.server"
        if self.secure is None:
            self._server.add_insecure_port(f"unix:{path}")
        else:
            self._server.add_secure_port(f"unix:{path}", self.secure)
        await self._server.start()
        self.proxy.backend = str(path)

    async def drain(self) -> None:
        """GOAWAY: calls that run go on; new ones find the next process, at the same address."""
        assert self._server is not None
        wanted = self.proxy.goaways + self.proxy.connections
        self._stopping.append(asyncio.create_task(self._server.stop(30)))
        end = time.monotonic() + WAIT_SECONDS
        while self.proxy.goaways < wanted:
            if time.monotonic() > end:
                raise Unmet("a client does not answer GOAWAY")
            await asyncio.sleep(0.01)
        await self.start()

    async def restart(self) -> None:
        """The process dies, and another takes its address."""
        assert self._server is not None
        self.proxy.accepting = False
        self.proxy.cut()
        await self._server.stop(0)
        for served in self.stage.served.values():
            if served.call.server == self.name:
                served.ended = True
        await self.start()
        self.proxy.accepting = True

    async def stop(self) -> None:
        """Ends it."""
        if self._server is not None:
            await self._server.stop(0)
        for task in self._stopping:
            task.cancel()
        await asyncio.gather(*self._stopping, return_exceptions=True)

    # ---- calls -----------------------------------------------------------------------------------

    def begin(self, method: str, context: Any) -> Call:
        """Notes a call."""
        metadata = {
            key: value if isinstance(value, str) else value.hex()
            for key, value in context.invocation_metadata()
        }
        call = Call(method, self.name, self.instance_id, metadata, time.monotonic())
        self.stage.calls.append(call)
        self.stage.changed()
        return call

    async def talk(self, call: Call, context: Any) -> AsyncIterator[bytes]:
        """Sends what a call's queue has, up to its end."""
        try:
            if self.token is not None and call.metadata.get("authorization") != (
                f"Bearer {self.token}"
            ):
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such token")
            while True:
                item = await call.out.get()
                if isinstance(item, End):
                    call.is_open = False
                    if item.status is not None:
                        await self._abort(context, item.status)
                    return
                yield item
        except (asyncio.CancelledError, GeneratorExit):
            call.was_cancelled = True
            raise
        finally:
            call.is_open = False
            self.stage.changed()

    async def _abort(self, context: Any, status: status_pb2.Status) -> None:
        trailers = [("grpc-status-details-bin", status.SerializeToString())]
        for detail in status.details:
            if detail.type_url.endswith("google.rpc.RetryInfo"):
                from google.rpc import error_details_pb2

                info = error_details_pb2.RetryInfo.FromString(detail.value)
                delay = info.retry_delay.ToMilliseconds()
                trailers.append(("grpc-retry-pushback-ms", str(delay)))
        await context.abort(_CODES[status.code], status.message, tuple(trailers))

    def become(self, health: str) -> None:
        """It is healthy or unhealthy from now on, and tells all who have asked; or it is silent."""
        self._serving, self._silent = health == "healthy", health == "silent"
        if not self._silent:
            for call in self._unanswered:
                call.out.put_nowait(self._health())
            self._unanswered.clear()

    def ask_for_health(self, call: Call) -> None:
        """Answers, unless it is silent: then the client waits until it is not, or gives up."""
        if self._silent:
            self._unanswered.append(call)
        else:
            call.out.put_nowait(self._health())

    def _health(self) -> bytes:
        kind = health_pb2.HealthCheckResponse
        status = kind.SERVING if self._serving else kind.NOT_SERVING
        return bytes(kind(status=status).SerializeToString())

    def held_up(self, arrival: Arrival) -> str:
        """How long a request has waited for this server, which is silent; empty: it has not."""
        asked = min((call.began for call in self._unanswered), default=arrival.at)
        waited = arrival.at - asked
        return f"it came {waited:.3f} s later" if waited > _HELD_UP_SECONDS else ""

    def arrive(self, call: Call, request: Any, kind: str) -> None:
        """A call begins a request."""
        call.messages.append(request)
        spec = request.spec
        self.stage.arrive(
            Arrival(
                spec.request_id,
                kind,
                call,
                time.monotonic(),
                spec,
                required=tuple(request.required_capabilities),
            )
        )

    async def read_session(self, call: Call, requests: AsyncIterator[Any]) -> None:
        """Takes a session's commands."""
        async for message in requests:
            call.messages.append(message)
            kind = message.WhichOneof("command")
            if kind == "open":
                self._open(call, message)
            elif kind == "cancel":
                self._cancel(call, message)
            elif kind == "credit":
                self.stage.credits[message.credit.request_id] += message.credit.tokens
            else:
                command = message.add.spec if kind == "add" else message.attach
                self.stage.arrive(
                    Arrival(
                        command.request_id,
                        kind,
                        call,
                        time.monotonic(),
                        command,
                        message.command_id,
                        tuple(message.required_capabilities),
                    )
                )
            self.stage.changed()
        call.half_closed = True
        self.stage.changed()
        await self.stage.until(lambda: not call.live or None, "the session's last request", 60)
        call.finish()

    def _open(self, call: Call, message: Any) -> None:
        opened = s.SessionOpened(command_id=message.command_id)
        if message.open.HasField("lease"):
            wanted = message.open.lease.ToNanoseconds()
            opened.lease.FromNanoseconds(min(wanted, int(self.lease_seconds * 1e9)))
        call.send(s.StreamResultResponse(opened=opened))

    def _cancel(self, call: Call, message: Any) -> None:
        request_id = message.cancel.request_id
        self.stage.cancels.append((request_id, "session"))
        result = self._cancelled(request_id)
        result.command_id = message.command_id
        call.send(s.StreamResultResponse(cancelled=[result]))

    def _cancelled(self, request_id: str) -> s.CancelResult:
        served = self.stage.served.get(request_id)
        status = s.CANCEL_STATUS_NOT_FOUND
        if served is not None and served.call.server == self.name:
            status = s.CANCEL_STATUS_CANCELLED
            if served.ended:
                status = s.CANCEL_STATUS_ALREADY_FINISHED
        return s.CancelResult(request_id=request_id, status=status)

    def cancel_by_ids(self, request: s.CancelRequest) -> s.CancelResponse:
        """Cancel, the RPC."""
        self.stage.cancels += [(one, "Cancel") for one in request.request_ids]
        self.stage.changed()
        results = [self._cancelled(one) for one in request.request_ids]
        return s.CancelResponse(results=results, instance_id=self.instance_id)

    async def get_result(self, request: s.GetResultRequest) -> s.GetResultResponse | None:
        """GetResult; None: there is no such request."""
        served = self.stage.served.get(request.request_id)
        if served is None:
            return None
        first = max(request.from_seq, 1)

        def is_there() -> bool | None:
            ready = served.ended if request.until_done else len(served.log) >= first
            return ready or served.ended or None

        with contextlib.suppress(Exception):
            wait = request.wait.ToMilliseconds() / 1000
            await self.stage.until(is_there, "events", wait)
        events = served.log[first - 1 :]
        return s.GetResultResponse(
            events=events,
            next_seq=len(served.log) + 1,
            done=served.ended,
            instance_id=self.instance_id,
        )

    def card(self) -> m.GetModelResponse:
        """The model's card."""
        card = m.GetModelResponse()
        card.model.name = "scripted"
        card.model.instance_id = self.instance_id
        card.model.limits.max_running_requests = 8
        return card


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The methods of a scripted server; answers are bytes, so that they can be anything."""

    def __init__(self, server: ScriptedServer) -> None:
        self._server = server

    def service(self, details: Any) -> Any:
        """The handler of a method; None: there is none."""
        method = details.method.rpartition("/")[2]
        server = self._server
        if method == "StreamResult":
            return grpc.stream_stream_rpc_method_handler(
                self._session, s.StreamResultRequest.FromString
            )
        if method == "GenerateStream":
            return grpc.unary_stream_rpc_method_handler(
                self._stream, s.GenerateStreamRequest.FromString
            )
        unary: dict[str, tuple[Callable[..., Any], Any]] = {
            "Generate": (self._whole("Generate"), s.GenerateRequest),
            "AddRequest": (self._whole("AddRequest"), s.AddRequestRequest),
            "Cancel": (self._at_once("Cancel", server.cancel_by_ids), s.CancelRequest),
            "GetResult": (self._result, s.GetResultRequest),
            "GetModel": (self._model, m.GetModelRequest),
            "Check": (self._check, health_pb2.HealthCheckRequest),
        }
        if method not in unary:
            return None
        behaviour, kind = unary[method]
        return grpc.unary_unary_rpc_method_handler(behaviour, kind.FromString)

    async def _session(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[bytes]:
        call = self._server.begin("StreamResult", context)
        reader = asyncio.create_task(self._server.read_session(call, requests))
        try:
            async for message in self._server.talk(call, context):
                yield message
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _stream(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        call = self._server.begin("GenerateStream", context)
        self._server.arrive(call, request, "GenerateStream")
        async for message in self._server.talk(call, context):
            yield message

    def _whole(self, method: str) -> Callable[..., Any]:
        async def behave(request: Any, context: Any) -> bytes:
            call = self._server.begin(method, context)
            self._server.arrive(call, request, method)
            async for message in self._server.talk(call, context):
                return message
            return b""

        return behave

    def _at_once(self, method: str, answer: Callable[[Any], Any]) -> Callable[..., Any]:
        async def behave(request: Any, context: Any) -> bytes:
            call = self._server.begin(method, context)
            call.messages.append(request)
            call.out.put_nowait(answer(request).SerializeToString())
            async for message in self._server.talk(call, context):
                return message
            return b""

        return behave

    async def _model(self, request: Any, context: Any) -> bytes:
        """The model's card; the first ones of all servers go out together. A client may place its
        first requests before all servers have answered, and vectors tell where requests go.
        """
        stage = self._server.stage
        stage.unasked.discard(self._server.name)
        stage.changed()
        with contextlib.suppress(Unmet):
            await stage.until(lambda: not stage.unasked, "all servers' clients", _TOGETHER_SECONDS)
        answer = self._at_once("GetModel", lambda _request: self._server.card())
        return bytes(await answer(request, context))

    async def _result(self, request: Any, context: Any) -> bytes:
        call = self._server.begin("GetResult", context)
        try:
            found = await self._server.get_result(request)
            if found is None:
                await context.abort(grpc.StatusCode.NOT_FOUND, "no such request")
            assert found is not None
            return bytes(found.SerializeToString())
        finally:
            call.is_open = False
            self._server.stage.changed()

    async def _check(self, _request: Any, context: Any) -> bytes:
        call = self._server.begin("Check", context)
        self._server.ask_for_health(call)
        async for message in self._server.talk(call, context):
            return message
        return b""


def answer_whole(served: Served) -> None:
    """Answers a Generate whose request has ended."""
    last = served.log[-1]
    if last.HasField("failed"):
        served.call.finish(last.failed.status)
    else:
        served.call.send(generate_response(served.log, served.n, served.call.instance_id))


def accept_alone(served: Served) -> None:
    """Answers an AddRequest."""
    accepted: g.Accepted = served.log[0].accepted
    served.call.send(
        s.AddRequestResponse(
            request_id=served.request_id,
            accepted=accepted,
            instance_id=served.call.instance_id,
        )
    )
