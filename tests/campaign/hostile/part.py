"""Part `hostile`: hostile inputs, each beside a witness, on two models.

    part
      ├── server     headrace-server serve, at its defaults, with a file of callers
      ├── witness    tests.campaign.witness: a caller who behaves
      └── attacker   tests.campaign.hostile.attacker: another caller, or a stranger

A row is one of the `inputs` on one model. For each model, the witness first records a calm period.
Each input is then sent for some seconds, and what the witness saw meanwhile is compared with the
criterion (`judging`).
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.pool import Pool
from pathlib import Path

import grpc

from benchmarks.models import DEMO
from tests.campaign.calm import allowed_s, look, told_ms, witnessed
from tests.campaign.hostile.attacker import attacked
from tests.campaign.hostile.inputs import CHATS, GROUPS, Group, Input
from tests.campaign.hostile.judging import (
    ENGINE,
    FRONT_END,
    Run,
    faults,
    why_discarded,
)
from tests.campaign.hostile.long_model import long_model
from tests.campaign.hostile.server import Server
from tests.campaign.low_priority import low_priority
from tests.campaign.parts import Course, Part, Tried
from tests.campaign.witness.process import Witness
from tests.campaign.witness.report import Report

MODELS: Mapping[str, Callable[[], Path]] = {
    "demo": lambda: DEMO,
    "long": lambda: long_model(Path(tempfile.gettempdir()) / "headrace-hostile"),
}
SECONDS, CUT_SECONDS = 2.0, 1.0
"""The time for which an input without its own duration is sent."""
CALM_S, CUT_CALM_S = 30.0, 1.0
CUT = (
    "chat-tools",
    "banned-ids",
    "tool-choice-names",
    "labels",
    "session-refusals",
    "commands-by-id",
    "needed-capabilities",
    "headers",
    "cancel-storm",
    "metadata",
)
"""The inputs that the cut tries, on the demo model.

The cut reports waits but does not judge them, because it runs beside other work and after too
short a calm period.
"""
TOKENS = 300
"""The number of tokens of each of the witness's requests."""
TRIES = 3
"""The number of runs of an input before it is recorded as not judged."""
AFTER_S = 0.5
"""How long the witness continues after an input has ended, to catch its after-effects."""
RECOVER_S = 20.0
"""The time limit for a server to recover; after that it is replaced."""
PATIENCE_S = 60.0
"""The time that an attacker has to end its calls after its time is up."""
LOG_SHOWN = 800
"""The number of characters of the server's log to show if something is wrong."""
ANSWERS_SHOWN = 3
PROMISES = (3, 7, 11)


@dataclass(frozen=True, slots=True)
class _Place:
    """The processes with which inputs are tried.

    Attributes:
        server, witness: both running.
        first: memory by process when the server was new, in bytes.
        highest: the highest memory by process since then, in bytes.
    """

    server: Server
    witness: Witness
    attacker: Pool
    first: Mapping[str, int]
    highest: dict[str, int] = field(default_factory=dict)


def run(course: Course) -> None:
    """Run every input on every model; the cut runs a few inputs on one model."""
    for name, folder in MODELS.items():
        groups = [
            (group, [one for one in inputs if course.is_wanted(f"{name}/{one.name}")])
            for group, inputs in _plan(course, name)
        ]
        if any(inputs for _, inputs in groups):
            attacks = Attacks(course, name, folder())
            for group, inputs in groups:
                attacks.run(group, inputs)


def _plan(course: Course, model: str) -> list[tuple[Group, list[Input]]]:
    """Return the inputs to try on a model, by server."""
    if not course.is_cut:
        return [(group, group.inputs) for group in GROUPS]
    if model != "demo":
        return []
    inputs = [one for group in GROUPS for one in group.inputs if one.name in CUT]
    return [(Group("cut", options=CHATS.options), inputs)]


class Attacks:
    """Runs all inputs that are tried on one model."""

    def __init__(self, course: Course, name: str, model: Path) -> None:
        self._course = course
        self._name = name
        self._model = model
        self._calm: Report | None = None

    def run(self, group: Group, inputs: list[Input]) -> None:
        """Run the inputs of a group. A new server replaces one that is lost. Raises SystemFailure,
        WitnessError.
        """
        todo = inputs
        while todo:
            todo = self._on_one_server(group, todo)

    def _on_one_server(self, group: Group, todo: list[Input]) -> list[Input]:
        """Run inputs until none is left or the server is lost. Returns the remaining inputs."""
        with (
            witnessed(*group.options, model=self._model, tls=group.tls, tokens=TOKENS) as (
                server,
                witness,
            ),
            low_priority() as attacker,
        ):
            first = {key: memory.now for key, memory in witness.report().memory.items()}
            place = _Place(server, witness, attacker, first, dict(first))
            if self._calm is None:
                self._calm = look(witness, self._course.either(CALM_S, CUT_CALM_S))
                self._course.say(f"{self._name}, calm: {_waits(self._calm)}")
            for index, one in enumerate(todo):
                if not self._try(one, place, self._calm):
                    return todo[index + 1 :]
        return []

    def _try(self, one: Input, place: _Place, calm: Report) -> bool:
        """Repeat an input until a run is conclusive. Returns whether the server recovered."""
        for number in range(1, TRIES + 1):
            said = place.server.log_bytes()
            run = self._once(one, place, calm)
            # What loses the server counts, whatever the witness was.
            counts = run.recovered_s is None or self._course.is_cut
            why = None if counts else why_discarded(run)
            if why is None or number == TRIES:
                found = faults(one, run, waits=not self._course.is_cut)
                if found and not run.secrets:
                    self._course.say(f"the server's log: {place.server.log(said)[-LOG_SHOWN:]}")
                self._course.add(_row(f"{self._name}/{one.name}", one, run, found, why))
                return run.recovered_s is not None
            self._course.say(f"{one.name}: once more: {why}")
        raise AssertionError("the last try is recorded")

    def _once(self, one: Input, place: _Place, calm: Report) -> Run:
        server, witness = place.server, place.witness
        before, said = server.pids, server.log_bytes()
        seconds = one.seconds or self._course.seconds
        seconds = seconds or self._course.either(SECONDS, CUT_SECONDS)
        sender = server.attacker(f"{self._course.seed}/{one.name}")
        witness.begin()
        sending = place.attacker.apply_async(attacked, (one.name, seconds), sender)
        answers, connections = sending.get(seconds + PATIENCE_S)
        time.sleep(AFTER_S)
        seen = witness.report()
        died = "" if server.pids == before else "the engine" if server.is_alive else "the server"
        highest = dict(place.highest)
        for name, memory in seen.memory.items():
            place.highest[name] = max(place.highest.get(name, 0), memory.peak)
        return Run(
            calm=calm,
            seen=seen,
            first=place.first,
            highest=highest,
            cache_bytes=server.cache_bytes,
            answers=answers,
            connections=connections,
            secrets=tuple(server.told_secrets(said)),
            died=died,
            recovered_s=None if died else _recovered(server, witness, calm),
        )


def _recovered(server: Server, witness: Witness, calm: Report) -> float | None:
    """Return how long the witness takes to be served as in the calm period; None if not in time."""
    began = time.monotonic()
    while time.monotonic() - began < RECOVER_S:
        with contextlib.suppress(grpc.RpcError):
            server.forget_attacker()
        now = look(witness, 0.3)
        gap, answer = now.gaps.worst_s, now.health.worst_s
        is_well = gap <= allowed_s(calm.gaps) and answer <= allowed_s(calm.health)
        if is_well and now.tokens and not now.not_serving:
            return time.monotonic() - began
    return None


def _row(name: str, one: Input, run: Run, found: list[str], why_not: str | None) -> Tried:
    growth = ", ".join(
        f"{key.replace('_', ' ')} {run.growth(key) / 1e6:+.0f} MB" for key in (FRONT_END, ENGINE)
    )
    seen, calm = run.seen, run.calm
    worst = (
        f"gap {told_ms(seen.gaps, calm.gaps)}, health {told_ms(seen.health, calm.health)}; "
        f"{growth}; {_answers(run.answers)}"
    )
    return Tried(
        name=name,
        what=one.meaning,
        promises=(*PROMISES, 10) if one.stranger else PROMISES,
        count=sum(run.answers.values()),
        worst=worst,
        wrong=found,
        not_judged="" if why_not is None else f"{why_not}, in each of its runs",
    )


def _answers(answers: Mapping[str, int]) -> str:
    shown = sorted(answers.items(), key=lambda pair: -pair[1])
    told = [f"{number:,} {what}" for what, number in shown[:ANSWERS_SHOWN]]
    if len(shown) > ANSWERS_SHOWN:
        told.append(f"{sum(number for _, number in shown[ANSWERS_SHOWN:]):,} others")
    return ", ".join(told) or "nothing was answered"


def _waits(report: Report) -> str:
    return (
        f"gap {report.gaps.worst_s:.3f} s, health {report.health.worst_s:.3f} s, own lag "
        f"{report.lag.worst_s:.3f} s"
    )


HOSTILE = Part(
    name="hostile",
    meaning="inputs that nobody should send, each beside a witness, on two models",
    run=run,
    has_calm=False,
)
