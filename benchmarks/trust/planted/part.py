"""The part: each plant is put in, and what ought to catch it is run."""

from __future__ import annotations

import subprocess
import sys
import time

import grpc
from headrace.v1 import generation_service_pb2 as rpc

from benchmarks.hostile.judging import allowed_s
from benchmarks.hostile.sending import GENERATION
from benchmarks.hostile.server import ATTACKER
from benchmarks.processes import ROOT
from benchmarks.trust.calm import look, witnessed
from benchmarks.trust.parts import Course, Part, Tried
from benchmarks.trust.planted.plants import PLANTS, SERVER, STALLING, Plant

TESTS_S = 300.0
FAILED = 1
"""pytest's exit code when tests were run and some failed."""
CALM_S = 5.0
STALLS = 5


def run(course: Course) -> None:
    """Plant each."""
    for plant in PLANTS.values():
        if course.is_wanted(plant.name) and (plant.in_cut or not course.is_cut):
            course.add(planted(plant))


def planted(plant: Plant) -> Tried:
    """Put one in; it is wrong if nothing is found."""
    if plant.caught_by == (SERVER,):
        by, wrong = _by_witness(plant)
    else:
        by, wrong = _by_tests(plant)
    return Tried(
        name=plant.name,
        what=f"planted: {plant.what}",
        promises=plant.promises,
        count=1,
        worst=f"caught by {by}" if not wrong else "",
        wrong=tuple(wrong),
    )


def _by_tests(plant: Plant) -> tuple[str, list[str]]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-p", "benchmarks.trust.planted.plugin", "--plant", plant.name, "-m", "not slow"]
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


def _by_witness(plant: Plant) -> tuple[str, list[str]]:
    """A planted server must be told from a right one, by what a witness and the log say."""
    wrong = []
    for program in (None, [sys.executable, "-m", "benchmarks.trust.planted.serve", plant.name]):
        found = _seen(program)
        if (program is None) == bool(found):
            told = "; ".join(found) or "nothing"
            wrong.append(f"a {'right' if program is None else 'planted'} server shows {told}")
        by = found
    return "; ".join(by), wrong


def _seen(program: list[str] | None) -> list[str]:
    """What is wrong with a server, at which known and unknown callers are sent."""
    with witnessed(program=program) as (server, witness):
        calm = look(witness, CALM_S)
        witness.begin()
        raw = rpc.GenerateRequest(spec={"text": {"text": STALLING}, "stop": {"max_tokens": 2}})
        with grpc.insecure_channel(server.target) as channel:
            call = channel.unary_unary(GENERATION + "Generate")
            for _ in range(STALLS):
                metadata = [("authorization", f"Bearer {server.token(ATTACKER)}")]
                call(raw.SerializeToString(), metadata=metadata, timeout=30)
                time.sleep(0.5)
        seen, found = witness.report(), []
        gap, most = seen.gaps.worst_s - seen.gaps.late_s, allowed_s(calm.gaps)
        if gap > most:
            found.append(f"the witness' worst gap was {gap:.2f} s, above {most:.2f}")
        if secrets := server.told_secrets(0):
            found.append(f"the log shows the token of {', '.join(secrets)}")
        return found


PLANTED = Part(
    name="planted",
    meaning="faults that are put in on purpose, each of which must be caught",
    minutes=8,
    run=run,
    has_calm=False,
)
