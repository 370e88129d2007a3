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

from benchmarks.languages.program import Program
from benchmarks.languages.rows import Row
from benchmarks.measures import paired_ratio
from benchmarks.processes import cpu_seconds
from benchmarks.rig.serving import Process, scripted, serve

_SERVER_CORE, _CLIENT_CORE = 0, 1


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


@dataclass(frozen=True, slots=True)
class Turn:
    """The cost of a turn: seconds, and CPU seconds of the client and of the server."""

    seconds: float
    client_s: float
    server_s: float


def measure_case(case: Case, rows: Sequence[Row], turns: int | None = None) -> dict[str, Any]:
    """Run a case with all languages alternately, and return its part of the record.

    Args:
        case: the case.
        rows: the languages.
        turns: the number of turns that count; None for the case's own number. One more runs first
            and does not count.

    Raises:
        RuntimeError: a process failed, or lost or made up tokens.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(_server(case))
        programs = {
            row.name: stack.enter_context(
                Program.started(
                    (*_pinned(_CLIENT_CORE), *row.command, server.address,
                     *map(str, (case.sessions, case.requests, case.tokens))),
                    row.environment,
                    folder / f"{row.name}.log",
                )
            )
            for row in rows
        }  # fmt: skip
        played: dict[str, list[Turn]] = {name: [] for name in programs}
        for number in range((case.turns if turns is None else turns) + 1):
            for name, program in programs.items():
                one = _turn(case, program, server)
                if number:
                    played[name].append(one)
        peaks = {name: program.peak_bytes for name, program in programs.items()}
    return {**asdict(case), "languages": figures(case, played, peaks)}


def _turn(case: Case, program: Program, server: Process) -> Turn:
    client_s, server_s = cpu_seconds(program.pid), server.cpu_s()
    began = time.perf_counter()
    told = program.play()
    seconds = time.perf_counter() - began
    if told != case.all_tokens:
        raise RuntimeError(f"{program.name}: {told} tokens came of {case.all_tokens}")
    return Turn(seconds, cpu_seconds(program.pid) - client_s, server.cpu_s() - server_s)


def figures(
    case: Case, played: Mapping[str, list[Turn]], peaks: Mapping[str, int]
) -> dict[str, Any]:
    """Summarise the turns of each language. peaks: their peak memory in bytes."""
    rates = {name: [case.all_tokens / t.seconds for t in turns] for name, turns in played.items()}
    fastest = max(rates, key=lambda name: statistics.median(rates[name]))
    return {
        name: {
            "turns": [asdict(turn) for turn in turns],
            "tokens_per_s": statistics.median(rates[name]),
            "of_fastest": paired_ratio(rates[name], rates[fastest]),
            "client_us_per_token": _per_token(case, [turn.client_s for turn in turns]),
            "server_us_per_token": _per_token(case, [turn.server_s for turn in turns]),
            "peak_bytes": peaks[name],
        }
        for name, turns in played.items()
    }


def _per_token(case: Case, seconds: Sequence[float]) -> float:
    return statistics.median(seconds) / case.all_tokens * 1e6


def _pinned(core: int) -> tuple[str, ...]:
    return ("taskset", "--cpu-list", str(core))


def _server(case: Case) -> AbstractContextManager[Process]:
    """Run a server on its core."""
    prefix = _pinned(_SERVER_CORE)
    if case.demo:
        return serve("--in-process", on_socket=True, prefix=prefix)
    requests = case.sessions * case.requests
    return scripted("together", requests, case.tokens, case.per_second, prefix=prefix)
