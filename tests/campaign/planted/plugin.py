"""A pytest plugin that plants a fault before the tests run: `-p tests.campaign.planted.plugin
--plant NAME`.
"""

from __future__ import annotations

import pytest

from tests.campaign.planted.plants import PLANTS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plant", choices=list(PLANTS), help="the fault to put in")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Apply the fault once all tests are imported, so that their reference values are
    unaffected.
    """
    name = session.config.getoption("--plant")
    if name is not None:
        PLANTS[name].apply()
