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
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import headrace
import psutil
from tqdm import tqdm

from benchmarks.processes import ROOT
from benchmarks.records import commit, machine_record, rounded
from benchmarks.stalled_readers import free_port
from benchmarks.tables import FIRST_TRY, first_try

FORMAT = 1
WAIT_S = 600.0
LARGEST = 8
_OUTPUT = ROOT / "benchmarks" / "results" / "first_try.json"
_UV = re.compile(r"(Resolved|Prepared|Installed) \d+ packages? in ")
_BYTES = 2**20


class FirstTryFailure(Exception):
    """A run did not reach its first token; the message has its output."""


class Run:
    """`make run` in a clone, and the times of its output lines."""

    def __init__(self, clone: Path, environment: dict[str, str]) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.lines: list[tuple[float, str]] = []
        self._environment = environment
        self._clone = clone
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            ["make", "run", f"LISTEN={self.address}"],
            cwd=clone,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> float:
        """Return the seconds from the command until the server is ready.

        Raises:
            FirstTryFailure: it ended, or was not ready in time.
        """
        while time.monotonic() - self._began < WAIT_S:
            if self._process.poll() is not None:
                self._reader.join(timeout=1.0)
                raise FirstTryFailure("".join(line for _, line in self.lines[-20:]))
            with contextlib.suppress(headrace.HeadraceError), headrace.Client(self.address) as one:
                one.wait_until_ready(timeout=1.0)
                return time.monotonic() - self._began
        raise FirstTryFailure(f"not ready after {WAIT_S:.0f} s")

    def first_token(self) -> float:
        """Return the seconds that `headrace generate` takes until its first output.

        Raises:
            FirstTryFailure: it printed nothing.
        """
        began = time.monotonic()
        command = [self._clone / ".venv" / "bin" / "headrace", "generate", "Hello"]
        command += ["--target", self.address, "--max-tokens", "16"]
        with subprocess.Popen(
            [str(word) for word in command], env=self._environment, stdout=subprocess.PIPE
        ) as process:
            output = process.stdout.read(1) if process.stdout else b""
            taken = time.monotonic() - began
        if not output:
            raise FirstTryFailure("headrace generate printed nothing")
        return taken

    def when(self, pattern: str) -> float | None:
        """Return the seconds until it printed the first line that contains this text."""
        return next((at for at, line in self.lines if re.search(pattern, line)), None)

    def end(self) -> None:
        """Stop the command and everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(60)
        self._reader.join()

    def _read(self) -> None:
        if self._process.stdout is None:
            return
        with self._process.stdout as output:
            for line in output:
                self.lines.append((time.monotonic() - self._began, line))


@contextlib.contextmanager
def running(clone: Path, environment: dict[str, str]) -> Iterator[Run]:
    """Run `make run` during the block."""
    run = Run(clone, environment)
    try:
        yield run
    finally:
        run.end()


def parts(run: Run, ready: float, first_token: float) -> dict[str, float]:
    """Return the seconds of each part.

    Raises:
        FirstTryFailure: uv did not install, so its lines are missing.
    """
    ends = {name: run.when(f"^{name}") for name in ("Resolved", "Prepared", "Installed")}
    resolved, prepared, installed = ends.values()
    if resolved is None or prepared is None or installed is None:
        raise FirstTryFailure("uv did not install: " + "".join(line for _, line in run.lines[-20:]))
    resolving = _told(run, "Resolved")
    return {
        "environment": resolved - resolving,
        "resolve": resolving,
        "fetch": prepared - resolved,
        "link": installed - prepared,
        "start": ready - installed,
        "first token": first_token,
    }


def _told(run: Run, word: str) -> float:
    """Return the seconds that a step took, as reported by uv."""
    for _, line in run.lines:
        if _UV.match(line) and line.startswith(word):
            text = line.rpartition(" in ")[2].strip()
            minutes, _, rest = text.rpartition("m ") if "m " in text else ("0", "", text)
            scale = 1e-3 if rest.endswith("ms") else 1.0
            return 60 * float(minutes) + scale * float(rest.rstrip("ms"))
    return 0.0


def sizes(environment: Path) -> dict[str, Any]:
    """Return the size of an environment in bytes, and its largest packages."""
    places = list(environment.glob("lib/python3*/site-packages"))
    found: dict[str, int] = {}
    for package in places[0].iterdir() if places else ():
        files = package.rglob("*") if package.is_dir() else [package]
        found[package.name] = sum(
            file.lstat().st_size for file in files if file.is_file() and not file.is_symlink()
        )
    order = sorted(found, key=lambda name: -found[name])
    return {
        "environment_mb": sum(found.values()) / _BYTES,
        "largest_mb": {name: found[name] / _BYTES for name in order[:LARGEST]},
    }


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


def measure(folder: Path, again: int) -> dict[str, Any]:
    """Measure one fresh run, and the restarts after it.

    Raises:
        FirstTryFailure: it did not reach its first token.
    """
    clone, home = folder / "headrace", folder / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    environment = fresh_environment(home)
    before = received()
    with running(clone, environment) as run:
        ready = run.wait_until_ready()
        first_token = run.first_token()
        found = parts(run, ready, first_token)
    downloaded = received() - before
    starts = []
    for _ in range(again):
        with running(clone, environment) as run:
            starts.append(run.wait_until_ready())
    return {
        "seconds": sum(found.values()),
        "parts_s": found,
        "downloaded_mb": downloaded / _BYTES,
        "mb_per_s": downloaded / _BYTES / found["fetch"],
        "again_ready_s": starts,
        **sizes(clone / ".venv"),
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_try", description="Measure `make run` in fresh clones."
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--again", type=int, default=3, help="starts after each fresh one")
    parser.add_argument("--output", type=Path, default=_OUTPUT)
    arguments = parser.parse_args()
    runs = []
    for _ in tqdm(range(arguments.runs), desc="fresh runs", unit="run"):
        with tempfile.TemporaryDirectory(prefix="headrace-first-try-") as folder:
            runs.append(measure(Path(folder), arguments.again))
    record = {
        "format": FORMAT,
        "kind": FIRST_TRY,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": machine_record(),
        "runs": runs,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(rounded(record), indent=1) + "\n")
    print(first_try(record, arguments.output.name))


if __name__ == "__main__":
    try:
        main()
    except FirstTryFailure as failure:
        sys.exit(f"it did not come to its first token:\n{failure}")
