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
import os
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from headrace.cli.bench.prompts import Lengths

from benchmarks.markdown import Aim, aims
from benchmarks.measures import compared, ratio_span
from benchmarks.processes import free_port
from benchmarks.records import Record
from benchmarks.rig.load import Calls, Stories, connect, loaded, measured, running, until
from benchmarks.rig.measurement import DTYPE, MODEL, THREADS, Measurement, option, paired
from benchmarks.rig.serving import WAIT_S, Process, flags_of, serve

OFF, ON, AGAIN = "off", "on", "again"
TOKENS, SPREAD = 96, 48
"""How many tokens a request generates, and how many more or fewer."""
_EXPORT_S = 5.0


def server(
    options: argparse.Namespace, address: str = "", port: int = 0
) -> contextlib.AbstractContextManager[Process]:
    """Run a server, with all telemetry if a receiver's address and a page's port are given."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL")}
    if address:
        environment |= {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{address}",
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_METRICS_EXPORTER": "otlp,prometheus",
            "OTEL_METRIC_EXPORT_INTERVAL": str(round(_EXPORT_S * 1000)),
            "OTEL_EXPORTER_PROMETHEUS_HOST": "127.0.0.1",
            "OTEL_EXPORTER_PROMETHEUS_PORT": str(port),
        }
    flags = flags_of(options, "--no-prefix-cache")
    return serve(*flags, model=options.model, environment=environment)


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


async def keep_scraping(port: int) -> None:
    """Scrape the page as Prometheus does. port: 0 if there is none."""
    page = f"http://127.0.0.1:{port}/metrics"

    def scrape() -> int:
        with urllib.request.urlopen(page, timeout=WAIT_S) as answer:
            return len(answer.read())

    while port:
        if not await asyncio.to_thread(scrape):
            raise RuntimeError("the page is empty")
        await asyncio.sleep(_EXPORT_S)


async def turn(server: Process, port: int, options: argparse.Namespace) -> dict[str, float]:
    """Run an endless load and return what the server did meanwhile."""
    stories = Stories(Lengths(TOKENS - SPREAD, TOKENS + SPREAD), seed=7)
    async with connect(server) as client, connect(server) as operator:
        async with loaded(Calls(client), stories, options.requests), running(keep_scraping(port)):
            await asyncio.sleep(options.warm_up)
            found = await measured(operator, server, options.turn_seconds)
        await until(operator, lambda now: not now.engine.running)
    return {
        "tokens_per_s": found["generated_per_s"],
        **{name: found[name] for name in ("requests_per_s", "steps_per_s", "cpu_us_per_token")},
    }


def measure(options: argparse.Namespace, record: Record) -> None:
    with receiver() as (address, received), contextlib.ExitStack() as stack:
        telemetry = {OFF: ("", 0), ON: (address, free_port()), AGAIN: ("", 0)}
        servers = {
            kind: stack.enter_context(server(options, *more)) for kind, more in telemetry.items()
        }
        turns = paired(
            tuple(servers),
            options.turns,
            lambda kind: asyncio.run(turn(servers[kind], telemetry[kind][1], options)),
            lambda turns: record.put(turns, "turns"),
        )
    record.put({"spans": received[0], "metrics": received[1]}, "received_bytes")
    record.data |= ratios(turns)


def ratios(turns: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Return the ratios to `off`, turn by turn, and their medians."""
    return {
        f"{kind}_{figure}": compared(turns[kind], turns[OFF], figure)
        for kind in (ON, AGAIN)
        for figure in ("tokens_per_s", "cpu_us_per_token")
    }


def table(record: Mapping[str, Any]) -> str:
    rows = [
        Aim(what, record[name]["median"], ratio_span(record[name]["ratios"]), least)
        for name, what, least in (
            ("on_tokens_per_s", "throughput, everything on / off", 0.98),
            ("again_tokens_per_s", "throughput, off / off (the noise)", None),
            ("on_cpu_us_per_token", "CPU time of the front end a token, on / off", None),
            ("again_cpu_us_per_token", "CPU time of the front end a token, off / off", None),
        )
    ]
    turns, requests = (record["options"][name] for name in ("turns", "requests"))
    return aims(rows, f"medians of {turns} turns, {requests} requests at a time")


MEASUREMENT = Measurement(
    measure=measure,
    table=table,
    options=(
        *(MODEL, DTYPE, THREADS),
        option("requests", 64, "at a time"),
        option("warm_up", 3.0, "seconds before it counts"),
        option("turns", 9, "that count"),
        option("turn_seconds", 12.0, "of each server's turn"),
    ),
    quick={"requests": 8, "warm_up": 0.5, "turns": 1, "turn_seconds": 1.0},
)
