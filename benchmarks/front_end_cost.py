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
import statistics
import time
from dataclasses import asdict, dataclass

from headrace.v1 import generation_pb2 as pb

from benchmarks.records import Record
from benchmarks.rig.load import messages
from benchmarks.rig.measurement import Measurement, option
from benchmarks.rig.serving import Process, scripted

KINDS = ("together", "process", "bare")


@dataclass(frozen=True, slots=True)
class Figure:
    """One run.

    Attributes:
        tokens, messages: what the client received during the measurement.
        cpu_s: the CPU time of the server's process during the measurement.
    """

    tokens: int
    messages: int
    cpu_s: float
    wall_s: float

    @property
    def microseconds(self) -> float:
        """The CPU time per token."""
        return self.cpu_s / self.tokens * 1e6


def session(server: Process, count: int, steps: int) -> Figure:
    """Run one session, measured from the first token until only the last step's tokens are
    missing.
    """
    specs = (
        pb.GenerationSpec(
            request_id=f"request-{index}",
            text=pb.TextInput(text="Once upon a time"),
            stop=pb.StopOptions(max_tokens=1 << 19),
        )
        for index in range(count)
    )
    first = tokens = seen = 0
    began = cpu = 0.0
    figure = None
    for message in messages(server.address, specs):
        new = sum(len(event.delta.token_ids) for event in message.events)
        if not began and new:
            first, began, cpu = new, time.perf_counter(), server.cpu_s()
            continue
        tokens += new
        seen += bool(new)
        if figure is None and first + tokens >= count * (steps - 1):
            used = server.cpu_s() - cpu
            figure = Figure(tokens, seen, used, time.perf_counter() - began)
    if figure is None:
        raise RuntimeError(f"only {first + tokens} tokens came")
    return figure


def sessions(options: argparse.Namespace, kind: str, per_second: float) -> list[Figure]:
    """Measure several sessions of one server; the first does not count."""
    steps = int(per_second * options.seconds) or options.steps
    with scripted(kind, options.requests, steps, per_second) as server:
        return [session(server, options.requests, steps) for _ in range(options.repeats + 1)][1:]


def measure(options: argparse.Namespace, record: Record) -> None:
    for kind in options.kinds:
        for per_second in (options.rate, 0.0):
            figures = sessions(options, kind, per_second)
            costs = [figure.microseconds for figure in figures]
            messages = sum(figure.messages for figure in figures)
            row = {
                "median_us_per_token": statistics.median(costs),
                "us_per_token": costs,
                "tokens_per_message": sum(figure.tokens for figure in figures) / messages,
                "sessions": [asdict(one) for one in figures],
            }
            record.put(row, "runs", kind, f"{per_second:.0f}" if per_second else "unpaced")


MEASUREMENT = Measurement(
    measure=measure,
    options=(
        option("requests", 64, "on one session"),
        option("rate", 50.0, "steps a second, where paced"),
        option("seconds", 6.0, "of a paced session"),
        option("steps", 1500, "of an unpaced session"),
        option("repeats", 3, "sessions that count"),
        option("kinds", KINDS, nargs="+", choices=KINDS),
    ),
)
