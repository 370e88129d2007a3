from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.languages.rows import ROWS, Row
from benchmarks.languages.turns import CASES, Case, figures, render
from benchmarks.processes import ROOT, Program, SystemFailure
from benchmarks.usage import cpu_seconds
from tests.clients.python.scripted import ScriptedServer

CASE = Case("one", "2 requests on one session", 1, 2, 500, 3)


@pytest.fixture
def server() -> Any:
    running = ScriptedServer()
    yield running
    running.stop()


def play(row: Row, command: tuple[str, ...], server: ScriptedServer, log: Path) -> None:
    words = (*command, server.target, "2", "3", "3")
    with Program(row.name, words, log, row.environment) as program:
        told = [program.ask({}, "tokens", 120.0) for _ in range(2)]
        assert told == [18, 18]  # 2 sessions, 3 requests, 3 tokens
        assert program.peak_bytes > 1 << 20
    assert {spec.text.text for spec in server.specs} == {"Once upon a time"}
    assert {spec.stop.ignore_eos for spec in server.specs} == {True}
    assert len(server.specs) == 12
    assert not server.live


@pytest.mark.parametrize("row", [r for r in ROWS if "python" in r.name], ids=lambda r: r.name)
def test_the_python_programs(row: Row, server: ScriptedServer, tmp_path: Path) -> None:
    play(row, row.command, server, tmp_path / "it.log")


@pytest.mark.skipif(shutil.which("go") is None, reason="needs go")
def test_the_go_program(server: ScriptedServer, tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.name == "go")
    built = tmp_path / "load"
    environment = {**os.environ, **row.environment}
    build = ["go", "build", "-o", str(built), "./cmd/load"]
    subprocess.run(build, cwd=ROOT / "clients" / "go", env=environment, check=True)
    play(row, (str(built),), server, tmp_path / "it.log")


def test_the_java_program(server: ScriptedServer, tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.name == "java")
    built = ROOT / "clients/java/target/test-classes/dev/headrace/conformance/Load.class"
    if not built.exists():
        pytest.skip("not built: make bench-clients and make test-clients build it, in minutes")
    play(row, row.command, server, tmp_path / "it.log")


def test_the_rust_program(server: ScriptedServer, tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.name == "rust")
    folder = Path(row.environment["CARGO_TARGET_DIR"])
    built = [one for kind in ("release", "debug") if (one := folder / kind / "load").exists()]
    if not built:
        pytest.skip("not built: make bench-clients and make test-clients build it, in minutes")
    play(row, (str(built[0]),), server, tmp_path / "it.log")


@pytest.mark.parametrize(
    "code", ["raise SystemExit('it is broken')", "input(); print('it is broken')"]
)
def test_a_program_that_fails_is_told(tmp_path: Path, code: str) -> None:
    with (
        pytest.raises(SystemFailure, match="it is broken"),
        Program("it", (sys.executable, "-c", code), tmp_path / "it.log", {}) as program,
    ):
        program.ask({}, "tokens", 120.0)


def test_cpu_time_has_that_of_threads_that_have_ended() -> None:
    spent, own = cpu_seconds(os.getpid()), time.process_time()
    assert spent == pytest.approx(own, abs=0.1)


def turn(seconds: float, client_s: float, server_s: float) -> dict[str, float]:
    return {"seconds": seconds, "client_s": client_s, "server_s": server_s}


def test_figures() -> None:
    played = {
        "slow": [turn(2.0, 1.0, 0.5), turn(4.0, 1.5, 0.5), turn(1.0, 2.0, 0.5)],
        "fast": [turn(1.0, 0.5, 1.0), turn(1.0, 0.5, 1.0), turn(0.8, 0.5, 1.0)],
    }
    found = figures(CASE, played, {"slow": 3 << 20, "fast": 5 << 20})
    assert found["fast"]["tokens_per_s"] == 1000.0
    assert found["slow"]["tokens_per_s"] == 500.0
    assert found["fast"]["of_fastest"] == 1.0
    assert found["slow"]["of_fastest"] == 0.5  # of 0.5, 0.25 and 0.8
    assert found["slow"]["client_us_per_token"] == 1500.0
    assert found["slow"]["server_us_per_token"] == 500.0
    assert found["slow"]["peak_bytes"] == 3 << 20
    assert len(found["slow"]["turns"]) == 3


def record() -> dict[str, Any]:
    def found(rate: float, share: float) -> dict[str, Any]:
        costs = {"client_us_per_token": 1.25, "server_us_per_token": 12.0}
        return {"tokens_per_s": rate, "of_fastest": share, "peak_bytes": 50 << 20, **costs}

    languages = {"python": found(7000.0, 0.7), "go": found(10000.0, 1.0)}
    return {
        "format": 1,
        "kind": "languages",
        "date": "2026-11-23T12:00:00+00:00",
        "commit": "abc",
        "machine": {"cpus": 2, "cpu": "a CPU"},
        "load_average": [0.25, 1.0, 2.0],
        "cases": [
            {"name": name, "meaning": "64 of them", "languages": languages}
            for name in ("one", "paced", "demo")
        ],
    }


def test_the_tables() -> None:
    told = render(record(), "benchmarks/results/languages.json").splitlines()
    assert told[0] == (
        "2026-11-23, commit abc, 2 CPUs (a CPU), load average 0.2 before. Record: "
        "[`benchmarks/results/languages.json`](../benchmarks/results/languages.json)."
    )
    assert told[2] == "**64 of them, as fast as they come**"
    assert told[6] == "| Go | 10,000 | 1.00 (aim 0.9) | 1.25 | 12 | 50 MiB |"
    assert told[7] == "| Python | 7,000 | 0.70 (aim 0.75, missed) | 1.25 | 12 | 50 MiB |"
    assert "| Go | 1.25 | 12 | 50 MiB |" in told  # at a pace: no throughput
    assert "| Python | 7,000 | 0.70 | 1.25 | 12 | 50 MiB |" in told  # of the demo: no aim


def test_names() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert [case.name for case in CASES] == ["one", "eight", "paced", "demo"]
