"""What telemetry costs: throughput and CPU time with everything on, beside everything off
(`make bench-telemetry`, about eight minutes).

    off, again ── headrace-server serve without telemetry; `again` repeats it, so their ratio shows
                  how much noise the machine adds to a ratio
    on ────────── the same with a span for each call and request and all metrics, sent by OTLP to a
                  receiver that throws them away, and Prometheus' page, which is scraped

64 concurrent callers repeatedly request about 96 tokens each over GenerateStream. In a turn, they
do so on one server after the other. The order changes with each turn, since a machine's speed
drifts. The engine counts the tokens. The CPU time is that of the front end's process, where
telemetry runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import headrace

from benchmarks.fairness import WAIT_S, Caller, figures, running
from benchmarks.front_end_cost import cpu_seconds
from benchmarks.processes import ROOT
from benchmarks.records import commit, machine_record, rounded
from benchmarks.stalled_readers import free_port

OFF, ON, AGAIN = "off", "on", "again"
TOKENS, SPREAD = 96, 48
"""How many tokens a request generates, and how many more or fewer."""
_EXPORT_S = 5.0
_OUTPUT = ROOT / "benchmarks" / "results" / "telemetry.json"


class Server:
    """`headrace-server serve` with the demo model."""

    def __init__(self, arguments: argparse.Namespace, kind: str, receiver: str) -> None:
        self.kind = kind
        self.address = f"127.0.0.1:{free_port()}"
        self.page = f"http://127.0.0.1:{free_port()}/metrics" if kind == ON else ""
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("OTEL_")
        }
        if kind == ON:
            milliseconds = str(round(_EXPORT_S * 1000))
            environment |= {
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{receiver}",
                "OTEL_TRACES_EXPORTER": "otlp",
                "OTEL_METRICS_EXPORTER": "otlp,prometheus",
                "OTEL_METRIC_EXPORT_INTERVAL": milliseconds,
                "OTEL_EXPORTER_PROMETHEUS_HOST": "127.0.0.1",
                "OTEL_EXPORTER_PROMETHEUS_PORT": self.page.rpartition(":")[2].partition("/")[0],
            }
        command = [
            str(Path(sys.executable).with_name("headrace-server")), "serve",
            "--model", arguments.model, "--listen", self.address, "--dtype", arguments.dtype,
            "--device", "cpu", "--threads", str(arguments.threads), "--log-level", "warning",
            "--no-prefix-cache",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def wait_until_ready(self) -> None:
        """Wait until the model is loaded."""
        with headrace.Client(self.address) as client:
            client.wait_until_ready(timeout=WAIT_S)

    def end(self) -> None:
        """Stop the server."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(WAIT_S)


@contextlib.contextmanager
def receiver() -> Iterator[tuple[str, list[int]]]:
    """Run an OTLP receiver that only counts the bytes of spans and metrics."""
    received = [0, 0]

    class Handler(grpc.GenericRpcHandler):
        """Accepts every method without parsing the exported message."""

        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
            kind = 0 if "TraceService" in str(details.method) else 1

            def take(message: bytes, _context: object) -> bytes:
                received[kind] += len(message)
                return b""

            return grpc.unary_unary_rpc_method_handler(take)

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Handler()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield address, received
    finally:
        server.stop(None).wait()


async def keep_asking(caller: Caller, chance: random.Random) -> None:
    """Send one request after the other."""
    while True:
        await caller.first_token(TOKENS + chance.randint(-SPREAD, SPREAD))


async def keep_scraping(page: str) -> None:
    """Scrape the page as Prometheus does."""

    def scrape() -> int:
        with urllib.request.urlopen(page, timeout=WAIT_S) as answer:
            return len(answer.read())

    while page:
        if not await asyncio.to_thread(scrape):
            raise RuntimeError("the page is empty")
        await asyncio.sleep(_EXPORT_S)


async def turn(server: Server, arguments: argparse.Namespace) -> dict[str, float]:
    """Run an endless load and return the tokens per second, as the engine counts them."""
    chance = random.Random(7)
    async with Caller(server, "caller") as caller, Caller(server, "operator") as operator:
        asking = [keep_asking(caller, chance) for _ in range(arguments.requests)]
        async with running(*asking, keep_scraping(server.page)):
            await asyncio.sleep(arguments.warm_up)
            before, began = (await figures(operator)).engine, time.perf_counter()
            cpu = cpu_seconds(server.process.pid)
            await asyncio.sleep(arguments.turn_seconds)
            after, seconds = (await figures(operator)).engine, time.perf_counter() - began
            cpu = cpu_seconds(server.process.pid) - cpu
        while (await figures(operator)).engine.running:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.05)
    tokens = after.generated_tokens - before.generated_tokens
    return {
        "tokens_per_s": tokens / seconds,
        "requests_per_s": (after.requests_finished - before.requests_finished) / seconds,
        "steps_per_s": (after.steps - before.steps) / seconds,
        "cpu_us_per_token": cpu / tokens * 1e6,
    }


async def measure(servers: Sequence[Server], arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all turns; the first one warms up and does not count."""
    turns: dict[str, list[dict[str, float]]] = {server.kind: [] for server in servers}
    for number in range(arguments.turns + 1):
        shift = number % len(servers)
        for server in (*servers[shift:], *servers[:shift]):
            found = await turn(server, arguments)
            if number:
                turns[server.kind].append(found)
        if number:
            said = ", ".join(
                f"{kind} {found[-1]['tokens_per_s']:.0f} tok/s "
                f"({found[-1]['cpu_us_per_token']:.1f} µs)"
                for kind, found in turns.items()
            )
            print(f"  turn {number}: {said}", flush=True)
    return {"turns": turns, **compared(turns)}


def compared(turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the ratios to `off`, turn by turn, and their medians."""
    found: dict[str, Any] = {}
    for kind in (ON, AGAIN):
        for figure in ("tokens_per_s", "cpu_us_per_token"):
            ratios = [
                one[figure] / off[figure] for one, off in zip(turns[kind], turns[OFF], strict=True)
            ]
            found[f"{kind}_{figure}"] = {"ratios": ratios, "median": statistics.median(ratios)}
    return found


def table(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    lines = [
        f"| medians of {record['arguments']['turns']} turns, "
        f"{record['arguments']['requests']} requests at a time | aim | found |",
        "|---|---|---|",
    ]
    for name, what, aim in (
        ("on_tokens_per_s", "throughput, everything on / off", "≥ 0.98"),
        ("again_tokens_per_s", "throughput, off / off (the noise)", ""),
        ("on_cpu_us_per_token", "CPU time of the front end a token, on / off", ""),
        ("again_cpu_us_per_token", "CPU time of the front end a token, off / off", ""),
    ):
        ratios = record[name]["ratios"]
        found = f"{record[name]['median']:.3f} ({min(ratios):.3f}–{max(ratios):.3f})"
        lines.append(f"| {what} | {aim} | {found} |")
    return "\n".join(lines)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options; `--quick` is for tests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "models" / "demo"), help="a directory")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--requests", type=int, default=64, help="at a time")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before it counts")
    parser.add_argument("--turns", type=int, default=9, help="that count")
    parser.add_argument("--turn-seconds", type=float, default=12.0, help="of each server's turn")
    parser.add_argument("--quick", action="store_true", help="one short turn, for a look")
    parser.add_argument("--output", type=Path, default=_OUTPUT)
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.requests, arguments.warm_up = 8, 0.5
        arguments.turns, arguments.turn_seconds = 1, 1.0
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    arguments = parse(words)
    began = time.monotonic()
    record: dict[str, Any] = {
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "arguments": {
            "model": Path(arguments.model).name, "dtype": arguments.dtype,
            "threads": arguments.threads, "requests": arguments.requests,
            "turns": arguments.turns, "turn_seconds": arguments.turn_seconds,
        },
        "machine": machine_record(),
        "load_average": os.getloadavg(),
    }  # fmt: skip
    with receiver() as (address, received):
        servers = [Server(arguments, kind, address) for kind in (OFF, ON, AGAIN)]
        try:
            for server in servers:
                server.wait_until_ready()
            record |= rounded(asyncio.run(measure(servers, arguments)))
        finally:
            for server in servers:
                server.end()
        record["received_bytes"] = {"spans": received[0], "metrics": received[1]}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{table(record)}\n")
    print(f"written to {arguments.output}; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
