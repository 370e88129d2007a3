"""What the front end costs: CPU time of its process for each token, text included.

    scripted engine ──steps──▶ service (front end's process) ──one session──▶ this process

There are 64 requests on one session, and each step gives each of them one token of a real text. The
service is real. All CPU time of its process is measured, user and system, over all threads, from
the first to the last step. There are three servers (`benchmarks.scripted_engine`). `together` has
the engine in the same process, so the engine's work counts, too. `process` has the engine behind
the real socket, as in `headrace-server serve`. `bare` has no service, only gRPC and protobuf, to
measure the rest. Each runs paced like an engine, and without pauses. Without pauses, several steps
are merged in one message, as for a slow reader.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from benchmarks.records import cpu_name

KINDS = ("together", "process", "bare")


@dataclass(frozen=True, slots=True)
class Figure:
    """One run.

    Attributes:
        tokens, messages: what the client received during the measurement.
        cpu_s: the CPU time of the server's process during the measurement.
        wall_s: the duration of the measurement.
    """

    tokens: int
    messages: int
    cpu_s: float
    wall_s: float

    @property
    def microseconds(self) -> float:
        """The CPU time per token."""
        return self.cpu_s / self.tokens * 1e6


@contextmanager
def server(
    address: str, kind: str, count: int, steps: int, per_second: float
) -> Iterator[subprocess.Popen[str]]:
    """Run a server's process and wait until it serves."""
    numbers = (str(count), str(steps), str(per_second))
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.scripted_engine", address, kind, *numbers],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        while "Stop it with" not in (line := process.stderr.readline()):
            if not line:
                raise RuntimeError(f"the {kind} server did not start")
        yield process
    finally:
        process.send_signal(signal.SIGKILL if kind == "bare" else signal.SIGTERM)
        process.communicate(timeout=30)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, in ns resolution."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def session(address: str, pid: int, count: int, steps: int) -> Figure:
    """Run one session, measured from the first token until only the last step's tokens are
    missing.
    """

    def commands() -> Iterator[rpc.StreamResultRequest]:
        for index in range(count):
            spec = pb.GenerationSpec(
                request_id=f"request-{index}",
                text=pb.TextInput(text="Once upon a time"),
                stop=pb.StopOptions(max_tokens=1 << 19),
            )
            yield rpc.StreamResultRequest(command_id=index + 1, add=rpc.AddCommand(spec=spec))

    first = tokens = messages = 0
    began = cpu = 0.0
    figure = None
    with grpc.insecure_channel(address) as channel:
        for message in GenerationServiceStub(channel).StreamResult(commands()):
            new = sum(len(event.delta.token_ids) for event in message.events)
            if not began and new:
                first, began, cpu = new, time.perf_counter(), cpu_seconds(pid)
                continue
            tokens += new
            messages += bool(new)
            if figure is None and first + tokens >= count * (steps - 1):
                used = cpu_seconds(pid) - cpu
                figure = Figure(tokens, messages, used, time.perf_counter() - began)
    if figure is None:
        raise RuntimeError(f"only {first + tokens} tokens came")
    return figure


def measure(arguments: argparse.Namespace, kind: str, per_second: float) -> list[Figure]:
    """Measure several sessions of one server; the first does not count."""
    steps = int(per_second * arguments.seconds) or arguments.steps
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{directory}/s"
        with server(address, kind, arguments.requests, steps, per_second) as process:
            return [
                session(address, process.pid, arguments.requests, steps)
                for _ in range(arguments.repeats + 1)
            ][1:]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64, help="on one session")
    parser.add_argument("--rate", type=float, default=50.0, help="steps a second, where paced")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a paced session")
    parser.add_argument("--steps", type=int, default=1500, help="of an unpaced session")
    parser.add_argument("--repeats", type=int, default=3, help="sessions that count")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--output", type=Path, help="write the record to this JSON file")
    arguments = parser.parse_args()

    print(f"{'server':10} {'steps/s':>8} {'µs CPU/token':>13} {'runs':>22} {'tokens/message':>15}")
    runs = []
    for kind in arguments.kinds:
        for per_second in (arguments.rate, 0.0):
            figures = measure(arguments, kind, per_second)
            costs = [figure.microseconds for figure in figures]
            merged = sum(f.tokens for f in figures) / sum(f.messages for f in figures)
            pace = f"{per_second:.0f}" if per_second else "unpaced"
            each = " ".join(f"{cost:.1f}" for cost in costs)
            median = statistics.median(costs)
            print(f"{kind:10} {pace:>8} {median:13.1f} {each:>22} {merged:15.0f}", flush=True)
            runs.append(
                {
                    "server": kind,
                    "steps_per_second": per_second or None,
                    "median_us_per_token": median,
                    "sessions": [asdict(figure) for figure in figures],
                }
            )
    if arguments.output is not None:
        record = {
            "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
            "workload": f"{arguments.requests} requests on one session, a token each a step, text",
            "runs": runs,
            "load_average": os.getloadavg(),
            "machine": {
                "cpu": cpu_name(),
                "cpus": os.cpu_count(),
                "python": platform.python_version(),
            },
            "versions": {
                name: importlib.metadata.version(name)
                for name in ("grpcio", "protobuf", "msgspec", "headrace-server")
            },
        }
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")
        print(f"\nwritten to {arguments.output}")


if __name__ == "__main__":
    main()
