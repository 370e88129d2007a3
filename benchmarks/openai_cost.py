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
import contextlib
import http.client
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from benchmarks.front_end_cost import cpu_seconds
from benchmarks.gateway import free_port
from benchmarks.models import DEMO
from benchmarks.processes import ROOT
from benchmarks.records import machine_record

WAIT_S = 180.0
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


class Grpc:
    """The server itself, with all chats on one session."""

    pid = 0

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target)

    def chats(self, count: int, tokens: int) -> int:
        """Run this many concurrent chats and return how many tokens arrived."""
        return sum(len(event.delta.token_ids) for event in self._events(count, tokens))

    def first(self) -> None:
        """Run a chat until its first token arrives."""
        for event in self._events(1, 2):
            if event.delta.token_ids:
                break

    def _events(self, count: int, tokens: int) -> Iterator[pb.ResultEvent]:
        left, over = count, threading.Event()

        def commands() -> Iterator[rpc.StreamResultRequest]:
            for index in range(count):
                spec = pb.GenerationSpec()
                spec.chat.messages.add(role=pb.CHAT_ROLE_USER, content=f"{PROMPT} {index}")
                spec.stop.max_tokens, spec.stop.ignore_eos = tokens, True
                spec.sampling.temperature = 1.0
                yield rpc.StreamResultRequest(command_id=index + 1, add=rpc.AddCommand(spec=spec))
            over.wait(WAIT_S)

        call = GenerationServiceStub(self._channel).StreamResult(commands(), timeout=WAIT_S)
        try:
            for message in call:
                for event in message.events:
                    if event.HasField("failed"):
                        raise RuntimeError(f"a request failed: {event.failed}")
                    yield event
                    left -= event.HasField("finished")
                if not left:
                    break
        finally:
            over.set()
            call.cancel()


class Http:
    """The door or smg, with a connection for each chat."""

    def __init__(self, port: int, pid: int, model: str) -> None:
        self.pid = pid
        self._port = port
        self._model = model

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

    def _lines(self, index: int, tokens: int) -> Iterator[bytes]:
        body = {
            "model": self._model,
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


System = Grpc | Http


def measure(system: System, front: int, count: int, tokens: int, firsts: int) -> Turn:
    """Run one turn. front: the front end's process."""
    firsts_ms = []
    for _ in range(firsts):
        began = time.perf_counter()
        system.first()
        firsts_ms.append((time.perf_counter() - began) * 1e3)
        time.sleep(0.05)  # what the chat left is over
    pids = (front, system.pid)
    cpu, began = [cpu_seconds(pid) if pid else 0.0 for pid in pids], time.perf_counter()
    got = system.chats(count, tokens)
    wall = time.perf_counter() - began
    used = [
        (cpu_seconds(pid) - before) / got * 1e6 if pid else 0.0
        for pid, before in zip(pids, cpu, strict=True)
    ]
    resident = psutil.Process(system.pid).memory_info().rss / 1e6 if system.pid else 0.0
    return Turn(got / wall, *used, statistics.median(firsts_ms), resident)


# ---- processes -----------------------------------------------------------------------------------


@contextlib.contextmanager
def process(
    command: Sequence[str], log: Path, ready: Callable[[str], bool]
) -> Iterator[tuple[int, float]]:
    """Run a process until it is ready. Yield its id, and the seconds that its start took."""
    began = time.perf_counter()
    with log.open("wb") as file:
        running = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    try:
        while not ready(said := log.read_text(errors="replace")):
            if running.poll() is not None or time.perf_counter() - began > WAIT_S:
                raise RuntimeError(f"{command[0]} did not start:\n{said[-2000:]}")
            time.sleep(0.02)
        yield running.pid, time.perf_counter() - began
    finally:
        running.terminate()
        running.wait(30)


@contextlib.contextmanager
def systems(
    model: Path, smg: Path | None, folder: Path, options: Sequence[str]
) -> Iterator[tuple[int, dict[str, System], float]]:
    """Yield the front end's process, the systems to compare, and how many seconds the door took to
    start.
    """
    bin_, port = Path(sys.executable).parent, free_port()
    target = f"127.0.0.1:{port}"
    serve = [str(bin_ / "headrace-server"), "serve", "--model", str(model), "--served-name", "it"]
    serve += ["--gateway", "--device", "cpu", "--listen", target, *options]
    door_port, smg_port = free_port(), free_port()
    door = [str(bin_ / "headrace"), "--target", target, "openai"]
    door += ["--listen", f"127.0.0.1:{door_port}"]
    with contextlib.ExitStack() as stack:
        front, _ = stack.enter_context(
            process(serve, folder / "server.log", lambda said: "Stop it with" in said)
        )
        door_pid, start_s = stack.enter_context(
            process(door, folder / "door.log", lambda said: "ready: " in said)
        )
        found: dict[str, System] = {"grpc": Grpc(target), "door": Http(door_port, door_pid, "it")}
        if smg is not None:
            launch = [str(smg), "launch", "--host", "127.0.0.1", "--port", str(smg_port)]
            launch += ["--prometheus-port", str(free_port()), "--worker-urls", f"grpc://{target}"]
            there = Http(smg_port, 0, "it")

            def ready(_: str) -> bool:
                with contextlib.suppress(OSError, RuntimeError, http.client.HTTPException):
                    there.first()
                    return True
                return False

            there.pid, _ = stack.enter_context(process(launch, folder / "smg.log", ready))
            found["smg"] = there
        yield front, found, start_s


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


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--smg", type=Path, help="smg's command; absent: it is left out")
    parser.add_argument("--chats", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="of each chat")
    parser.add_argument("--turns", type=int, default=5, help="that count; one more warms up")
    parser.add_argument("--firsts", type=int, default=10, help="single chats in each turn")
    parser.add_argument("--output", type=Path, help="write the record to this JSON file")
    parser.add_argument("server", nargs="*", help="options of the server, after --")
    arguments = parser.parse_args()

    turns: dict[str, list[Turn]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = with_template(arguments.model, folder)
        with systems(model, arguments.smg, folder, arguments.server) as (front, there, start_s):
            order = list(there)
            for number in range(arguments.turns + 1):
                for each in order[number % len(order) :] + order[: number % len(order)]:
                    one = measure(
                        there[each], front, arguments.chats, arguments.tokens, arguments.firsts
                    )
                    if number:
                        turns.setdefault(each, []).append(one)
                        print(f"{number} {each:5} {one}", flush=True)
    figures = summary(turns)
    print(f"\nthe door started in {start_s:.2f} s")
    for name, value in figures.items():
        print(f"{name:32} {value:9.3f}")
    if arguments.output is not None:
        record: dict[str, Any] = {
            "workload": f"{arguments.chats} chats at once, {arguments.tokens} tokens each",
            "model": arguments.model.name,
            "door_start_s": start_s,
            "figures": figures,
            "turns": {each: [asdict(one) for one in ones] for each, ones in turns.items()},
            "machine": machine_record(),
        }
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")


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


if __name__ == "__main__":
    main()
