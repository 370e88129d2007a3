"""Runs parts of the campaign and writes their records.

    parts ──run, one after the other──▶ rows (what was tried, how often, the worst, what was wrong)
                                        │  each is written as soon as it is known
                                        ▼
    tests/campaign/trust.json ──`python -m tests.campaign.document`──▶ docs/trust.md

The tests try selected cases with the tests' own fakes, table of ends and fault proxy; the campaign
tries every case with them, and random ones. An interrupted run resumes: rows with the same commit,
seed and length are not tried again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.processes import ROOT
from tests.campaign.calm import calm_minute
from tests.campaign.parts import Course, Part, Tried
from tests.campaign.record import Record, Run, is_wrong

RESULTS = ROOT / "tests" / "campaign" / "trust.json"
CUT_RESULTS = ROOT / "build" / "trust.json"
CALM_S, CUT_CALM_S = 60.0, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to run parts.

    Attributes:
        is_cut: whether to run only CI's cut.
        again: whether to repeat rows that are already recorded.
        minutes: the time after which no further part starts.
        seconds: the duration of each item with an adjustable duration; None for the part's default.
        only: run only rows whose names contain this; empty for all.
    """

    seed: int
    is_cut: bool
    again: bool
    minutes: float
    seconds: float | None = None
    only: str = ""
    path: Path


class Campaign:
    """Runs parts as planned."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._began = time.monotonic()
        self._calm: dict[str, float] | None = None

    @property
    def has_time(self) -> bool:
        return time.monotonic() - self._began < 60 * self._plan.minutes

    def run(self, part: Part) -> dict[str, str]:
        """Run a part. Returns the broken promises: what was found first, by "part/row".

        Raises SystemFailure if a server did not start or the records have another format,
        WitnessError if a server cannot be witnessed.
        """
        plan = self._plan
        record = Record(plan.path)
        run = record.begin(part.name, seed=plan.seed, is_cut=plan.is_cut, again=plan.again)
        if run["is_whole"]:
            self._say(part, "recorded already, with this seed and on this commit")
        else:
            self._say(part, part.meaning)
            self._try(part, record, run)
        wrong = {name: row["wrong"][0] for name, row in run["rows"].items() if is_wrong(row)}
        return {f"{part.name}/{name}": found for name, found in wrong.items()}

    def _try(self, part: Part, record: Record, run: Run) -> None:
        plan = self._plan
        if part.has_calm and run["calm"] is None:
            run["calm"] = self._look(part)

        def add(tried: Tried) -> None:
            record.add(run, tried)

        began = time.monotonic()
        with TemporaryDirectory(prefix="headrace-trust-") as folder:
            course = Course(
                seed=plan.seed,
                is_cut=plan.is_cut,
                folder=Path(folder),
                known=set(run["rows"]),
                record=add,
                say=lambda text: self._say(part, text),
                seconds=plan.seconds,
                only=plan.only,
            )
            try:
                part.run(course)
                run["is_whole"] = not plan.only
            finally:
                run["seconds"] += time.monotonic() - began
                record.write(run)

    def _look(self, part: Part) -> dict[str, float]:
        """Return the calm baseline. The cut measures it once for all parts."""
        if self._calm is None or not self._plan.is_cut:
            self._calm = calm_minute(CUT_CALM_S if self._plan.is_cut else CALM_S)
            waits = ", ".join(
                f"{name} {self._calm[f'{name}_s']:.3f} s" for name in ("gap", "health", "lag")
            )
            self._say(part, f"calm, at worst: {waits}")
        return self._calm

    def _say(self, part: Part, text: str) -> None:
        minutes = (time.monotonic() - self._began) / 60
        print(f"{time.strftime('%H:%M:%S')} [{minutes:5.1f} min] {part.name}: {text}", flush=True)
