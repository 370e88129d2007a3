"""The checks that run before all measurements: a few that always run, and tests/gpu through pytest.

A check that fails blocks only the parts that depend on it (`Measuring.needs`). If attention is
wrong, for example, the engine's results are blocked, but the device's own rates are still measured.
tests/gpu blocks nothing, because it tests families and options that no part measures, but it makes
the command fail.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import COMPLETE, FAILED, OUT_OF_TIME, QUICK, Part
from benchmarks.processes import ROOT, System, SystemFailure

MODULE = "tests.gpu.checks"
"""The quick checks are tests, in an adapter's process."""
PYTEST = "tests/gpu"
MOST_FAILURES = 10
SERVICE = ("grpc", "msgspec", "llguidance", "typer")
"""What the service needs beside the engine."""
SHARES = 5
"""The number of processes that run the quick checks concurrently."""
NOT_FINISHED = "not finished"
_END = re.compile(r"^(\S*::\S.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
"""How pytest tells the end of a test."""
ALL = "checks"
"""The key of a failure of all checks."""


def quick_checks(part: Part, device: str, logs: Path, seconds: float) -> None:
    """Run the checks that always run. On a device they run in several processes, because most of
    their time is spent compiling kernels and waiting for a cold disk.
    """
    count = 1 if device == "cpu" else min(SHARES, os.cpu_count() or 1)
    with ThreadPoolExecutor(count) as pool:
        rows = pool.map(lambda share: _share(share, count, device, logs, seconds), range(count))
        for row in itertools.chain.from_iterable(rows):
            part.put(row)
    part.end(FAILED if failures(part) else QUICK)


def _share(share: int, count: int, device: str, logs: Path, seconds: float) -> list[dict[str, Any]]:
    """Return rows of every `count`th check, starting at number `share`."""
    name = f"checks-{share + 1}"
    order = {"device": device, "threads": 1, "share": share, "count": count}
    try:
        with System(name, MODULE, sys.executable, logs / f"{name}.log", {}) as system:
            system.load(order, seconds)
            rows: list[dict[str, Any]] = system.run({"requests": []}, seconds)
            return rows
    except SystemFailure as failure:
        return [{"key": ALL, "state": FAILED, "detail": str(failure)[:400]}]


def pytest_checks(part: Part, device: str, logs: Path, seconds: float) -> None:
    """Run tests/gpu. Running out of time is noted but is not a failure."""
    absent = missing("pytest", "hypothesis")
    why = f"{absent} cannot be imported here" if absent else None
    if device == "cpu":
        why = "needs a CUDA device"
    if why is not None:
        part.put({"key": PYTEST, "state": "left out", "detail": why})
        part.leave_out(PYTEST, why)
    else:
        part.put(run_pytest([PYTEST], logs / "pytest.log", seconds))
    if failures(part):
        part.end(FAILED)
    else:
        is_late = part.data["rows"][-1]["state"] == NOT_FINISHED
        part.end(OUT_OF_TIME if is_late else COMPLETE)


def run_pytest(paths: list[str], log: Path, seconds: float) -> dict[str, Any]:
    """Run pytest and return a row of the checks. A run that is stopped still reports how many tests
    ended before.
    """
    command = [
        sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={ROOT}",
        "--import-mode=importlib", "-p", "no:cacheprovider", "-v", "--color=no", *paths,
    ]  # fmt: skip
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with log.open("w") as file:
        try:
            returned: int | None = subprocess.run(
                command, cwd=ROOT, env=variables, stdout=file, stderr=file, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            returned = None
    ends = _END.findall(log.read_text())
    counts = Counter(word for _, word in ends)
    failed = [test for test, word in ends if word in ("FAILED", "ERROR")]
    detail = ", ".join(f"{count} {word.lower()}" for word, count in counts.items()) or "no test ran"
    if failed:
        detail += f": {', '.join(failed[:MOST_FAILURES])}"
    elif returned is None:
        return {"key": PYTEST, "state": NOT_FINISHED, "detail": f"{detail} in {seconds:.0f} s"}
    elif returned or not counts["PASSED"]:
        detail += f"; pytest ended with {returned} (log: {log})"
    else:
        return {"key": PYTEST, "state": "passed", "detail": detail}
    return {"key": PYTEST, "state": FAILED, "detail": detail}


def failures(part: Part) -> list[dict[str, Any]]:
    """Return the rows of the checks that failed."""
    return [row for row in part.data["rows"] if row["state"] == FAILED]


def bars(needs: Collection[str], failed: Iterable[dict[str, Any]]) -> str | None:
    """Return why a part is not measured; None if no check that it needs is among those that failed.
    Without the checks' process (`ALL`), nothing that needs any is measured.
    """
    why = [
        f"{row['key']} has failed: {row['detail']}"
        for row in failed
        if row["key"] in needs or (needs and row["key"] == ALL)
    ]
    return "; ".join(why) or None


def lacking(names: Iterable[str]) -> list[str]:
    """Return one line for each thing that these parts need and this host lacks: what it is, and
    what is left out without it.
    """
    asked = set(names)
    lines = []
    if absent := _missing_for_triton():
        lines.append(f"{absent}: Triton's kernels do not run, and what needs them is barred")
    if "checks" in asked and (absent := missing("pytest", "hypothesis")):
        lines.append(f"{absent}: tests/gpu is not run")
    if "grpc" in asked and (absent := missing(*SERVICE)):
        lines.append(f"{absent}: the part grpc is left out (WHEELS=folder brings them)")
    return lines


def _missing_for_triton() -> str:
    """Return what Triton lacks to compile its launchers: the compilers that it looks for, and
    headers.
    """
    absent = [missing("triton")]
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        absent.append("a C compiler (gcc, clang or what CC names)")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        absent.append("Python.h (of a package like python3-dev)")
    return ", ".join(filter(None, absent))


def missing(*modules: str) -> str:
    """Return those that cannot be imported here."""
    return ", ".join(name for name in modules if find_spec(name) is None)
