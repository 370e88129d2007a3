"""Part `planted`: faults that are planted on purpose and must be caught.

    plants ──the plugin applies one──▶ the tests that ought to fail        (most)
           ──`serve` applies one─────▶ a server, and a witness beside it   (what tests cannot see)

A plant that is not caught means that the checks are too weak.
"""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.processes import ROOT
from tests.campaign.calm import WORST_S, witnessed
from tests.campaign.hostile import encoding as wire
from tests.campaign.hostile.sending import GENERATE
from tests.campaign.hostile.server import ATTACKER, Server
from tests.campaign.parts import Course, Part, Tried
from tests.campaign.planted.plants import LOG, PLANTS, STALLING, WITNESS, Plant

TESTS_S = 300.0
FAILED = 1
"""pytest's exit code when tests were run and some failed."""
TIMES = 6
AFTER_S = 0.6


def run(course: Course) -> None:
    for plant in PLANTS.values():
        if course.is_wanted(plant.name) and (plant.in_cut or not course.is_cut):
            course.add(planted(plant))


def planted(plant: Plant) -> Tried:
    """Apply one plant. The row is wrong if nothing catches it."""
    if plant.caught_by in ((WITNESS,), (LOG,)):
        by, wrong = _by_server(plant)
    else:
        by, wrong = _by_tests(plant)
    return Tried(
        name=plant.name,
        what=f"planted: {plant.what}",
        promises=plant.promises,
        count=1,
        worst=f"caught by {by}" if not wrong else "",
        wrong=wrong,
    )


def _by_tests(plant: Plant) -> tuple[str, list[str]]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-p", "tests.campaign.planted.plugin", "--plant", plant.name, "-m", "not slow"]
    command += ["--hypothesis-seed=1", *plant.caught_by]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "", [f"its tests did not end within {TESTS_S:.0f} s"]
    if done.returncode != FAILED:
        return "", [f"not caught: pytest ended with {done.returncode}: {done.stdout[-300:]}"]
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED tests/")]
    told = failed[0].split()[1].partition("[")[0] if failed else "tests"
    return f"`{told}`", []


def _by_server(plant: Plant) -> tuple[str, list[str]]:
    """Check that the plant is seen in a server with the fault and not in one without it."""
    wrong, by = [], ""
    look = _gap if plant.caught_by == (WITNESS,) else _secrets
    for program in (None, [sys.executable, "-m", "tests.campaign.planted.serve", plant.name]):
        by = look(program)
        if (program is None) == bool(by):
            which = "right" if program is None else "planted"
            wrong.append(f"a {which} server shows {by or 'nothing'}")
    return by, wrong


def _gap(program: list[str] | None) -> str:
    """Send an input repeatedly and judge the shortest of the witness's worst waits.

    A stall that the fault causes occurs every time; a delay caused by the machine does not.
    """
    with witnessed(program=program) as (server, witness):
        gaps = []
        for _ in range(TIMES):
            witness.begin()
            _send(server)
            time.sleep(AFTER_S)
            seen = witness.report()
            # It may be between two requests of its own, where there are no tokens to wait for.
            waits = (seen.gaps, seen.first_tokens, seen.tokenize)
            gaps.append(max(one.worst_s - one.late_s for one in waits))
    least = min(gaps)
    if least <= WORST_S:
        return ""
    return f"the witness, who waited for {least:.2f} s or more each time"


def _secrets(program: list[str] | None) -> str:
    with witnessed(program=program) as (server, _):
        _send(server)
        time.sleep(AFTER_S)
        secrets = server.told_secrets(0)
    return f"the log, which shows the token of {', '.join(secrets)}" if secrets else ""


def _send(server: Server) -> None:
    raw = wire.request(STALLING, stop={"max_tokens": 2})
    server.call(GENERATE, raw, ATTACKER)


PLANTED = Part(
    name="planted",
    meaning="faults that are put in on purpose, each of which must be caught",
    run=run,
    has_calm=False,
)
