"""What a caller gets beside another's backlog: `python -m benchmarks.fairness`, about ten minutes.

    first    one caller keeps a backlog of requests of 128 tokens; another repeatedly asks for
             something short. Its time to the first token, at its client, over gRPC, is measured in
             units of the loaded server's median step
    paired   both together under `fair` and under `fifo`, alternately, with alternating order,
             since a machine's speed drifts: tokens per second of all callers
    shares   sixteen callers of equal weight, and three of weights 1, 2 and 4, which always have
             requests of random sizes waiting: how far apart their services are after 60 s. The
             scheduler and core are real; a scripted runner takes as long for a step as a real one

The first two use `headrace-server serve` with the demo model and a callers' file, on loopback; the
clients are in this process. The first seconds of each load warm up and do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import hashlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import headrace
from headrace.v1 import control_service_pb2, generation_pb2, generation_service_pb2
from headrace.v1.control_service_pb2_grpc import ControlServiceStub
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from benchmarks.measures import quantile
from benchmarks.processes import ROOT
from benchmarks.records import commit, machine_record, rounded
from benchmarks.stalled_readers import free_port
from tests.engine.scheduler.sharing import Client, Sharing

WAIT_S = 300.0
"""The limit of each wait; whatever takes longer is stuck."""
BACKLOG_TOKENS = 128
SHORT_TOKENS = 8
_CALLERS = ("backlog", "other", "operator")
_STEP_S, _TOKEN_S = 0.002, 0.00002
"""The approximate time of a step of the demo model, and what each of its tokens adds."""
_PAUSE_S = 0.1
"""About how long the short requests' client pauses, so that it does not synchronise with the
server.
"""
_WATCH_S = 0.1


class Server:
    """`headrace-server serve` with the demo model, and a token for each caller."""

    def __init__(self, arguments: argparse.Namespace, scheduler: str, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        callers = folder / "callers.toml"
        callers.write_text(
            "\n".join(
                f'[[callers]]\nidentity = "{name}"\nservices = ["*"]\n'
                f'token_sha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
                for name in _CALLERS
            )
        )
        command = [
            str(Path(sys.executable).with_name("headrace-server")), "serve",
            "--model", arguments.model, "--listen", self.address, "--dtype", arguments.dtype,
            "--device", "cpu", "--threads", str(arguments.threads), "--log-level", "warning",
            "--auth-file", str(callers), "--scheduler", scheduler, "--no-prefix-cache",
        ]  # fmt: skip
        self._log = folder / f"{scheduler}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)

    def wait_until_ready(self) -> None:
        """Wait until the model is loaded. Raises RuntimeError if it cannot be loaded."""
        try:
            with headrace.Client(self.address, token="operator") as client:
                client.wait_until_ready(timeout=WAIT_S)
        except headrace.HeadraceError as error:
            raise RuntimeError(f"the server is not ready:\n{self._log.read_text()}") from error

    def end(self) -> None:
        """Stop the server."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(WAIT_S)


@contextlib.contextmanager
def serving(arguments: argparse.Namespace, *schedulers: str) -> Iterator[list[Server]]:
    """Run a server for each policy."""
    with tempfile.TemporaryDirectory() as folder:
        servers = [Server(arguments, one, Path(folder)) for one in schedulers]
        try:
            for server in servers:
                server.wait_until_ready()
            yield servers
        finally:
            for server in servers:
                server.end()


class Caller:
    """One caller's connection and requests."""

    def __init__(self, server: Server, name: str) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.aio.insecure_channel(server.address, options=options)
        self.generation: Any = GenerationServiceStub(self._channel)
        self.control: Any = ControlServiceStub(self._channel)
        self.metadata = [("authorization", f"Bearer {name}")]
        self.tokens = 0
        self._numbers = itertools.count()

    async def __aenter__(self) -> Caller:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    def spec(self, max_tokens: int) -> generation_pb2.GenerationSpec:
        """Return a request; no two are alike."""
        return generation_pb2.GenerationSpec(
            text=generation_pb2.TextInput(
                text=f"Story {next(self._numbers)} of a river and a mill. Once upon a time"
            ),
            sampling=generation_pb2.SamplingOptions(temperature=0.0),
            stop=generation_pb2.StopOptions(max_tokens=max_tokens, ignore_eos=True),
        )

    async def generate(self, max_tokens: int) -> None:
        """Run one whole request, and retry if there is no room for it now."""
        request = generation_service_pb2.GenerateRequest(spec=self.spec(max_tokens))
        while True:
            try:
                await self.generation.Generate(request, metadata=self.metadata, timeout=WAIT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                await asyncio.sleep(_PAUSE_S)
                continue
            self.tokens += max_tokens
            return

    async def first_token(self, max_tokens: int) -> float:
        """Return the seconds from the call to the first token of a request, which is read to its
        end.
        """
        request = generation_service_pb2.GenerateStreamRequest(spec=self.spec(max_tokens))
        began, first = time.perf_counter(), 0.0
        call = self.generation.GenerateStream(request, metadata=self.metadata, timeout=WAIT_S)
        async for message in call:
            if not first and any(event.delta.token_ids for event in message.events):
                first = time.perf_counter() - began
        self.tokens += max_tokens
        return first


@contextlib.asynccontextmanager
async def running(*coroutines: Any) -> Any:
    """Run these tasks during the block; their failures are raised here."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def keep_asking(caller: Caller, spread: int, chance: random.Random) -> None:
    """Send requests of the backlog endlessly. `spread`: how many tokens shorter or longer they
    are.
    """
    while True:
        await caller.generate(BACKLOG_TOKENS + chance.randint(-spread, spread))


async def watch(operator: Caller, steps: list[float]) -> None:
    """Record the time of the server's last step, a few times per second."""
    request = control_service_pb2.WatchStatisticsRequest()
    request.interval.FromMilliseconds(round(_WATCH_S * 1000))
    async for message in operator.control.WatchStatistics(request, metadata=operator.metadata):
        steps.append(message.statistics.engine.last_step_duration.ToNanoseconds() / 1e9)


async def ask_short(caller: Caller, count: int | None, chance: random.Random) -> list[float]:
    """Return the times to the first token of short requests, sent one after the other; None runs
    endlessly.
    """
    found: list[float] = []
    for number in itertools.count() if count is None else range(count):
        await asyncio.sleep(chance.uniform(0, 2 * _PAUSE_S))
        found.append(await caller.first_token(SHORT_TOKENS))
        if number % 50 == 49 and count is not None:
            print(f"  {number + 1} of {count} short requests", flush=True)
    return found


async def measure_first(server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the part `first`."""
    chance = random.Random(1)
    steps: list[float] = []
    async with (
        Caller(server, "backlog") as backlog,
        Caller(server, "other") as other,
        Caller(server, "operator") as operator,
    ):
        alone = await ask_short(other, arguments.alone, chance)
        asking = [keep_asking(backlog, arguments.spread, chance) for _ in range(arguments.backlog)]
        async with running(*asking):
            await asyncio.sleep(arguments.warm_up)
            stats = await figures(operator)
            async with running(watch(operator, steps)):
                beside = await ask_short(other, arguments.samples, chance)
    step = statistics.median(steps)
    return {
        "samples": len(beside),
        "waiting": stats.engine.waiting,
        "running": stats.engine.running,
        "step_p50_s": step,
        "step_p99_s": quantile(steps, 99),
        "alone_p50_s": statistics.median(alone),
        "ttft_p50_s": statistics.median(beside),
        "ttft_p99_s": quantile(beside, 99),
        "ttft_max_s": max(beside),
        "ttft_p50_steps": statistics.median(beside) / step,
        "ttft_p99_steps": quantile(beside, 99) / step,
    }


async def figures(operator: Caller) -> Any:
    """Return the server's current statistics."""
    request = control_service_pb2.GetStatisticsRequest()
    answer = await operator.control.GetStatistics(request, metadata=operator.metadata)
    return answer.statistics


async def turn(server: Server, arguments: argparse.Namespace) -> dict[str, float]:
    """Run an endless backlog and short requests, and return the tokens per second of all as the
    engine counts them. A batch that empties at the end would measure its end rather than the
    policy.
    """
    chance = random.Random(2)
    async with (
        Caller(server, "backlog") as backlog,
        Caller(server, "other") as other,
        Caller(server, "operator") as operator,
    ):
        asking = [keep_asking(backlog, arguments.spread, chance) for _ in range(arguments.backlog)]
        async with running(*asking, ask_short(other, None, chance)):
            await asyncio.sleep(arguments.warm_up)
            before, began = (await figures(operator)).engine, time.perf_counter()
            await asyncio.sleep(arguments.turn_seconds)
            after, seconds = (await figures(operator)).engine, time.perf_counter() - began
        while (await figures(operator)).engine.running:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(_PAUSE_S)
    generated = after.generated_tokens - before.generated_tokens
    prompts = after.prompt_tokens - before.prompt_tokens
    return {
        "tokens_per_s": (generated + prompts) / seconds,
        "generated_per_s": generated / seconds,
        "steps_per_s": (after.steps - before.steps) / seconds,
        "preemptions": after.preemptions - before.preemptions,
        "short_tokens": other.tokens,
    }


async def measure_paired(servers: Sequence[Server], arguments: argparse.Namespace) -> Any:
    """Run the part `paired`; `servers`: fair, fifo."""
    turns: list[list[dict[str, float]]] = [[], []]
    for number in range(arguments.turns + 1):
        for index in (0, 1) if number % 2 else (1, 0):
            found = await turn(servers[index], arguments)
            if number:  # the first one warms up
                turns[index].append(found)
        if number:
            fair, fifo = (found[-1]["tokens_per_s"] for found in turns)
            print(f"  turn {number}: fair {fair:.0f}, fifo {fifo:.0f} tok/s, {fair / fifo:.3f}")
    ratios = [
        fair["tokens_per_s"] / fifo["tokens_per_s"] for fair, fifo in zip(*turns, strict=True)
    ]
    return {
        "fair": turns[0],
        "fifo": turns[1],
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }


def share_for(seconds: float, weights: Sequence[float], max_requests: int) -> dict[str, Any]:
    """Return what callers were given after this time, each divided by its weight."""
    clients = [
        Client(weight, prompt=16 + 8 * (index % 5), output=8 + 24 * (index % 4))
        for index, weight in enumerate(weights)
    ]
    sharing = Sharing(clients, max_requests=max_requests, max_batch_tokens=256, num_blocks=4096)
    due = end = time.perf_counter()
    end += seconds
    steps, before = 0, 0
    while due < end:
        sharing.step()
        steps += 1
        total = sum(sharing.service)
        due += _STEP_S + _TOKEN_S * (total - before)
        before = total
        time.sleep(max(0.0, due - time.perf_counter()))
    services = [service / weight for service, weight in zip(sharing.service, weights, strict=True)]
    return {
        "weights": list(weights),
        "max_requests": max_requests,
        "seconds": seconds,
        "steps": steps,
        "service": sharing.service,
        "apart": max(services) / min(services) - 1,
        "places_given_up": sharing.num_swaps,
    }


def measure_shares(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the part `shares`."""
    found = {}
    for name, weights in (("equal", (1.0,) * 16), ("weighted", (1.0, 2.0, 4.0))):
        found[name] = share_for(arguments.seconds, weights, max_requests=8)
        print(f"  {name}: {found[name]['apart']:.2%} apart", flush=True)
    return found


def table(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    lines = ["| what | aim | found |", "|---|---|---|"]
    first = record.get("first")
    if first is not None:
        lines += [
            f"| time to the first token beside a backlog of {record['backlog']} × "
            f"{BACKLOG_TOKENS}, median, in steps of {first['step_p50_s'] * 1e3:.2f} ms "
            f"| ≤ 3 | {first['ttft_p50_steps']:.2f} ({first['ttft_p50_s'] * 1e3:.1f} ms) |",
            f"| its p99 of {first['samples']} "
            f"| ≤ 8 | {first['ttft_p99_steps']:.2f} ({first['ttft_p99_s'] * 1e3:.1f} ms) |",
        ]
    paired = record.get("paired")
    if paired is not None:
        low, high = min(paired["ratios"]), max(paired["ratios"])
        lines.append(
            f"| throughput of fair / fifo, median of {len(paired['ratios'])} turns "
            f"| ≥ 0.98 | {paired['ratio']:.3f} ({low:.3f}–{high:.3f}) |"
        )
    for name, found in record.get("shares", {}).items():
        lines.append(
            f"| {len(found['weights'])} callers, {name}: most / least service for its weight "
            f"after {found['seconds']:g} s | ≤ 1.05 | {1 + found['apart']:.4f} |"
        )
    return "\n".join(lines)


def measure(arguments: argparse.Namespace, record: dict[str, Any]) -> None:
    """Run the parts and record each result."""

    def add(part: str, found: Any) -> None:
        record[part] = rounded(found)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")

    if "first" in arguments.parts:
        print("first: short requests alone, then beside the backlog", flush=True)
        with serving(arguments, "fair") as [server]:
            add("first", asyncio.run(measure_first(server, arguments)))
    if "paired" in arguments.parts:
        print("paired: throughput under fair and under fifo", flush=True)
        with serving(arguments, "fair", "fifo") as servers:
            add("paired", asyncio.run(measure_paired(servers, arguments)))
    if "shares" in arguments.parts:
        print("shares: callers that always wait", flush=True)
        add("shares", measure_shares(arguments))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options; `--quick` is for tests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "models" / "demo"), help="a directory")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--parts", default="first,paired,shares", type=lambda text: text.split(","))
    parser.add_argument("--backlog", type=int, default=500, help="requests that wait or run")
    parser.add_argument(
        "--spread",
        type=int,
        default=0,
        help="how many tokens shorter or longer than 128 they are (default 0: requests that begin "
        "together end together, and a step with prompts is rare)",
    )
    parser.add_argument("--samples", type=int, default=250, help="short requests beside it")
    parser.add_argument("--alone", type=int, default=50, help="short requests before it")
    parser.add_argument(
        "--warm-up", type=float, default=4.0, help="seconds of a load before it counts"
    )
    parser.add_argument("--turns", type=int, default=7, help="pairs that count")
    parser.add_argument("--turn-seconds", type=float, default=12.0, help="of each turn")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each part of shares")
    parser.add_argument("--quick", action="store_true", help="a few of each, for a look")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "fairness.json"
    )
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.backlog, arguments.samples, arguments.alone = 100, 5, 2
        arguments.warm_up, arguments.turns, arguments.turn_seconds = 0.5, 1, 1.0
        arguments.seconds = 1.0
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    arguments = parse(words)
    began = time.monotonic()
    record: dict[str, Any] = {
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "model": Path(arguments.model).name,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "backlog": arguments.backlog,
        "spread": arguments.spread,
        "machine": machine_record(),
        "load_average": os.getloadavg(),
    }
    measure(arguments, record)
    print(f"\n{table(record)}\n")
    print(f"written to {arguments.output}; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
