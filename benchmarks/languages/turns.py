"""How fast the client libraries are, language by language.

    python -m benchmarks languages [--language go …] [--case one …]

A server with a scripted engine has one core, and a language's load program has the other
(`taskset`). The programs of all languages take turns, so that interference affects all of them
alike. A language is a row in `rows`, and a load program next to its driver:

    PROGRAM TARGET SESSIONS REQUESTS TOKENS

It connects a client. For each line on stdin it runs a turn. It opens SESSIONS sessions and submits
REQUESTS requests on each ("Once upon a time", temperature 0, TOKENS tokens, ignoring
end-of-sequence). It reads each request's chunks as its users would, closes the sessions, and prints
{"tokens": how many token ids the chunks had} as a line. At the end of stdin it exits. Time, CPU
time, of all threads, and the high-water mark of memory are measured from outside, in the same way
for all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.languages.rows import ROWS, Row
from benchmarks.markdown import columns, cpus, link
from benchmarks.measures import compared, figure, medians
from benchmarks.processes import Program, SystemFailure
from benchmarks.records import Record
from benchmarks.rig.measurement import Measurement, Turns, option, paired
from benchmarks.rig.serving import Process, scripted, serve
from benchmarks.usage import cpu_seconds

_SERVER_CORE, _CLIENT_CORE = 0, 1
_TURN_S = 120.0


@dataclass(frozen=True, slots=True)
class Case:
    """What a turn does.

    Attributes:
        name: its name on the command line and in the record.
        sessions, requests, tokens: the size of a turn; requests are per session.
        per_second: the scripted engine's steps per second; 0 for no pause.
        demo: whether the server is the real one with the demo model.
    """

    name: str
    meaning: str
    sessions: int
    requests: int
    tokens: int
    turns: int
    per_second: float = 0.0
    demo: bool = False

    @property
    def all_tokens(self) -> int:
        return self.sessions * self.requests * self.tokens


CASES = (
    Case("one", "64 requests on one session", 1, 64, 4000, 5),
    Case("eight", "8 sessions of 64 requests", 8, 64, 400, 5),
    Case("paced", "64 requests on one session, 50 tokens a second each", 1, 64, 125, 2, 50.0),
    Case("demo", "64 requests on one session of the demo server", 1, 64, 256, 3, demo=True),
)


def measure_case(case: Case, rows: Sequence[Row], turns: int | None = None) -> dict[str, Any]:
    """Run a case with all languages in turns, and return its part of the record. turns: how many
    count; None for the case's own number. One more runs first and does not count.

    Raises SystemFailure if a process failed, or lost or made up tokens.
    """
    sizes = tuple(map(str, (case.sessions, case.requests, case.tokens)))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(_server(case))
        programs = {
            row.name: stack.enter_context(
                Program(
                    row.name,
                    (*_pinned(_CLIENT_CORE), *row.command, server.address, *sizes),
                    folder / f"{row.name}.log",
                    row.environment,
                )
            )
            for row in rows
        }
        played = paired(
            tuple(programs),
            case.turns if turns is None else turns,
            lambda name: _turn(case, programs[name], server),
        )
        peaks = {name: program.peak_bytes for name, program in programs.items()}
    return {**asdict(case), "languages": figures(case, played, peaks)}


def _turn(case: Case, program: Program, server: Process) -> dict[str, float]:
    """Run a turn. Returns its seconds, and the CPU seconds of the client and of the server."""
    client_s, server_s = cpu_seconds(program.pid), server.cpu_s()
    began = time.perf_counter()
    told = program.ask({}, "tokens", _TURN_S)
    seconds = time.perf_counter() - began
    if told != case.all_tokens:
        raise SystemFailure(f"{program.name}: {told} tokens came of {case.all_tokens}")
    return {
        "seconds": seconds,
        "client_s": cpu_seconds(program.pid) - client_s,
        "server_s": server.cpu_s() - server_s,
    }


def figures(case: Case, played: Turns, peaks: Mapping[str, int]) -> dict[str, Any]:
    """Summarise the turns of each language. peaks: their peak memory in bytes."""

    middle = {name: medians(turns) for name, turns in played.items()}
    fastest = played[min(played, key=lambda name: middle[name]["seconds"])]
    return {
        name: {
            "turns": turns,
            "tokens_per_s": statistics.median(case.all_tokens / turn["seconds"] for turn in turns),
            "of_fastest": compared(fastest, turns, "seconds")["median"],
            "client_us_per_token": middle[name]["client_s"] / case.all_tokens * 1e6,
            "server_us_per_token": middle[name]["server_s"] / case.all_tokens * 1e6,
            "peak_bytes": peaks[name],
        }
        for name, turns in played.items()
    }


def _pinned(core: int) -> tuple[str, ...]:
    return ("taskset", "--cpu-list", str(core))


def _server(case: Case) -> AbstractContextManager[Process]:
    prefix = _pinned(_SERVER_CORE)
    if case.demo:
        return serve("--in-process", on_socket=True, prefix=prefix)
    requests = case.sessions * case.requests
    return scripted("together", requests, case.tokens, case.per_second, prefix=prefix)


def measure(options: argparse.Namespace, record: Record) -> None:
    if shutil.which("taskset") is None or len(os.sched_getaffinity(0)) < 2:
        raise SystemFailure("needs taskset and two CPUs: the server has one, the client the other")
    rows = []
    for row in ROWS:
        if row.name not in options.language:
            continue
        if missing := row.missing():
            sys.stderr.write(f"{row.title} is left out: {', '.join(missing)} is not here\n")
            continue
        row.make()
        rows.append(row)
    cases: list[dict[str, Any]] = []
    for case in CASES:
        if case.name in options.case:
            cases.append(measure_case(case, rows, options.turns))
            record.put(cases, "cases")


# ---- the tables ----------------------------------------------------------------------------------


def render(record: Mapping[str, Any], name: str) -> str:
    cases = {case["name"]: case for case in record["cases"]}
    parts = [
        f"{record['date'][:10]}, commit {record['commit']}, {cpus(record)}, load average "
        f"{record['load_average'][0]:.1f} before. {link(name)}",
        *(_throughput(cases[key]) for key in ("one", "eight") if key in cases),
        *([_table(cases["paced"], "")] if "paced" in cases else []),
        *([_throughput(cases["demo"], aims=False)] if "demo" in cases else []),
    ]
    return "\n\n".join(parts) + "\n"


Told = tuple[Row, Mapping[str, Any]]
"""A language, and what was found of it in a case."""


def _throughput(case: Mapping[str, Any], *, aims: bool = True) -> str:
    def share(told: Told) -> str:
        row, found = told
        text = f"{found['of_fastest']:.2f}"
        if aims:
            text += f" (aim {row.aim:g}{'' if found['of_fastest'] >= row.aim else ', missed'})"
        return text

    return _table(
        case,
        ", as fast as they come" if aims else "",
        ("tokens/s", lambda told: figure(told[1]["tokens_per_s"])),
        ("of the fastest", share),
    )


def _table(case: Mapping[str, Any], how: str, *more: tuple[str, Callable[[Told], str]]) -> str:
    """Return a case's table, the fastest language first. more: columns before the costs."""
    rows = [(row, case["languages"][row.name]) for row in ROWS if row.name in case["languages"]]
    rows.sort(key=lambda told: -told[1]["tokens_per_s"])
    lines = columns(
        rows,
        ("", lambda told: told[0].title),
        *more,
        ("client, µs CPU a token", lambda told: figure(told[1]["client_us_per_token"])),
        ("server, µs CPU a token", lambda told: figure(told[1]["server_us_per_token"])),
        ("client's peak memory", lambda told: f"{told[1]['peak_bytes'] / 2**20:.0f} MiB"),
    )
    title = f"{case['meaning'][0].upper()}{case['meaning'][1:]}{how}"
    return "\n".join([f"**{title}**", "", *lines])


_LANGUAGES = [row.name for row in ROWS]
_CASES = [case.name for case in CASES]
MEASUREMENT = Measurement(
    name="languages",
    measure=measure,
    render=render,
    options=(
        option("language", _LANGUAGES, nargs="+", choices=_LANGUAGES),
        option("case", _CASES, nargs="+", choices=_CASES),
        option("turns", None, "that count, of each case", type=int),
    ),
)
