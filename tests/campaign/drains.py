"""Part `drains`: whether the last messages of a drained server arrive.

Each drain has its own process, that of `tests.service.fake_server`: the real service around an
engine whose requests run until they are cancelled. It listens on a TCP port and on a Unix socket.
It has these clients, each with a separate connection and in the middle of a request:

    session        a synchronous client that writes credits until its end
    session-aio    an asynchronous one that does the same
    stream         GenerateStream
    unary          Generate

All of them are connected over TCP and over the Unix socket. Then a signal starts the drain or, in
every other run, an operator's Drain. New work must be refused with DRAINING and its details. One
Cancel, whose answer must arrive, ends all requests in one step of the engine. Every client must
then read the end of its request and OK.

A drain takes a second, nearly all of it to start the process. Several run concurrently.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from headrace.v1 import control_service_pb2 as control
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.control_service_pb2_grpc import ControlServiceStub
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from tests.campaign.parts import Course, Part, Tried
from tests.service import fake_server
from tests.service.helpers import Refused

COUNT, AT_ONCE = 400, 4
WAIT_S = 60.0
"""The limit of each wait; whatever takes longer is stuck."""
CREDIT_EVERY_S = 0.0005
"""How often a session's client writes. At the end, a write is nearly always in flight."""
OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
"""A separate connection for each client."""

MADE_UP = "Internal error from Core"
"""What grpc.aio reports instead of a call's status if it was writing when the status arrived. No
server can prevent that; the messages before it arrive.
"""


@dataclass(slots=True)
class Outcome:
    """The outcome of one drain.

    Attributes:
        failures: what did not arrive: the client's name, and what it got instead.
        after_last_s: the time from the answer to the cancel to the end of the process.
    """

    failures: list[str] = field(default_factory=list)
    exit_code: int | None = None
    after_last_s: float = 0.0


def _spec(name: str) -> pb.GenerationSpec:
    return pb.GenerationSpec(
        request_id=name, text=pb.TextInput(text="hi"), stop=pb.StopOptions(max_tokens=100_000)
    )


def _begin(name: str) -> Iterator[rpc.StreamResultRequest]:
    yield rpc.StreamResultRequest(open=rpc.OpenCommand(initial_credit=1_000_000))
    yield rpc.StreamResultRequest(add=rpc.AddCommand(spec=_spec(name)))


def _credit(name: str) -> rpc.StreamResultRequest:
    return rpc.StreamResultRequest(credit=rpc.CreditCommand(request_id=name, tokens=1))


def _is_end(event: pb.ResultEvent) -> bool:
    return event.WhichOneof("event") in ("finished", "failed")


def session(address: str, name: str) -> bool:
    """Run a session of a synchronous client; returns whether the end of its request arrived."""
    over = False

    def commands() -> Iterator[rpc.StreamResultRequest]:
        yield from _begin(name)
        while not over:
            time.sleep(CREDIT_EVERY_S)
            yield _credit(name)

    with grpc.insecure_channel(address, OPTIONS) as channel:
        try:
            messages = list(GenerationServiceStub(channel).StreamResult(commands(), timeout=WAIT_S))
        finally:
            over = True
    return any(_is_end(event) for message in messages for event in message.events)


async def session_aio(address: str, name: str) -> bool:
    """Run a session of an asynchronous client; returns whether the end of its request arrived."""

    async def commands() -> AsyncIterator[rpc.StreamResultRequest]:
        for command in _begin(name):
            yield command
        while True:
            await asyncio.sleep(CREDIT_EVERY_S)
            yield _credit(name)

    messages = []
    async with grpc.aio.insecure_channel(address, OPTIONS) as channel:
        stub: Any = GenerationServiceStub(channel)
        try:
            async for message in stub.StreamResult(commands(), timeout=WAIT_S):
                messages.append(message)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INTERNAL or error.details() != MADE_UP:
                raise
    return any(_is_end(event) for message in messages for event in message.events)


def stream(address: str, name: str) -> bool:
    request = rpc.GenerateStreamRequest(spec=_spec(name))
    with grpc.insecure_channel(address, OPTIONS) as channel:
        messages = list(GenerationServiceStub(channel).GenerateStream(request, timeout=WAIT_S))
    return any(_is_end(event) for message in messages for event in message.events)


def unary(address: str, name: str) -> bool:
    request = rpc.GenerateRequest(spec=_spec(name))
    with grpc.insecure_channel(address, OPTIONS) as channel:
        answer = GenerationServiceStub(channel).Generate(request, timeout=WAIT_S)
    return len(answer.choices) == 1


CLIENTS: dict[str, Callable[[str, str], Any]] = {
    "session": session,
    "session-aio": session_aio,
    "stream": stream,
    "unary": unary,
}


def reason_of(error: grpc.RpcError) -> str:
    call: Any = error
    return f"{call.code().name} {call.details()}"


async def _tried(name: str, client: Callable[[str, str], Any], address: str) -> str | None:
    """Run a client. Return None if its end arrived, otherwise what arrived instead."""
    try:
        if asyncio.iscoroutinefunction(client):
            ended = await client(address, name)
        else:
            ended = await asyncio.to_thread(client, address, name)
    except grpc.RpcError as error:
        return f"{name}: {reason_of(error)}"
    return None if ended else f"{name}: OK without an end"


async def _until_live(stub: Any, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            found = await stub.ListRequests(control.ListRequestsRequest(), wait_for_ready=True)
            if sum(request.output_tokens > 0 for request in found.requests) == count:
                return
            await asyncio.sleep(0.01)


async def _refused(stub: Any) -> str | None:
    """Try new work while the server drains. Return None if it is refused correctly, otherwise what
    happened.
    """
    try:
        await stub.Generate(rpc.GenerateRequest(spec=_spec("late")), timeout=WAIT_S)
    except grpc.aio.AioRpcError as error:
        reason = Refused(error).details.get("ErrorInfo")
        if error.code() is grpc.StatusCode.UNAVAILABLE and reason and reason.reason == "DRAINING":
            return None
        return f"refusal: {reason_of(error)}"
    return "refusal: it was served"


async def drain_once(folder: Path, *, by_operator: bool = False) -> Outcome:
    """Start a server, drain it by a signal or by an operator's Drain, and check what arrives.
    `folder`: its own, for the Unix socket.
    """
    async with fake_server.process(f"unix:{folder / 's'}", "127.0.0.1:0") as process:
        said = await fake_server.read_until(process, "Stop it with")
        [line] = [line for line in said.splitlines() if line.startswith("Listening on ")]
        addresses = line.removeprefix("Listening on ").rstrip(".").split(", ")
        return await _drain(process, addresses, by_operator=by_operator)


async def _drain(process: Process, addresses: list[str], *, by_operator: bool) -> Outcome:
    outcome = Outcome()
    names = {
        f"{kind}-over-{'unix' if address.startswith('unix') else 'tcp'}": (client, address)
        for kind, client in CLIENTS.items()
        for address in addresses
    }
    ends = [
        asyncio.create_task(_tried(name, client, address))
        for name, (client, address) in names.items()
    ]
    async with grpc.aio.insecure_channel(addresses[0], OPTIONS) as channel:
        operator: Any = ControlServiceStub(channel)
        generation: Any = GenerationServiceStub(channel)
        await _until_live(operator, len(names))
        if by_operator:
            answer = await operator.Drain(control.DrainRequest(timeout=Duration(seconds=30)))
            if answer.live_requests != len(names):
                outcome.failures.append(f"drain: {answer.live_requests} live requests")
        else:
            process.send_signal(signal.SIGTERM)
        await fake_server.read_until(process, f"Draining: {len(names)} live")
        refusal = await _refused(generation)
        cancelled: Awaitable[Any] = generation.Cancel(rpc.CancelRequest(request_ids=[*names]))
        try:
            await cancelled
        except grpc.aio.AioRpcError as error:
            outcome.failures.append(f"cancel: {reason_of(error)}")
        began = time.monotonic()
        async with asyncio.timeout(WAIT_S):
            found = [refusal, *await asyncio.gather(*ends)]
            outcome.exit_code = await fake_server.ended(process)
    outcome.after_last_s = time.monotonic() - began
    outcome.failures += [failure for failure in found if failure is not None]
    if outcome.exit_code != 0:
        outcome.failures.append(f"exit code {outcome.exit_code}")
    return outcome


def run(course: Course) -> None:
    """Drain servers, several concurrently. Every other drain is started by an operator."""
    if course.is_wanted("drains"):
        course.add(row(asyncio.run(_drains(course))))


async def _drains(course: Course) -> list[Outcome]:
    numbers = iter(range(COUNT))
    outcomes: list[Outcome] = []

    async def some() -> None:
        for number in numbers:
            with tempfile.TemporaryDirectory(prefix="headrace-drain-") as folder:
                outcomes.append(await drain_once(Path(folder), by_operator=number % 2 == 1))
            if len(outcomes) % 100 == 0:
                course.say(f"{len(outcomes)} drains")

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    return outcomes


def row(outcomes: list[Outcome]) -> Tried:
    """Return what came of drains."""
    failures = Counter(failure for one in outcomes for failure in one.failures)
    return Tried(
        name="drains",
        what=f"drains by signals and operators, each with {2 * len(CLIENTS)} clients in a request",
        promises=(1, 2),
        count=len(outcomes),
        worst=f"{max(one.after_last_s for one in outcomes):.1f} s from the last answer to the exit",
        wrong=[f"{count} × {failure}" for failure, count in failures.most_common()],
    )


DRAINS = Part(
    name="drains",
    meaning="whether all clients of servers that drain read the ends of their requests",
    run=run,
    has_calm=False,
    in_cut=False,
)
