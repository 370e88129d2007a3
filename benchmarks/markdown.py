"""What the tables of all records share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.measures import figure

Row = TypeVar("Row")


def table(columns: str | Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table; none if it has no rows. columns: a sequence, or "one | two"."""
    heads = columns.split(" | ") if isinstance(columns, str) else columns
    lines = [_row(cells) for cells in rows]
    return [_row(heads), "|" + "---|" * len(heads), *lines] if lines else []


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def columns(rows: Iterable[Row], *those: tuple[str, Callable[[Row], str]]) -> list[str]:
    """Return the lines of a table; none if it has no rows. those: the columns' titles, and what
    they have of a row.
    """
    cells = [[cell(row) for _, cell in those] for row in rows]
    return table([title for title, _ in those], cells)


def milliseconds(figures: Mapping[str, float], *names: str) -> str:
    """Return those of these figures, in seconds, that there are, in milliseconds."""
    return ", ".join(figure(figures[name] * 1e3) for name in names if name in figures)


@dataclass(frozen=True, slots=True)
class Aim:
    """What is measured, and how it is told.

    Attributes:
        told: the value as text.
        least, most: the bounds that it is to keep; None if there is no such bound.
    """

    what: str
    value: float
    told: str
    least: float | None = None
    most: float | None = None

    @property
    def bounds(self) -> str:
        bounds = (("≥", self.least), ("≤", self.most))
        return ", ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)

    @property
    def is_met(self) -> bool:
        """Whether it keeps its bounds."""
        is_enough = self.least is None or self.value >= self.least
        return is_enough and (self.most is None or self.value <= self.most)


def aims(rows: Iterable[Aim], title: str = "what") -> str:
    """Return the table of what was measured beside what it aims at; a miss is in bold."""
    cells = [[row.what, row.bounds, row.told if row.is_met else f"**{row.told}**"] for row in rows]
    return "\n".join(table([title, "aim", "found"], cells))


def outline(value: Mapping[str, Any], indent: str = "") -> list[str]:
    """Return the numbers and words of a JSON object as lines, with those of the objects in it.
    Lists of objects are left out.
    """
    lines, said = [], []
    for name, one in value.items():
        if isinstance(one, Mapping):
            lines += [f"{indent}{name}:", *outline(one, f"{indent}  ")]
        elif not isinstance(one, list | tuple):
            said.append(f"{name} {_told(one)}")
        elif not any(isinstance(each, Mapping) for each in one):
            said.append(f"{name} {', '.join(map(_told, one))}")
    return [*([indent + "; ".join(said)] if said else []), *lines]


def _told(value: object) -> str:
    return figure(value) if isinstance(value, float) else str(value)


def span(values: Iterable[float], form: str) -> str:
    """Return the smallest and the largest value; one if they look alike."""
    ordered = sorted(values)
    low, high = format(ordered[0], form), format(ordered[-1], form)
    return low if low == high else f"{low} to {high}"


def cpus(record: Mapping[str, Any], more: str = "") -> str:
    """Return the processors of a record's machine. more: what else is said of them."""
    machine = record["machine"]
    return f"{machine['cpus']} CPUs ({machine['cpu']}{more})"


def memory(record: Mapping[str, Any]) -> str:
    return f"{record['machine']['memory_bytes'] / 2**30:.0f} GiB"


def link(name: str) -> str:
    """Return the sentence that leads to a record. name: its file's, from the repository's root."""
    return f"Record: [`{name}`](../{name})."
