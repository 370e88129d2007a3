"""Runs servers and load programs as processes, each on one core, and measures their turns.

CPU time is that of a process with all its threads. Memory is the process's high-water mark.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.languages.rows import Row
from benchmarks.measures import compared
from benchmarks.processes import Program, SystemFailure, cpu_seconds
from benchmarks.rig.measurement import Turns, paired
from benchmarks.rig.serving import Process, scripted, serve

_SERVER_CORE, _CLIENT_CORE = 0, 1
_TURN_S = 120.0


@dataclass(frozen=True, slots=True)
class Case:
    """What a turn does.

    Attributes:
        name: its name on the command line and in the record.
        meaning: a description in words.
        sessions, requests, tokens: the size of a turn; requests are per session.
        per_second: the scripted engine's steps per second; 0 for no pause.
        demo: whether the server is the real one with the demo model.
        turns: the number of turns that count.
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
        """How many tokens a turn has."""
        return self.sessions * self.requests * self.tokens


CASES = (
    Case("one", "64 requests on one session", 1, 64, 4000, 5),
    Case("eight", "8 sessions of 64 requests", 8, 64, 400, 5),
    Case("paced", "64 requests on one session, 50 tokens a second each", 1, 64, 125, 2, 50.0),
    Case("demo", "64 requests on one session of the demo server", 1, 64, 256, 3, demo=True),
)


def measure_case(case: Case, rows: Sequence[Row], turns: int | None = None) -> dict[str, Any]:
    """Run a case with all languages in turns, and return its part of the record.

    Args:
        case: the case.
        rows: the languages.
        turns: the number of turns that count; None for the case's own number. One more runs first
            and does not count.

    Raises:
        SystemFailure: a process failed, or lost or made up tokens.
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

    def median(name: str, figure: str) -> float:
        return statistics.median(turn[figure] for turn in played[name])

    fastest = played[min(played, key=lambda name: median(name, "seconds"))]
    return {
        name: {
            "turns": turns,
            "tokens_per_s": statistics.median(case.all_tokens / turn["seconds"] for turn in turns),
            "of_fastest": compared(fastest, turns, "seconds")["median"],
            "client_us_per_token": median(name, "client_s") / case.all_tokens * 1e6,
            "server_us_per_token": median(name, "server_s") / case.all_tokens * 1e6,
            "peak_bytes": peaks[name],
        }
        for name, turns in played.items()
    }


def _pinned(core: int) -> tuple[str, ...]:
    return ("taskset", "--cpu-list", str(core))


def _server(case: Case) -> AbstractContextManager[Process]:
    """Run a server on its core."""
    prefix = _pinned(_SERVER_CORE)
    if case.demo:
        return serve("--in-process", on_socket=True, prefix=prefix)
    requests = case.sessions * case.requests
    return scripted("together", requests, case.tokens, case.per_second, prefix=prefix)
