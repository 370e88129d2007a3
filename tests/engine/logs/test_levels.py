"""Log levels by module: merged, replaced, and as an engine's process keeps them."""

from __future__ import annotations

import logging

import pytest

from engine.logs.levels import merged, replaced, set_levels
from engine.process.process_client import ProcessEngineClient


def test_the_last_level_of_a_module_counts() -> None:
    assert merged(("a=debug", "b=info"), ("a=error",)) == ("a=error", "b=info")
    assert replaced(("a=debug", "b=info"), ("b=error",)) == ("a=notset", "b=error")


def test_a_module_that_is_no_longer_named_has_the_level_above_it() -> None:
    logger = logging.getLogger("engine.no_such_module")
    try:
        set_levels(("engine.no_such_module=error",))
        assert not logger.isEnabledFor(logging.WARNING)
        set_levels(replaced(("engine.no_such_module=error",), ()))
        assert logger.level == logging.NOTSET
    finally:
        logger.setLevel(logging.NOTSET)


async def test_a_process_that_is_started_later_has_the_levels_of_all_changes() -> None:
    client = ProcessEngineClient(  # type: ignore[abstract]  # as in service.command.cli
        "models/demo", log_level_of=("a=debug",)
    )
    for level in ("info", "error"):
        for number in range(50):
            await client.set_log_level(
                level, (f"b={level}", f"c={(number % 2 and 'debug') or level}")
            )
    start = client._start_message
    assert (start.log_level, start.log_level_of) == ("error", ("a=debug", "b=error", "c=debug"))


@pytest.mark.parametrize("level", ["debug", "notset"])
def test_each_level_is_one_of_logging_s(level: str) -> None:
    assert set_levels((f"engine.no_such_module={level}",)) == {"engine.no_such_module": 0}
    assert logging.getLogger("engine.no_such_module").level == getattr(logging, level.upper())
    set_levels(("engine.no_such_module=notset",))
