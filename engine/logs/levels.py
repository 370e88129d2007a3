"""Log levels by module, as an operator writes them: `engine.scheduler=debug`."""

from __future__ import annotations

import logging
from collections.abc import Iterable


def set_levels(levels: Iterable[str]) -> dict[str, int]:
    """Set the levels of loggers, each written as `NAME=LEVEL`; returns those that they had."""
    before: dict[str, int] = {}
    for one in levels:
        name, _, level = one.partition("=")
        logger = logging.getLogger(name)
        before.setdefault(name, logger.level)
        logger.setLevel(level.upper())
    return before
