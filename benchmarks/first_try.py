"""How long a new user waits: `make run` in a fresh clone until the first token
(`make bench-first-try`, three runs, about four minutes and as many downloads).

Each run has a separate clone, virtual environment and home, so that no package is in a cache. pip's
settings in the environment are kept. The output of `make run` is timed line by line:

    environment   `python -m venv`, and uv by pip
    resolve       uv finds what is needed
    fetch         uv downloads and unpacks, and meanwhile the kernels are compiled
    link          uv puts the packages into the environment
    start         the server: from the last line of the set-up until the model is loaded
    first token   `headrace generate` until its first output, the command's own start with it

Then the same command restarts the server a given number of times.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from benchmarks.markdown import cpus, link, memory, table
from benchmarks.processes import ROOT, SystemFailure, free_port
from benchmarks.records import Record
from benchmarks.rig.measurement import Measurement, option
from benchmarks.rig.serving import has_welcomed, process

PARTS = ("environment", "resolve", "fetch", "link", "start", "first token")
"""The parts of `make run` in a fresh clone, in order."""
_UV = re.compile(r"(Resolved|Prepared|Installed) \d+ packages? in (?:(\d+)m )?([\d.]+)(ms|s)")
"""How uv tells what a step took."""
_BYTES = 2**20


class Run:
    """`make run` in a clone, and the times of its output lines."""

    def __init__(self, clone: Path, environment: Mapping[str, str]) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.lines: list[tuple[float, str]] = []
        self.ready_s = 0.0
        self._environment = environment
        self._clone = clone
        self._began = time.perf_counter()

    def has_welcomed(self, said: str) -> bool:
        """Note the lines that are new in its output. Returns whether it is ready."""
        now = time.perf_counter() - self._began
        lines = said.splitlines(keepends=True)
        self.lines += [(now, line) for line in lines[len(self.lines) :] if line.endswith("\n")]
        self.ready_s = now
        return has_welcomed(said)

    def first_token(self) -> float:
        """Return the seconds that `headrace generate` takes until its first output. Raises
        SystemFailure if it printed nothing.
        """
        began = time.perf_counter()
        command = [str(self._clone / ".venv" / "bin" / "headrace"), "generate", "Hello"]
        command += ["--target", self.address, "--max-tokens", "16"]
        with subprocess.Popen(
            command, env=dict(self._environment), stdout=subprocess.PIPE
        ) as running:
            output = running.stdout.read(1) if running.stdout else b""
            taken = time.perf_counter() - began
        if not output:
            raise SystemFailure("headrace generate printed nothing")
        return taken


@contextlib.contextmanager
def running(clone: Path, environment: Mapping[str, str]) -> Iterator[Run]:
    """Run `make run` during the block, from when its server is ready. Raises SystemFailure with its
    output if it ended, or was not ready in time.
    """
    run = Run(clone, environment)
    command = ["make", "run", f"LISTEN={run.address}"]
    with process(
        command, clone / "make.log", is_ready=run.has_welcomed, environment=environment,
        folder=clone,
    ):  # fmt: skip
        yield run


def parts(run: Run, ready: float, first_token: float) -> dict[str, float]:
    """Return the seconds of each part. Raises SystemFailure if uv did not install, so that its
    lines are missing.
    """
    ends: dict[str, float] = {}
    took: dict[str, float] = {}
    for at, line in run.lines:
        if told := _UV.match(line):
            name, minutes, seconds, unit = told.groups(default="0")
            ends.setdefault(name, at)
            scale = 1e-3 if unit == "ms" else 1.0
            took.setdefault(name, 60 * int(minutes) + scale * float(seconds))
    if ends.keys() != {"Resolved", "Prepared", "Installed"}:
        raise SystemFailure("uv did not install: " + "".join(line for _, line in run.lines[-20:]))
    return {
        "environment": ends["Resolved"] - took["Resolved"],
        "resolve": took["Resolved"],
        "fetch": ends["Prepared"] - ends["Resolved"],
        "link": ends["Installed"] - ends["Prepared"],
        "start": ready - ends["Installed"],
        "first token": first_token,
    }


def size(environment: Path) -> int:
    """Return the bytes of an environment's packages."""
    files = environment.glob("lib/python3*/site-packages/**/*")
    return sum(one.lstat().st_size for one in files if one.is_file() and not one.is_symlink())


def received() -> int:
    """Return the bytes received over the network since the machine started, without loopback."""
    counters = psutil.net_io_counters(pernic=True)
    return sum(one.bytes_recv for name, one in counters.items() if name != "lo")


def fresh_environment(home: Path) -> dict[str, str]:
    """Return a new user's environment: no caches, and no programs of this environment first on
    PATH.
    """
    own = str(Path(sys.executable).parent)
    dropped = ("PYTHON", "VIRTUAL_ENV", "MAKE", "UV_", "XDG_", "HEADRACE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    path = os.pathsep.join(one for one in kept["PATH"].split(os.pathsep) if one != own)
    return kept | {"PATH": path, "HOME": str(home)}


def measure_one(folder: Path, again: int) -> dict[str, Any]:
    """Measure one fresh run, and the restarts after it."""
    clone, home = folder / "headrace", folder / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    environment = fresh_environment(home)
    before = received()
    with running(clone, environment) as run:
        found = parts(run, run.ready_s, run.first_token())
    downloaded = received() - before
    starts = []
    for _ in range(again):
        with running(clone, environment) as run:
            starts.append(run.ready_s)
    return {
        "seconds": sum(found.values()),
        "parts_s": found,
        "downloaded_mb": downloaded / _BYTES,
        "mb_per_s": downloaded / _BYTES / found["fetch"],
        "again_ready_s": starts,
        "environment_mb": size(clone / ".venv") / _BYTES,
    }


def measure(options: argparse.Namespace, record: Record) -> None:
    runs = []
    for _ in tqdm(range(options.runs), desc="fresh runs", unit="run"):
        with tempfile.TemporaryDirectory(prefix="headrace-first-try-") as folder:
            runs.append(measure_one(Path(folder), options.again))
        record.put(runs, "runs")


def render(record: Mapping[str, Any], name: str) -> str:
    runs = record["runs"]
    megabytes = statistics.median(run["environment_mb"] for run in runs)
    again = [f"{statistics.median(run['again_ready_s']):.1f}" for run in runs]
    came = [f"{run['downloaded_mb']:,.0f} ({run['mb_per_s']:.0f} a second)" for run in runs]
    rows = [
        *([part, *(f"{run['parts_s'][part]:.1f}" for run in runs)] for part in PARTS),
        ["to the first token", *(f"**{run['seconds']:.1f}**" for run in runs)],
        ["`make run` again, until ready (median)", *again],
        ["MiB that came", *came],
    ]
    heads = ["seconds", *(f"run {number}" for number in range(1, len(runs) + 1))]
    head = (
        f"{record['date'][:10]}, {cpus(record)}, {memory(record)}. The environment takes "
        f"{megabytes:,.0f} MiB on disk. Commit {record['commit']}. {link(name)}"
    )
    return "\n".join([head, "", *table(heads, rows)]) + "\n"


MEASUREMENT = Measurement(
    measure=measure,
    render=render,
    options=(option("runs", 3), option("again", 3, "starts after each fresh one")),
)
