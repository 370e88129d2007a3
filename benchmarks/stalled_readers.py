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
import statistics
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import headrace
from headrace.cli.bench.prompts import Lengths

from benchmarks import markdown
from benchmarks.measures import medians
from benchmarks.records import Record
from benchmarks.rig.load import OWN_CONNECTION, Calls, Stories, connect, send, until
from benchmarks.rig.measurement import DTYPE, MODEL, THREADS, Measurement, option
from benchmarks.rig.serving import Process, flags_of, serve

SMALL_WINDOW = (
    *OWN_CONNECTION,
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024),
)
"""The stalled clients' window. The less the connection takes, the sooner the server is blocked."""


async def settled(operator: headrace.AsyncClient, stalled: int) -> None:
    """Wait until all stalled requests are paused permanently. Until the connections are full, a
    paused request resumes from time to time.
    """
    generated = -1

    def is_quiet(now: Any) -> bool:
        nonlocal generated
        before, generated = generated, now.engine.generated_tokens
        return bool(now.engine.held == stalled and generated == before)

    await until(operator, is_quiet, every_s=2.0)


async def measure_live(server: Process, options: argparse.Namespace, seed: int) -> float:
    """Return the median time per token over all live clients, in seconds."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(server)) for _ in range(options.live)]
        stories = Stories(Lengths(options.tokens, options.tokens), seed)
        requests = options.live * options.requests
        tally = await send([Calls(one) for one in clients], stories, requests, options.live)
    return tally.itl.percentile(50) or 0.0


async def stall(stack: AsyncExitStack, server: Process, count: int) -> None:
    """Open streams that are read once, each on a separate connection."""
    for _ in range(count):
        client = await stack.enter_async_context(connect(server, options=SMALL_WINDOW))
        stream = await stack.enter_async_context(
            client.stream("Once upon a time", max_tokens=100_000, ignore_eos=True, logprobs=20)
        )
        await anext(stream)


async def turn(server: Process, options: argparse.Namespace, number: int) -> dict[str, float]:
    def memory(when: str) -> dict[str, float]:
        return {f"{name}_{when}_mib": size / 2**20 for name, size in server.memory().items()}

    found = memory("before")
    found["alone_s"] = await measure_live(server, options, 2 * number)
    async with connect(server) as operator:
        async with AsyncExitStack() as stack:
            await stall(stack, server, options.stalled)
            await settled(operator, options.stalled)
            found |= memory("stalled")
            holds = (await operator.control.statistics()).engine.holds
            found["beside_s"] = await measure_live(server, options, 2 * number + 1)
            after = (await operator.control.statistics()).engine
            if (after.held, after.holds) != (options.stalled, holds):
                raise RuntimeError("not all stalled requests stayed held")
        await until(operator, lambda now: now.front_end.live_requests == 0)
    return found


def measure(options: argparse.Namespace, record: Record) -> None:
    turns = []
    bounds = ("--max-unread-tokens", str(options.max_unread_tokens), "--max-hold", "3600")
    with serve(*flags_of(options, *bounds), model=options.model) as server:
        for number in range(options.repeats + 1):
            turns.append(asyncio.run(turn(server, options, number)))
            said = ", ".join(f"{name} {value:.4g}" for name, value in turns[-1].items())
            print(f"  turn {number}: {said}", flush=True)
            record.put(turns, "turns")
    ratios = [one["beside_s"] / one["alone_s"] for one in turns[1:]]
    record.put({"ratios": ratios, "median": statistics.median(ratios)}, "ratio")


def table(record: Mapping[str, Any]) -> str:
    """Return the record as Markdown. The first turn's times do not count."""
    turns = record["turns"]
    middle = medians(turns[1:])
    alone, beside = (f"{middle[name] * 1e3:.3f}" for name in ("alone_s", "beside_s"))
    rows = [["ms per token, median", alone, beside, f"{record['ratio']['median']:.3f}"]]
    for name in ("front_end", "engine"):
        first = turns[0][f"{name}_before_mib"]
        most = max(turn[f"{name}_stalled_mib"] for turn in turns)
        label = f"resident memory of the {name.replace('_', ' ')}, MiB"
        rows.append([label, f"{first:.0f}", f"{most:.0f}", f"{most / first:.2f}"])
    return "\n".join(markdown.table(" | alone | beside | ratio", rows))


MEASUREMENT = Measurement(
    measure=measure,
    table=table,
    options=(
        *(MODEL, DTYPE, THREADS),
        option("live", 16, "clients that read"),
        option("stalled", 100, "streams that do not"),
        option("requests", 3, "of each live client in a turn"),
        option("tokens", 96, "of each of these requests"),
        option("max_unread_tokens", 256, "the server's bound"),
        option("repeats", 4, "turns that count"),
    ),
)
