"""Whether the last messages of a drained server arrive: `python -m benchmarks.drains --count 2000`.

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
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
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

from benchmarks.processes import ROOT
from benchmarks.records import cpu_name

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
    """Run a GenerateStream call."""
    request = rpc.GenerateStreamRequest(spec=_spec(name))
    with grpc.insecure_channel(address, OPTIONS) as channel:
        messages = list(GenerationServiceStub(channel).GenerateStream(request, timeout=WAIT_S))
    return any(_is_end(event) for message in messages for event in message.events)


def unary(address: str, name: str) -> bool:
    """Run a Generate call."""
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
    """Return what a client got instead of its end."""
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


async def _said(process: Process, mark: str) -> str:
    """Return the process's output up to a line with this mark."""
    assert process.stderr is not None
    said = ""
    async with asyncio.timeout(WAIT_S):
        while mark not in said:
            line = (await process.stderr.readline()).decode()
            if not line:
                raise RuntimeError(f"the server ended: {said}")
            said += line
    return said


async def _until_live(stub: Any, count: int) -> None:
    """Wait until this many requests generate."""
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
        trailers = dict(error.trailing_metadata() or ())
        details = trailers.get("grpc-status-details-bin", b"")
        if error.code() is grpc.StatusCode.UNAVAILABLE and b"DRAINING" in bytes(details):  # type: ignore[arg-type]
            return None
        return f"refusal: {reason_of(error)}"
    return "refusal: it was served"


async def drain_once(folder: Path, *, by_operator: bool = False) -> Outcome:
    """Start a server, drain it, and check what arrives.

    Args:
        folder: an exclusive folder for the Unix socket.
        by_operator: whether a Drain starts it, rather than a signal.
    """
    path = folder / "s"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.service.fake_server", f"unix:{path}", "127.0.0.1:0",
        cwd=ROOT, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE,
    )  # fmt: skip
    try:
        said = await _said(process, "Stop it with")
        [line] = [line for line in said.splitlines() if line.startswith("Listening on ")]
        addresses = line.removeprefix("Listening on ").rstrip(".").split(", ")
        return await _drain(process, addresses, by_operator=by_operator)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


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
        await _said(process, f"Draining: {len(names)} live")
        refusal = await _refused(generation)
        cancelled: Awaitable[Any] = generation.Cancel(rpc.CancelRequest(request_ids=[*names]))
        try:
            await cancelled
        except grpc.aio.AioRpcError as error:
            outcome.failures.append(f"cancel: {reason_of(error)}")
        began = time.monotonic()
        async with asyncio.timeout(WAIT_S):
            found = [refusal, *await asyncio.gather(*ends)]
            assert process.stderr is not None
            await process.stderr.read()
            outcome.exit_code = await process.wait()
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


def record(outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    """Return the record."""
    times = sorted(one.after_last_s for one in outcomes)
    failures = collections.Counter(failure for one in outcomes for failure in one.failures)
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
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
        "load_average": os.getloadavg(),
        "machine": {
            "cpu": cpu_name(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
        },
        "versions": {name: importlib.metadata.version(name) for name in ("grpcio", "protobuf")},
    }


def main() -> int:
    """Run the command; returns 1 if anything did not arrive."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="drains")
    parser.add_argument("--at-once", type=int, default=4, help="drains at a time")
    parser.add_argument("--minutes", type=float, default=240, help="none is begun after so many")
    parser.add_argument("--output", type=Path, help="write the record to this JSON file")
    arguments = parser.parse_args()
    began = time.monotonic()
    outcomes = asyncio.run(
        drains(
            arguments.count,
            arguments.at_once,
            arguments.minutes,
            lambda line: print(line, flush=True),
        )
    )
    found = record(outcomes, time.monotonic() - began)
    print(json.dumps(found, indent=2))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if found["drains_with_failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
