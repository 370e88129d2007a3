"""What clients that stop reading cost the others: time per token beside them, and memory.

    A    16 clients, each sending its requests one after the other (GenerateStream)
    B    the same, and in addition 100 streams that read one message and then no more, each with a
         request as long as the context and with detailed token information

B begins when all stalled requests are paused; before that, they are work like any other. A and B
alternate, since a machine's speed drifts; each B is compared with the A before it. The first pair
warms up and does not count.

The server is `headrace-server serve` with the demo model, on loopback. The front end and the engine
are separate processes, whose resident memory is read before and while the streams are stalled.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import headrace
from headrace.v1 import control_service_pb2, generation_pb2, generation_service_pb2
from headrace.v1.control_service_pb2_grpc import ControlServiceStub
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

WAIT_S = 120.0
"""The limit of each wait; whatever takes longer is stuck."""
SMALL_WINDOW = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024),
]
"""The stalled clients' window. The less the connection takes, the sooner the server is blocked."""


def free_port() -> int:
    """Return a port of the loopback address that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_server(arguments: argparse.Namespace, address: str) -> subprocess.Popen[bytes]:
    """Start a server that pauses stalled requests soon and does not end them during the
    measurement.
    """
    command = [
        str(Path(sys.executable).with_name("headrace-server")), "serve",
        "--model", arguments.model, "--listen", address, "--dtype", arguments.dtype,
        "--threads", str(arguments.threads), "--log-level", "warning",
        "--max-unread-tokens", str(arguments.max_unread_tokens), "--max-hold", "3600",
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def resident_mib(process: int) -> float:
    """Return the resident memory of a process, in MiB."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {process} has no resident memory; it has ended")


def engine_of(server: int) -> int:
    """Return the process id of the engine, the front end's only child."""
    [child] = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return int(child)


async def figures(channel: grpc.aio.Channel) -> Any:
    """Return the server's current statistics."""
    stub: Any = ControlServiceStub(channel)  # type: ignore[no-untyped-call]
    answer = await stub.GetStatistics(control_service_pb2.GetStatisticsRequest(), timeout=30)
    return answer.statistics


async def until(
    channel: grpc.aio.Channel, condition: Callable[[Any], bool], *, every_s: float = 0.1
) -> None:
    """Wait until the server's statistics satisfy a condition."""
    async with asyncio.timeout(WAIT_S):
        while not condition(await figures(channel)):  # noqa: ASYNC110 - another process's figures
            await asyncio.sleep(every_s)


async def settled(channel: grpc.aio.Channel, stalled: int) -> None:
    """Wait until all stalled requests are paused permanently. Until the connections are full, a
    paused request resumes from time to time.
    """
    generated = -1

    def is_quiet(now: Any) -> bool:
        nonlocal generated
        before, generated = generated, now.engine.generated_tokens
        return now.engine.held == stalled and generated == before

    await until(channel, is_quiet, every_s=2.0)


async def live_client(target: str, requests: int, tokens: int, number: int) -> list[float]:
    """Return the seconds between the arrivals of tokens of one client's requests."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    gaps: list[float] = []
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        stub: Any = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        for index in range(requests):
            spec = generation_pb2.GenerationSpec(
                text={"text": f"Story {number}, chapter {index}. The river"},
                sampling={"temperature": 0.0},
                stop={"max_tokens": tokens, "ignore_eos": True},
            )
            last, received = 0.0, 0
            call = stub.GenerateStream(
                generation_service_pb2.GenerateStreamRequest(spec=spec), timeout=WAIT_S
            )
            async for message in call:
                new = sum(len(event.delta.token_ids) for event in message.events)
                now = time.perf_counter()
                if new and received:
                    gaps += [(now - last) / new] * new
                last, received = (now, received + new) if new else (last, received)
            if received != tokens:
                raise RuntimeError(f"{received} of {tokens} tokens came")
    return gaps


async def measure_live(target: str, arguments: argparse.Namespace) -> float:
    """Return the median time per token over all live clients, in seconds."""
    runs = await asyncio.gather(
        *(
            live_client(target, arguments.requests, arguments.tokens, number)
            for number in range(arguments.live)
        )
    )
    return statistics.median(gap for run in runs for gap in run)


async def stall(stack: AsyncExitStack, target: str, count: int) -> None:
    """Open streams that are read once, each on a separate connection."""
    for _ in range(count):
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(target, options=SMALL_WINDOW)
        )
        stub: Any = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        spec = generation_pb2.GenerationSpec(
            text={"text": "Once upon a time"},
            stop={"max_tokens": 100_000, "ignore_eos": True},
            output={"logprobs": 20},
        )
        call = stub.GenerateStream(generation_service_pb2.GenerateStreamRequest(spec=spec))
        stack.callback(call.cancel)
        await call.read()


async def run(arguments: argparse.Namespace, target: str, server: int) -> dict[str, Any]:
    """Run all turns and return the record's results."""
    engine = engine_of(server)
    alone: list[float] = []
    beside: list[float] = []
    memory: list[dict[str, float]] = []
    async with grpc.aio.insecure_channel(target) as channel:
        for turn in range(arguments.repeats + 1):  # the first turn warms up and does not count
            before = resident_mib(server), resident_mib(engine)
            one = await measure_live(target, arguments)
            async with AsyncExitStack() as stack:
                await stall(stack, target, arguments.stalled)
                await settled(channel, arguments.stalled)
                during = resident_mib(server), resident_mib(engine)
                holds = (await figures(channel)).engine.holds
                other = await measure_live(target, arguments)
                after = (await figures(channel)).engine
                if (after.held, after.holds) != (arguments.stalled, holds):
                    raise RuntimeError("not all stalled requests stayed held")
            await until(channel, lambda now: now.front_end.live_requests == 0)
            print(
                f"  turn {turn}: {one * 1e3:7.3f} ms alone, {other * 1e3:7.3f} ms beside, "
                f"ratio {other / one:.3f}; RSS front end {before[0]:.0f} → {during[0]:.0f}, "
                f"engine {before[1]:.0f} → {during[1]:.0f} MiB",
                flush=True,
            )
            if turn:
                alone.append(one)
                beside.append(other)
            memory.append(
                {
                    "front_end_before_mib": before[0],
                    "front_end_stalled_mib": during[0],
                    "engine_before_mib": before[1],
                    "engine_stalled_mib": during[1],
                }
            )
    return {
        "seconds_per_token_alone": alone,
        "seconds_per_token_beside": beside,
        "ratio": statistics.median(b / a for a, b in zip(alone, beside, strict=True)),
        "memory": memory,
    }


def report(arguments: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Print the table and return the record."""
    alone = statistics.median(found["seconds_per_token_alone"]) * 1e3
    beside = statistics.median(found["seconds_per_token_beside"]) * 1e3
    memory = found["memory"]
    print(f"\n{'':28} {'alone':>10} {'beside':>10} {'ratio':>8}")
    print(f"{'ms per token, median':28} {alone:10.3f} {beside:10.3f} {found['ratio']:8.3f}")
    for name in ("front_end", "engine"):
        first = memory[0][f"{name}_before_mib"]
        most = max(turn[f"{name}_stalled_mib"] for turn in memory)
        label = f"RSS of the {name.replace('_', ' ')}, MiB"
        print(f"{label:28} {first:10.0f} {most:10.0f} {most / first:8.2f}")
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "workload": f"{arguments.live} live clients of {arguments.requests} requests of "
        f"{arguments.tokens} tokens, {arguments.stalled} stalled streams with 20 log-probabilities",
        "model": Path(arguments.model).name,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "max_unread_tokens": arguments.max_unread_tokens,
        **found,
        "load_average": os.getloadavg(),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("torch", "transformers", "grpcio", "headrace-server")
        },
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/demo", help="a model directory")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--live", type=int, default=16, help="clients that read")
    parser.add_argument("--stalled", type=int, default=100, help="streams that do not")
    parser.add_argument("--requests", type=int, default=3, help="of each live client in a turn")
    parser.add_argument("--tokens", type=int, default=96, help="of each of these requests")
    parser.add_argument("--max-unread-tokens", type=int, default=256, help="the server's bound")
    parser.add_argument("--repeats", type=int, default=4, help="turns that count")
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/stalled_readers.json")
    )
    arguments = parser.parse_args()
    address = f"127.0.0.1:{free_port()}"
    server = start_server(arguments, address)
    try:
        with headrace.Client(address) as client:
            client.wait_until_ready(timeout=WAIT_S)
        found = asyncio.run(run(arguments, address, server.pid))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    record = report(arguments, found)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\nwritten to {arguments.output}")


if __name__ == "__main__":
    main()
