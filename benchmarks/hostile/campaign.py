"""The campaign on one model: for each group of inputs a server and a calm minute."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

from benchmarks.hostile.inputs import GROUPS, Group, Input
from benchmarks.hostile.judging import (
    ENGINE,
    FRONT_END,
    Run,
    allowed_s,
    why_discarded,
)
from benchmarks.hostile.record import Record
from benchmarks.hostile.server import ATTACKER, OPERATOR, WITNESS, Server
from benchmarks.processes import System
from benchmarks.witness.process import Witness
from benchmarks.witness.report import Report

TRIES = 3
"""Of an input whose runs are discarded."""
AFTER_S = 1.0
"""How long after an input has ended the witness goes on: what it left is felt too."""
RECOVER_S = 20.0
"""A server that is not as before by then is exchanged for another."""
START_S, OVERHEAD_S = 12.0, 1.7
"""For the estimate: until a new server and its witness are ready, and around each input."""
LATE_S = 120.0
"""How much longer than one and a half times its estimate a campaign may take."""
LOG_KEPT = 1500
"""Characters of what the server said, in the record of an input."""
PATIENCE_S = 60.0
"""Beyond its time an attacker may take so long to end its calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a campaign does.

    Attributes:
        model_name: "demo" or "long".
        model: its directory.
        names: the inputs, of those that are meant for the model.
        seconds: how long each is sent, where it needs no time of its own.
        calm_seconds: how long the witness looks before anything is tried on a server.
        tokens: of each request of the witness.
        threads: of the model; None: the server's own default.
        minutes: no input is begun after so many; None: 1.5 times the estimate and two minutes.
    """

    model_name: str
    model: Path
    names: frozenset[str]
    seconds: float
    calm_seconds: float
    tokens: int = 600
    threads: int | None = None
    minutes: float | None = None

    def groups(self) -> list[tuple[Group, list[Input]]]:
        """What is tried, by group."""
        found = [(group, [i for i in group.inputs if i.name in self.names]) for group in GROUPS]
        return [(group, inputs) for group, inputs in found if inputs]

    def time_of(self, one: Input) -> float:
        """How long an input is sent, in seconds."""
        return self.seconds if one.seconds is None else one.seconds

    @property
    def estimate_s(self) -> float:
        """How long it takes where no run is discarded and no server is lost."""
        groups = self.groups()
        inputs = [one for _, some in groups for one in some]
        sending = sum(self.time_of(one) + AFTER_S + OVERHEAD_S for one in inputs)
        return sending + len(groups) * (START_S + self.calm_seconds)

    @property
    def bound_s(self) -> float:
        """No input is begun later."""
        return 1.5 * self.estimate_s + LATE_S if self.minutes is None else 60 * self.minutes


@dataclass(frozen=True, slots=True)
class _Place:
    """Where inputs are tried.

    Attributes:
        server, witness: both run.
        first, highest: memory by process, in bytes: when the server was new, and the most since.
        folder: for logs.
    """

    server: Server
    witness: Witness
    first: dict[str, int]
    highest: dict[str, int]
    folder: Path


class Campaign:
    """Runs a plan, and writes the record as it goes."""

    def __init__(self, plan: Plan, record: Record, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._record = record
        self._say = say
        self._began = time.monotonic()
        self._calm: Report | None = None
        self.failed: list[str] = []

    def run(self) -> list[str]:
        """All of it; the inputs for which there was no time.

        Raises:
            SystemFailure: a server did not start, or an attacker failed by itself.
            WitnessError: there was nothing to witness.
        """
        left: list[str] = []
        for group, inputs in self._plan.groups():
            self._calm = None
            todo = list(inputs)
            while todo:
                if self._elapsed() > self._plan.bound_s:
                    left += [one.name for one in todo]
                    break
                todo = self._on_one_server(group, todo)
        return left

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _on_one_server(self, group: Group, todo: list[Input]) -> list[Input]:
        """Try inputs until the server is lost; those that are left."""
        plan = self._plan
        with TemporaryDirectory(prefix="headrace-") as name, _server(plan, group, name) as server:
            pids = server.pids
            token = server.token_file(WITNESS)
            with Witness(
                server.target,
                pids,
                health_target=server.health_target,
                token_file=token,
                tokens=plan.tokens,
            ) as witness:
                first = {key: memory.now for key, memory in witness.report().memory.items()}
                place = _Place(server, witness, first, dict(first), Path(name))
                if self._calm is None:
                    witness.begin()
                    time.sleep(plan.calm_seconds)
                    self._calm = witness.report()
                    self._say(f"{group.name}: calm {_told(self._calm)}")
                for index, one in enumerate(todo):
                    if self._elapsed() > plan.bound_s:
                        return todo[index:]
                    if not self._try(group, one, place):
                        return todo[index + 1 :]
        return []

    def _try(self, group: Group, one: Input, place: _Place) -> bool:
        """Try an input until a run of it says something; whether the server is as before."""
        for number in range(1, TRIES + 1):
            run = self._once(one, place)
            why = why_discarded(run)
            if why is None:
                wrong = self._record.add(group, one, run, number)
                self._tell(one, run, wrong)
            else:
                self._record.discard(group, one, run, why)
                self._tell(one, run, [f"discarded: {why}"])
            if run.recovered_s is None:
                return False
            if why is None:
                break
        return True

    def _once(self, one: Input, place: _Place) -> Run:
        server, witness = place.server, place.witness
        assert self._calm is not None
        assert server.card is not None
        before, said = server.pids, server.log_bytes()
        system = System(
            one.name,
            "benchmarks.hostile.attacker",
            sys.executable,
            place.folder / "attacker.log",
            {},
        )
        try:
            order = {
                "input": one.name,
                "target": server.target,
                "tls_target": server.tls_target,
                "token": server.token(ATTACKER),
                "operator": server.token(OPERATOR),
                "card": asdict(server.card),
            }
            system.load(order, PATIENCE_S)
            witness.begin()
            seconds = self._plan.time_of(one)
            done = system.run({"seconds": seconds}, seconds + PATIENCE_S)
        finally:
            system.end(5.0)
        time.sleep(AFTER_S)
        seen = witness.report()
        died = "" if server.pids == before else "the engine" if server.is_alive else "the server"
        highest = dict(place.highest)
        for name, memory in seen.memory.items():
            place.highest[name] = max(place.highest.get(name, 0), memory.peak)
        return Run(
            calm=self._calm,
            seen=seen,
            first=place.first,
            highest=highest,
            cache_bytes=server.cache_bytes,
            answers=done["answers"],
            connections=done["connections"],
            seconds=done["seconds"],
            log_bytes=server.log_bytes() - said,
            log=server.log(said)[-LOG_KEPT:],
            secrets=tuple(server.told_secrets(said)),
            died=died,
            recovered_s=None if died else self._recovered(server, witness),
        )

    def _recovered(self, server: Server, witness: Witness) -> float | None:
        """How long until the witness is served as in the calm minute; None: not in time."""
        assert self._calm is not None
        began = time.monotonic()
        while time.monotonic() - began < RECOVER_S:
            with contextlib.suppress(grpc.RpcError):
                server.forget_attacker()
            witness.begin()
            time.sleep(0.3)
            now = witness.report()
            gap, answer = now.gaps.worst_s, now.health.worst_s
            is_well = gap <= allowed_s(self._calm.gaps) and answer <= allowed_s(self._calm.health)
            if is_well and now.tokens and not now.not_serving:
                return time.monotonic() - began
        return None

    def _tell(self, one: Input, run: Run, wrong: list[str]) -> None:
        total = sum(len(inputs) for _, inputs in self._plan.groups())
        names = [i.name for _, inputs in self._plan.groups() for i in inputs]
        place = f"[{names.index(one.name) + 1:3}/{total} {self._elapsed() / 60:5.1f} min]"
        growth = ", ".join(f"{run.growth(name) / 1e6:+.0f} MB" for name in (FRONT_END, ENGINE))
        verdict = "; ".join(wrong) or "held"
        if one.informational and wrong:
            verdict = f"(not judged) {verdict}"
        elif wrong:
            self.failed.append(one.name)
        answers = ", ".join(f"{number} {what}" for what, number in list(run.answers.items())[:6])
        self._say(f"{place} {one.name}: {_told(run.seen)}, {growth}: {verdict}")
        self._say(f"{'':21}{answers or 'nothing was answered'}")


@contextmanager
def _server(plan: Plan, group: Group, folder: str) -> Iterator[Server]:
    server = Server(plan.model, Path(folder), threads=plan.threads, tls=group.tls)
    try:
        server.wait()
        yield server
    finally:
        server.close()


def _told(report: Report) -> str:
    return (
        f"gap {report.gaps.worst_s:.3f} s, health {report.health.worst_s:.3f} s, "
        f"tokenize {report.tokenize.worst_s:.3f} s, own lag {report.lag.worst_s:.3f} s"
    )
