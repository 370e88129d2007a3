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
import http.client
import json
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import headrace
from headrace.options import build_spec
from headrace.v1 import generation_pb2 as pb

from benchmarks.models import DEMO
from benchmarks.processes import free_port
from benchmarks.records import Record
from benchmarks.rig.load import connect, send
from benchmarks.rig.measurement import Measurement, in_turns, option
from benchmarks.rig.serving import BIN, WAIT_S, Process, process, serve

PROMPT = "Tell me a story about a fox, please."
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
"""The chat template for a checkpoint that has none."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a system.

    Attributes:
        tokens_per_s: of all chats together.
        front_us, between_us: the CPU time per token of the front end, and of what is in front of
            it.
        first_ms: the median time to a single chat's first token.
        resident_mb: the memory of what is in front of the front end.
    """

    tokens_per_s: float
    front_us: float
    between_us: float
    first_ms: float
    resident_mb: float

    @property
    def cpu_us(self) -> float:
        """The sum of both CPU times."""
        return self.front_us + self.between_us


class System(Protocol):
    """Something that is asked for chats."""

    process: Process | None
    """What is in front of the front end; None if nothing is."""

    def chats(self, count: int, tokens: int) -> int:
        """Run this many concurrent chats and return how many tokens arrived."""

    def first(self) -> None:
        """Run a chat until its first token arrives."""


@dataclass(frozen=True, slots=True)
class Chats:
    """The chats of a turn. Implements `Prompts`."""

    tokens: int

    def request(self, number: int) -> pb.GenerationSpec:
        """Return request number 0, 1, …"""
        return build_spec(
            [{"role": "user", "content": f"{PROMPT} {number}"}],
            {"max_tokens": self.tokens, "ignore_eos": True, "temperature": 1.0},
        )


class Grpc:
    """The server itself, with all chats on one session."""

    process: Process | None = None

    def __init__(self, server: Process) -> None:
        self._server = server

    def chats(self, count: int, tokens: int) -> int:
        """Run this many concurrent chats and return how many tokens arrived."""

        async def run() -> int:
            async with connect(self._server) as client, client.session() as session:
                return (await send([session], Chats(tokens), count, count)).output_tokens

        return asyncio.run(run())

    def first(self) -> None:
        """Run a chat until its first token arrives."""
        with headrace.Client(self._server.address) as client, client.session() as session:
            for chunk in session.submit(Chats(2).request(0)):
                if chunk.token_ids:
                    break


class Http:
    """The door or smg, with a connection for each chat."""

    def __init__(self, port: int, process: Process | None = None) -> None:
        self.process = process
        self._port = port

    def chats(self, count: int, tokens: int) -> int:
        """Run this many concurrent chats and return how many tokens arrived."""
        found: list[int] = []

        def one(index: int) -> None:
            for line in self._lines(index, tokens):
                if b'"completion_tokens"' in line:
                    found.append(json.loads(line[6:])["usage"]["completion_tokens"])

        threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(found) < count:
            raise RuntimeError(f"only {len(found)} of {count} chats came to their end")
        return sum(found)

    def first(self) -> None:
        """Run a chat until its first token arrives."""
        with contextlib.closing(self._lines(0, 2)) as lines:
            for line in lines:
                if re.search(rb'"content":"[^"]', line):
                    break

    def _lines(self, index: int, tokens: int) -> Generator[bytes, None, None]:
        body = {
            "model": "it",
            "messages": [{"role": "user", "content": f"{PROMPT} {index}"}],
            "max_tokens": tokens,
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=WAIT_S)
        with contextlib.closing(connection):
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {answer.read(500)!r}")
            yield from answer


def turn(system: System, front: Process, options: argparse.Namespace) -> Turn:
    """Run one turn. front: the front end."""
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
    resident = between.resident_mib() * 2**20 / 1e6 if between else 0.0
    return Turn(got / wall, front_us, between_us, statistics.median(firsts_ms), resident)


@contextlib.contextmanager
def systems(
    options: argparse.Namespace, folder: Path
) -> Iterator[tuple[Process, dict[str, System]]]:
    """Yield the front end, and the systems to compare."""
    door_port, smg_port = free_port(), free_port()
    with contextlib.ExitStack() as stack:
        model = with_template(options.model, folder)
        flags = ("--served-name", "it", "--gateway", "--device", "cpu", *options.server)
        front = stack.enter_context(serve(*flags, model=model))
        words = [str(BIN / "headrace"), "--target", front.address, "openai"]
        words += ["--listen", f"127.0.0.1:{door_port}"]
        door = stack.enter_context(
            process(words, folder / "door.log", is_ready=lambda said: "ready: " in said)
        )
        found: dict[str, System] = {"grpc": Grpc(front), "door": Http(door_port, door)}
        if options.smg is not None:
            words = [str(options.smg), "launch", "--host", "127.0.0.1", "--port", str(smg_port)]
            words += ["--prometheus-port", str(free_port())]
            words += ["--worker-urls", f"grpc://{front.address}"]
            there = Http(smg_port)

            def is_ready(_: str) -> bool:
                with contextlib.suppress(OSError, RuntimeError, http.client.HTTPException):
                    there.first()
                    return True
                return False

            there.process = stack.enter_context(
                process(words, folder / "smg.log", is_ready=is_ready)
            )
            found["smg"] = there
        yield front, found


def with_template(model: Path, folder: Path) -> Path:
    """Return the checkpoint, with a chat template added if it has none."""
    config = json.loads((model / "tokenizer_config.json").read_text())
    if "chat_template" in config or (model / "chat_template.jinja").exists():
        return model
    made = folder / "model"
    made.mkdir()
    for path in model.iterdir():
        (made / path.name).symlink_to(path)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def measure(options: argparse.Namespace, record: Record) -> None:
    """Run all turns."""
    turns: dict[str, list[Turn]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        systems(options, Path(folder)) as (front, there),
    ):
        door = there["door"].process
        assert door is not None
        record.put(door.start_s, "door_start_s")
        for number, name in in_turns(tuple(there), options.turns):
            one = turn(there[name], front, options)
            if number:
                turns.setdefault(name, []).append(one)
                print(f"{number} {name:5} {one}", flush=True)
                told = {each: [asdict(one) for one in ones] for each, ones in turns.items()}
                record.put(told, "turns")
    record.put(summary(turns), "figures")


def table(record: Mapping[str, Any]) -> str:
    """Return the figures as text."""
    lines = [f"the door started in {record['door_start_s']:.2f} s"]
    lines += [f"{name:32} {value:9.3f}" for name, value in record["figures"].items()]
    return "\n".join(lines)


def summary(turns: dict[str, list[Turn]]) -> dict[str, float]:
    """Return the medians of each system, and the door's ratios to the others in the same turns."""
    found = {}
    for each, ones in turns.items():
        for name in (*Turn.__dataclass_fields__, "cpu_us"):
            found[f"{each}: {name}"] = statistics.median(getattr(one, name) for one in ones)
    for other in turns:
        if other == "door":
            continue
        pairs = list(zip(turns["door"], turns[other], strict=True))
        found[f"door / {other}: cpu_us"] = statistics.median(a.cpu_us / b.cpu_us for a, b in pairs)
        found[f"door / {other}: tokens_per_s"] = statistics.median(
            a.tokens_per_s / b.tokens_per_s for a, b in pairs
        )
        found[f"door - {other}: first_ms"] = statistics.median(
            a.first_ms - b.first_ms for a, b in pairs
        )
    return found


MEASUREMENT = Measurement(
    name="openai_cost",
    about=__doc__,
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
    is_kept=False,
)

if __name__ == "__main__":
    MEASUREMENT.run()
