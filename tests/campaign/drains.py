"""Whether the last messages of a drained server arrive.

    python -m tests.campaign.drains --count 2000

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

import argparse
import asyncio
import collections
import json
import signal
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import Process
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

from benchmarks.records import Record
from benchmarks.rig.measurement import Measurement, option
from tests.service import fake_server
from tests.service.helpers import Refused

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
        exit_code: the exit code of the process.
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
    """Start a server, drain it, and check what arrives.

    Args:
        folder: an exclusive folder for the Unix socket.
        by_operator: whether a Drain starts it, rather than a signal.
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


async def drains(
    count: int, at_once: int, minutes: float, say: Callable[[str], None]
) -> list[Outcome]:
    """Run this many drains, several concurrently, and begin none after the given minutes. Every
    other one is started by an operator.
    """
    numbers = iter(range(count))
    until = time.monotonic() + 60 * minutes
    outcomes: list[Outcome] = []

    async def run() -> None:
        for number in numbers:
            if time.monotonic() > until:
                return
            with tempfile.TemporaryDirectory(prefix="headrace-drain-") as folder:
                outcome = await drain_once(Path(folder), by_operator=number % 2 == 1)
            outcomes.append(outcome)
            for failure in outcome.failures:
                say(f"drain {number}: {failure}")
            if len(outcomes) % 100 == 0:
                failed = sum(bool(one.failures) for one in outcomes)
                say(f"{len(outcomes)} drains, {failed} of them with failures")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(run())
    return outcomes


def summary(outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    times = sorted(one.after_last_s for one in outcomes)
    failures = collections.Counter(failure for one in outcomes for failure in one.failures)
    return {
        "drains": len(outcomes),
        "clients_of_each": [f"{kind}-over-{over}" for kind in CLIENTS for over in ("unix", "tcp")],
        "drains_with_failures": sum(bool(one.failures) for one in outcomes),
        "failures": dict(failures.most_common()),
        "seconds_from_the_cancel_to_the_exit": {
            "median": statistics.median(times),
            "p99": times[int(len(times) * 0.99)],
            "most": times[-1],
        },
        "seconds": round(seconds),
    }


def measure(options: argparse.Namespace, record: Record) -> None:
    began = time.monotonic()
    outcomes = asyncio.run(
        drains(
            options.count,
            options.at_once,
            options.minutes,
            lambda line: print(line, flush=True),
        )
    )
    found = summary(outcomes, time.monotonic() - began)
    record.data.update(found)
    print(json.dumps(found, indent=2))


MEASUREMENT = Measurement(
    name="drains",
    measure=measure,
    options=(
        option("count", 200, "drains"),
        option("at_once", 4, "drains at a time"),
        option("minutes", 240.0, "none is begun after so many"),
    ),
)

if __name__ == "__main__":
    sys.exit(1 if MEASUREMENT.run()["drains_with_failures"] else 0)
