"""What a fuzz target is, and how it says that a property does not hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.campaign.bytes.mutating import Mutate

Test = Callable[[bytes], None]


class Finding(Exception):
    """A property does not hold."""


def demand(law: bool, what: str) -> None:
    """Raise a Finding unless the condition is true."""
    if not law:
        raise Finding(what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Code that parses bytes from others.

    Attributes:
        name: the target's name for `--campaign-only`.
        promises: the promises that the target tests.
        prepare: creates the test, once in each process.
    """

    name: str
    what: str
    promises: tuple[int, ...]
    prepare: Callable[[], Test]
    mutate: Mutate
    seeds: Callable[[], list[bytes]]
