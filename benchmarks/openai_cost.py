"""What OpenAI's HTTP API costs: the door beside gRPC on one session, and beside smg.

    this process ──┬──────────── gRPC, one session ────────┐
                   ├── HTTP ── headrace openai ── gRPC ────┼──▶ headrace-server serve --gateway
                   └── HTTP ── smg ── gateways' protocol ──┘

16 concurrent chats run to their full length on one server. The systems take turns in a rotating
order, and results are compared within a turn. CPU time is that of whole processes, all threads,
user and system: of the front end, and of the door or smg. First tokens are those of single chats on
an otherwise idle server. smg is left out if it is not available (`--smg`, its command).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import headrace

from benchmarks.measures import compared, medians
from benchmarks.models import DEMO
from benchmarks.records import Record
from benchmarks.rig.gateways import door, smg, stream_chat, with_template
from benchmarks.rig.load import Chats, connect, send
from benchmarks.rig.measurement import Measurement, Turns, option, paired
from benchmarks.rig.serving import Process, serve

PROMPT = "Tell me a story about a fox, please."
NAME = "it"
"""The server's name of its model."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
"""The chat template for a checkpoint that has none."""


def chats(tokens: int) -> Chats:
    return Chats(lambda number: f"{PROMPT} {number}", tokens, temperature=1.0)


class Grpc:
    """The server itself, with all chats on one session."""

    process = None
    """What is in front of the front end."""

    def __init__(self, server: Process) -> None:
        self._server = server

    def chats(self, count: int, tokens: int) -> int:
        """Run this many concurrent chats and return how many tokens arrived."""

        async def run() -> int:
            async with connect(self._server) as client, client.session() as session:
                return (await send([session], chats(tokens), count, count)).output_tokens

        return asyncio.run(run())

    def first(self) -> None:
        with headrace.Client(self._server.address) as client, client.session() as session:
            for chunk in session.submit(chats(2).request(0)):
                if chunk.token_ids:
                    break


class Http:
    """The door or smg, with a connection for each chat."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def chats(self, count: int, tokens: int) -> int:
        """Run this many concurrent chats and return how many tokens arrived."""
        found: list[int] = []

        def one(index: int) -> None:
            for line in self._lines(index, tokens):
                if b'"completion_tokens"' in line:
                    found.append(json.loads(line[6:])["usage"]["completion_tokens"])

        with ThreadPoolExecutor(count) as threads:
            list(threads.map(one, range(count)))
        if len(found) < count:
            raise RuntimeError(f"only {len(found)} of {count} chats came to their end")
        return sum(found)

    def first(self) -> None:
        with contextlib.closing(self._lines(0, 2)) as lines:
            for line in lines:
                if re.search(rb'"content":"[^"]', line):
                    break

    def _lines(self, index: int, tokens: int) -> Generator[bytes, None, None]:
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": f"{PROMPT} {index}"}],
            "max_tokens": tokens,
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return stream_chat(self.process.port, body)


System = Grpc | Http


def turn(system: System, front: Process, options: argparse.Namespace) -> dict[str, float]:
    """Run one turn.

    Returns tokens_per_s, of all chats together; front_us, between_us and cpu_us, the CPU time a
    token of the front end, of what is in front of it, and of both; first_ms, the median time to a
    single chat's first token; resident_mb, the memory of what is in front of the front end.
    """
    firsts_ms = []
    for _ in range(options.firsts):
        began = time.perf_counter()
        system.first()
        firsts_ms.append((time.perf_counter() - began) * 1e3)
        time.sleep(0.05)  # what the chat left is over
    between = system.process

    def cpu() -> tuple[float, float]:
        return front.cpu_s(), between.cpu_s() if between else 0.0

    before, began = cpu(), time.perf_counter()
    got = system.chats(options.chats, options.tokens)
    wall = time.perf_counter() - began
    front_us, between_us = (
        (now - then) / got * 1e6 for now, then in zip(cpu(), before, strict=True)
    )
    return {
        "tokens_per_s": got / wall,
        "front_us": front_us,
        "between_us": between_us,
        "cpu_us": front_us + between_us,
        "first_ms": statistics.median(firsts_ms),
        "resident_mb": between.resident_mib() * 2**20 / 1e6 if between else 0.0,
    }


@contextlib.contextmanager
def systems(
    options: argparse.Namespace, folder: Path
) -> Iterator[tuple[Process, dict[str, System]]]:
    """Yield the front end, and the systems to compare."""
    with contextlib.ExitStack() as stack:
        flags = ("--served-name", NAME, "--gateway", "--device", "cpu", *options.server)
        front = stack.enter_context(serve(*flags, model=chatting(options.model, folder)))
        before = stack.enter_context(door(front.address, folder / "door.log"))
        found: dict[str, System] = {"grpc": Grpc(front), "door": Http(before)}
        if options.smg is not None:
            there = stack.enter_context(
                smg([front.address], NAME, folder / "smg.log", command=options.smg)
            )
            found["smg"] = Http(there)
        yield front, found


def chatting(model: Path, folder: Path) -> Path:
    """Return the checkpoint, with a chat template added if it has none."""
    config = json.loads((model / "tokenizer_config.json").read_text())
    if "chat_template" in config or (model / "chat_template.jinja").exists():
        return model
    return with_template(model, TEMPLATE, folder / "model")


def measure(options: argparse.Namespace, record: Record) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        systems(options, Path(folder)) as (front, there),
    ):
        before = there["door"].process
        assert before is not None
        record.put(before.start_s, "door_start_s")
        turns = paired(
            tuple(there),
            options.turns,
            lambda name: turn(there[name], front, options),
            lambda turns: record.put(turns, "turns"),
        )
    record.put(summary(turns), "figures")


def table(record: Mapping[str, Any]) -> str:
    lines = [f"the door started in {record['door_start_s']:.2f} s"]
    lines += [f"{name:32} {value:9.3f}" for name, value in record["figures"].items()]
    return "\n".join(lines)


def summary(turns: Turns) -> dict[str, float]:
    """Return the medians of each system, and the door's ratios to the others in the same turns."""
    found = {
        f"{each}: {name}": value
        for each, ones in turns.items()
        for name, value in medians(ones).items()
    }
    ours = turns["door"]
    for other in (each for each in turns if each != "door"):
        for name in ("cpu_us", "tokens_per_s"):
            found[f"door / {other}: {name}"] = compared(ours, turns[other], name)["median"]
        found[f"door - {other}: first_ms"] = statistics.median(
            one["first_ms"] - beside["first_ms"]
            for one, beside in zip(ours, turns[other], strict=True)
        )
    return found


MEASUREMENT = Measurement(
    measure=measure,
    table=table,
    options=(
        option("model", DEMO, type=Path),
        option("smg", None, "smg's command; absent: it is left out", type=Path),
        option("chats", 16),
        option("tokens", 256, "of each chat"),
        option("turns", 5, "that count; one more warms up"),
        option("firsts", 10, "single chats in each turn"),
        option("server", [], "options of the server, after --", nargs="*"),
    ),
)
