"""Log levels by module, in the operator's notation: `engine.scheduler=debug`."""

from __future__ import annotations

import logging
from collections.abc import Iterable


def set_levels(levels: Iterable[str]) -> dict[str, int]:
    """Set the levels of loggers, each given as `NAME=LEVEL`, and return their previous levels."""
    before: dict[str, int] = {}
    for one in levels:
        name, _, level = _split(one)
        logger = logging.getLogger(name)
        before.setdefault(name, logger.level)
        logger.setLevel(level.upper())
    return before


def merged(*levels: Iterable[str]) -> tuple[str, ...]:
    """Merge several sets of levels. The last level of each logger counts."""
    found = {name: level for part in levels for name, _, level in map(_split, part)}
    return tuple(f"{name}={level}" for name, level in found.items())


def replaced(before: Iterable[str], after: Iterable[str]) -> tuple[str, ...]:
    """Return the input for `set_levels` that replaces one set of levels with another.

    Loggers that are no longer named get the level of their parents.
    """
    return merged((f"{name}=notset" for name, _, _ in map(_split, before)), after)


def _split(one: str) -> tuple[str, str, str]:
    return one.partition("=")
