"""A plugin of pytest that puts a fault in before the tests run: `-p benchmarks.trust.planted.plugin
--plant NAME`.
"""

from __future__ import annotations

import pytest

from benchmarks.trust.planted.plants import PLANTS


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option."""
    parser.addoption("--plant", choices=list(PLANTS), help="the fault to put in")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Put it in once all tests are imported: they are not to find it in what they compare with."""
    name = session.config.getoption("--plant")
    if name is not None:
        PLANTS[name].apply()
