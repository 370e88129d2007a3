"""Part `bytes`: fuzzing of everything that parses input from others.

    target ──seeds, mutate──▶ input ──▶ test: accepted, or refused with an error for the sender

Each target runs in a separate process (`fuzz`). If Atheris is installed (the extra `fuzz`), it
keeps inputs that reach new code; otherwise inputs are random. Mutations know the structure of the
input: they change fields of messages and build texts from significant characters.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT
from tests.campaign.bytes import frames
from tests.campaign.bytes.target import Target
from tests.campaign.bytes.targets import TARGETS
from tests.campaign.parts import Course, Part, Tried

SECONDS, CUT_SECONDS = 120.0, 2.0
STUCK_S = 90.0
"""How much longer than its time a target's process may run before it counts as stuck."""
_COUNTS = importlib.util.find_spec("atheris") is not None


def run(course: Course) -> None:
    seconds = course.seconds or course.either(SECONDS, CUT_SECONDS)
    for target in TARGETS.values():
        if course.is_wanted(target.name):
            course.add(fuzzed(course, target, seconds))
    if course.is_wanted("http2"):
        course.add(frames.tried(course, seconds))


def fuzzed(course: Course, target: Target, seconds: float) -> Tried:
    folder = course.folder / target.name
    folder.mkdir()
    seed = course.source(target.name).randrange(1 << 31)
    command = [sys.executable, "-m", "tests.campaign.bytes.fuzz", target.name]
    command += [str(seconds), str(seed), str(folder)]
    with (folder / "log").open("wb") as log:
        try:
            code: int | None = subprocess.run(
                command, cwd=ROOT, stdout=log, stderr=log, timeout=seconds + STUCK_S
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    stats = _read(folder / "stats.json") or {"tried": 0, "slowest_s": 0.0}
    wrong = _findings(folder)
    if code != 0:
        how = "did not end" if code is None else f"ended with {code}"
        last = (folder / "last").read_bytes().hex() if (folder / "last").exists() else ""
        end = (folder / "log").read_text(errors="replace")[-300:]
        wrong.append(f"the process {how} at {last[:200]}: {end}")
    by = "under Atheris" if _COUNTS else "by chance alone"
    return Tried(
        name=target.name,
        what=f"{target.what}; {seconds:.0f} s {by}",
        promises=target.promises,
        count=stats["tried"],
        worst=f"{stats['slowest_s'] * 1e3:.0f} ms of CPU time for an input",
        wrong=wrong,
    )


def _findings(folder: Path) -> list[str]:
    path = folder / "findings.jsonl"
    if not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [f"{one['what']} (input {one['input'][:400]})" for one in found]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found


BYTES = Part(
    name="bytes",
    meaning="whatever reads what others send, given bytes that nobody would send",
    run=run,
)
