"""Runs the parts one after another and writes their records."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.trust.calm import calm_minute
from benchmarks.trust.parts import Course, Part
from benchmarks.trust.record import Record

CALM_S, CUT_CALM_S = 60.0, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run.

    Attributes:
        parts: the parts in the order in which they run.
        seed: the seed of all random choices.
        is_cut: whether to run only CI's cut.
        again: whether to repeat rows that are already recorded.
        folder: the folder of the records.
        minutes: the time after which no further part starts.
        seconds: the duration of each item with an adjustable duration; None for the part's default.
        only: run only rows whose names contain this; empty for all.
        calm_seconds: the length of the calm baseline; None for a minute, or the cut's default.
    """

    parts: Sequence[Part]
    seed: int
    is_cut: bool
    again: bool
    folder: Path
    minutes: float
    seconds: float | None = None
    only: str = ""
    calm_seconds: float | None = None

    @property
    def calm_s(self) -> float:
        """The length of the calm baseline in seconds."""
        if self.calm_seconds is not None:
            return self.calm_seconds
        return CUT_CALM_S if self.is_cut else CALM_S


class Campaign:
    """Runs a plan and collects the results.

    Attributes:
        wrong: the broken promises: what was found first, by "part/row".
        left: the parts for which there was no time.
    """

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self._began = time.monotonic()
        self._calm: dict[str, float] | None = None
        self.wrong: dict[str, str] = {}
        self.left: list[str] = []

    def run(self) -> None:
        """Run all parts of the plan."""
        for part in self._plan.parts:
            if time.monotonic() - self._began > 60 * self._plan.minutes:
                self.left.append(part.name)
            else:
                self._run(part)

    def _run(self, part: Part) -> None:
        plan = self._plan
        record = Record(
            plan.folder / f"trust-{part.name}.json",
            part.name,
            seed=plan.seed,
            is_cut=plan.is_cut,
            again=plan.again,
        )
        if record.run["is_whole"]:
            self._say(f"{part.name}: recorded already, with this seed and on this commit")
            self._count(part, record)
            return
        self._say(f"{part.name}: {part.meaning}")
        if part.has_calm and record.run["calm"] is None:
            record.calm(self._look())
        began = time.monotonic()
        with TemporaryDirectory(prefix="headrace-trust-") as folder:
            course = Course(
                seed=plan.seed,
                is_cut=plan.is_cut,
                folder=Path(folder),
                known=record.known,
                record=record.add,
                say=self._shown(part),
                seconds=plan.seconds,
                only=plan.only,
            )
            try:
                part.run(course)
            finally:
                record.took(time.monotonic() - began)
        if not plan.only:
            record.is_whole()
        self._count(part, record)

    def _look(self) -> dict[str, float]:
        """Return the calm baseline. The cut measures it once for all parts."""
        if self._calm is None or not self._plan.is_cut:
            self._calm = calm_minute(self._plan.calm_s)
            waits = ", ".join(
                f"{name} {self._calm[f'{name}_s']:.3f} s" for name in ("gap", "health", "lag")
            )
            self._say(f"calm, at worst: {waits}")
        return self._calm

    def _shown(self, part: Part) -> Callable[[str], None]:
        def say(text: str) -> None:
            minutes = (time.monotonic() - self._began) / 60
            self._say(f"[{minutes:5.1f} min] {part.name}: {text}")

        return say

    def _count(self, part: Part, record: Record) -> None:
        self.wrong |= {
            f"{part.name}/{name}": row["wrong"][0]
            for name, row in record.run["rows"].items()
            if is_wrong(row)
        }


def is_wrong(row: dict[str, object]) -> bool:
    """Whether a row shows a broken promise."""
    return bool(row["wrong"]) and not row["not_judged"]
