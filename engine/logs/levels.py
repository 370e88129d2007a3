"""Log levels by module, as an operator writes them: `engine.scheduler=debug`."""

from __future__ import annotations

import logging
from collections.abc import Iterable


def set_levels(levels: Iterable[str]) -> dict[str, int]:
    """Set the levels of loggers, each written as `NAME=LEVEL`; returns those that they had."""
    before: dict[str, int] = {}
    for one in levels:
        name, _, level = _split(one)
        logger = logging.getLogger(name)
        before.setdefault(name, logger.level)
        logger.setLevel(level.upper())
    return before


def merged(*levels: Iterable[str]) -> tuple[str, ...]:
    """Several of these as one, in which the last level of each logger counts."""
    found = {name: level for part in levels for name, _, level in map(_split, part)}
    return tuple(f"{name}={level}" for name, level in found.items())


def replaced(before: Iterable[str], after: Iterable[str]) -> tuple[str, ...]:
    """What `set_levels` needs to replace some levels by others: loggers that are no longer named
    have the level of those above them.
    """
    return merged((f"{name}=notset" for name, _, _ in map(_split, before)), after)


def _split(one: str) -> tuple[str, str, str]:
    return one.partition("=")
