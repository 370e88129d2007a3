"""The types for a part of the campaign and its results."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
MOST_WRONG = 12
"""The number of violations listed in each row; the rest are only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One row: what was tried, and the result.

    Attributes:
        name: a name that is unique in its part.
        promises: the numbers of the promises in docs/promises.md that the row tests.
        count: how often it was tried.
        worst: the worst value seen, with its unit; empty if nothing is measured.
        wrong: the violations; empty if the promises were kept. Of many, the row lists a few.
        not_judged: why the row is not judged; empty if it is.
    """

    name: str
    what: str
    promises: tuple[int, ...]
    count: int
    worst: str = ""
    wrong: Sequence[str] = ()
    not_judged: str = ""


@dataclass(slots=True, kw_only=True)
class Course:
    """One run of a part, as the part sees it.

    Attributes:
        is_cut: whether this is CI's short run.
        folder: a temporary folder, removed at the end.
        known: the rows that are already recorded and are not tried again.
        record: called with each row as soon as it is known.
        seconds: the duration of each item with an adjustable duration; None for the part's default.
        only: run only rows whose names contain this; empty for all.
    """

    seed: int
    is_cut: bool
    folder: Path
    known: Collection[str]
    record: Callable[[Tried], None]
    say: Callable[[str], None]
    seconds: float | None = None
    only: str = ""

    def is_wanted(self, name: str) -> bool:
        return name not in self.known and (not self.only or self.only in name)

    def add(self, tried: Tried) -> None:
        more = len(tried.wrong) - MOST_WRONG
        if more > 0:
            tried = replace(tried, wrong=[*tried.wrong[:MOST_WRONG], f"and {more:,} more"])
        self.record(tried)
        verdict = "held" if not tried.wrong else f"WRONG: {tried.wrong[0]}"
        told = f", worst {tried.worst}" if tried.worst else ""
        self.say(f"{tried.name}: {tried.count:,}{told}: {verdict}")

    def source(self, name: str) -> random.Random:
        """Return a random source that depends only on the seed and the name."""
        return random.Random(f"{self.seed}/{name}")

    def either(self, whole: T, cut: T) -> T:
        """Return the full campaign's value or, in the cut, the cut's value."""
        return cut if self.is_cut else whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the campaign.

    Attributes:
        has_calm: whether the campaign measures a calm server first. A part with its own server and
            witness does so itself.
        in_cut: whether CI's cut includes the part.
    """

    name: str
    meaning: str
    run: Callable[[Course], None]
    has_calm: bool = True
    in_cut: bool = True
