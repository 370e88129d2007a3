"""The checks that come before all figures: a few that always run, and tests/gpu through pytest."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import COMPLETE, FAILED, OUT_OF_TIME, QUICK, Part
from benchmarks.processes import ROOT, System, SystemFailure

MODULE = "benchmarks.adapters.checks"
PYTEST = "tests/gpu"
MOST_FAILURES = 10


class ChecksFailed(Exception):
    """Nothing is to be measured; the message says what failed."""


def quick_checks(part: Part, device: str, logs: Path, seconds: float) -> None:
    """Those that always run. Raises ChecksFailed."""
    log = logs / "checks.log"
    system = System("checks", MODULE, sys.executable, log, {})
    try:
        system.load({"device": device, "threads": 1}, seconds)
        rows: list[dict[str, Any]] = system.run({"requests": []}, seconds)
    except SystemFailure as failure:
        rows = [{"key": "checks", "state": FAILED, "detail": str(failure)[:400]}]
    finally:
        system.end(5.0)
    for row in rows:
        part.put(row)
    _stop_at_failures(part)
    part.end(QUICK)


def pytest_checks(part: Part, device: str, logs: Path, seconds: float) -> None:
    """tests/gpu. Raises ChecksFailed; out of time is no failure, and noted."""
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    why = f"{' and '.join(missing)} cannot be imported here" if missing else None
    if device == "cpu":
        why = "needs a CUDA device"
    if why is not None:
        part.put({"key": PYTEST, "state": "left out", "detail": why})
        part.leave_out(PYTEST, why)
        part.end(COMPLETE)
        return
    part.put(run_pytest([PYTEST], logs / "pytest.log", seconds))
    _stop_at_failures(part)
    part.end(OUT_OF_TIME if part.data["rows"][-1]["state"] == "not finished" else COMPLETE)


def run_pytest(paths: list[str], log: Path, seconds: float) -> dict[str, Any]:
    """A row of the checks. Tests are counted as they end, so one that is stopped still says how
    many there were.
    """
    command = [
        sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={ROOT}",
        "--import-mode=importlib", "-p", "no:cacheprovider", "-v", "--color=no", *paths,
    ]  # fmt: skip
    counts: Counter[str] = Counter()
    failures: list[str] = []
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                file.write(line)
                for word in ("PASSED", "FAILED", "ERROR", "SKIPPED"):
                    if f" {word} " in f"{line.rstrip()} " and "::" in line.split(word)[0]:
                        counts[word] += 1
                        if word in ("FAILED", "ERROR"):
                            failures.append(line.split()[0])
        returned = process.wait()
        timer.cancel()
    detail = ", ".join(f"{counts[word]} {word.lower()}" for word in counts) or "no test ran"
    if failures:
        detail += f": {', '.join(failures[:MOST_FAILURES])}"
    state = "passed"
    if failures:
        state = FAILED
    elif late.is_set():
        state = "not finished"
        detail += f" in {seconds:.0f} s"
    elif returned or not counts["PASSED"]:
        state = FAILED
        detail += f"; pytest ended with {returned} (log: {log})"
    return {"key": PYTEST, "state": state, "detail": detail}


def _stop_at_failures(part: Part) -> None:
    failed = [row for row in part.data["rows"] if row["state"] == FAILED]
    if failed:
        part.end(FAILED)
        raise ChecksFailed("; ".join(f"{row['key']}: {row['detail']}" for row in failed))
