"""What a storm is, and all of them by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.campaign.hostile.sending import Sender
from tests.campaign.hostile.server import Server

Found = tuple[int, str, list[str]]
"""The number of calls, the worst value seen, and the violations."""
Run = Callable[[Server, Sender, int], Awaitable[Found]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """One storm.

    Attributes:
        name, what, promises: as of a row.
        whole, cut: its size in full and in the cut; None if the cut does not include it.
    """

    name: str
    what: str
    promises: tuple[int, ...]
    run: Run
    whole: int
    cut: int | None
    tls: bool


ROWS: list[Storm] = []


def storm(
    name: str, *promises: int, whole: int, cut: int | None = None, tls: bool = False
) -> Callable[[Run], Run]:
    """Add a storm. The first paragraph of its docstring says what is tried."""

    def add(run: Run) -> Run:
        first = " ".join((run.__doc__ or "").partition("\n\n")[0].split()).removesuffix(".")
        what = first if first[:2].isupper() else first[0].lower() + first[1:]
        row = Storm(
            name=name, what=what, promises=promises, run=run, whole=whole, cut=cut, tls=tls
        )  # fmt: skip
        ROWS.append(row)
        return run

    return add
