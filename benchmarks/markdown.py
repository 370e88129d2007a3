"""What the tables of all records share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(columns: str | Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table; none if it has no rows. columns: a sequence, or "one | two"."""
    heads = columns.split(" | ") if isinstance(columns, str) else columns
    lines = [_row(cells) for cells in rows]
    return [_row(heads), "|" + "---|" * len(heads), *lines] if lines else []


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


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
    """Return the memory of a record's machine."""
    return f"{record['machine']['memory_bytes'] / 2**30:.0f} GiB"


def link(name: str) -> str:
    """Return the sentence that leads to a record. name: its file's, from the repository's root."""
    return f"Record: [`{name}`](../{name})."
