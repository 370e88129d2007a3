"""What a part of the campaign is, and what it tells."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
MOST_WRONG = 12
"""So many of the things that were wrong are told of each row; the others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One row: what was tried, and what came of it.

    Attributes:
        name: unique in its part.
        what: one line that says what was tried.
        promises: the numbers of those in docs/promises.md that it is about.
        count: how often it was tried.
        worst: the worst that was seen, with its unit; empty where nothing is measured.
        wrong: what was not as promised; empty: it was held.
        not_judged: why nothing depends on it; empty: it is judged.
    """

    name: str
    what: str
    promises: tuple[int, ...]
    count: int
    worst: str = ""
    wrong: tuple[str, ...] = ()
    not_judged: str = ""


@dataclass(slots=True, kw_only=True)
class Course:
    """One run of a part, as the part sees it.

    Attributes:
        seed: of everything that is drawn.
        is_cut: whether it is the short one.
        folder: for files; it is removed at the end.
        known: the rows that were recorded before: they are not tried again.
        record: takes a row as soon as it is known.
        say: shows progress.
        seconds: of each thing whose time can be chosen; None: the part's own.
        only: rows whose names contain this; empty: all.
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
        """Whether a row is to be tried."""
        return name not in self.known and (not self.only or self.only in name)

    def add(self, tried: Tried) -> None:
        """A row is known."""
        self.record(tried)
        verdict = "held" if not tried.wrong else f"WRONG: {tried.wrong[0]}"
        told = f", worst {tried.worst}" if tried.worst else ""
        self.say(f"{tried.name}: {tried.count:,}{told}: {verdict}")

    def source(self, name: str) -> random.Random:
        """Chance for one thing: the same for the same seed, whatever else is tried."""
        return random.Random(f"{self.seed}/{name}")

    def either(self, whole: T, cut: T) -> T:
        """What the whole campaign takes, or the cut."""
        return cut if self.is_cut else whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the campaign.

    Attributes:
        name: as `--part` takes it.
        meaning: one line.
        minutes: about how long the whole takes.
        run: tries it.
        has_calm: whether the campaign looks at a calm server before; a part that has a server and a
            witness of its own does so itself.
        in_cut: whether CI's cut has it.
    """

    name: str
    meaning: str
    minutes: float
    run: Callable[[Course], None]
    has_calm: bool = True
    in_cut: bool = True


def some(wrong: list[str]) -> tuple[str, ...]:
    """What was wrong, as a row tells it."""
    if len(wrong) <= MOST_WRONG:
        return tuple(wrong)
    return (*wrong[:MOST_WRONG], f"and {len(wrong) - MOST_WRONG:,} more")
