"""The campaign's own tests run with all others; the campaign itself runs by `-m campaign` alone."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.campaign.campaign import CUT_RESULTS, RESULTS, Campaign, Plan
from tests.campaign.registry import PARTS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the campaign out unless it is asked for by its mark, and then parts that are not
    wanted.
    """
    wanted = config.getoption("campaign_part")
    if unknown := set(wanted) - set(PARTS):
        raise pytest.UsageError(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if not wanted:
        cut = config.getoption("campaign_cut")
        wanted = [name for name, part in PARTS.items() if part.in_cut or not cut]
    if "campaign" not in config.getoption("markexpr"):
        wanted = []
    left_out = [
        one
        for one in items
        if isinstance(one, pytest.Function)
        and one.get_closest_marker("campaign")
        and one.callspec.id not in wanted
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [one for one in items if one not in left_out]


@pytest.fixture(scope="session")
def campaign(pytestconfig: pytest.Config) -> Iterator[Campaign]:
    """The campaign that the options describe. A signal ends it as Ctrl-C does."""
    given = pytestconfig.getoption
    is_cut = given("campaign_cut")
    plan = Plan(
        seed=given("campaign_seed"),
        is_cut=is_cut,
        again=is_cut or given("campaign_again"),
        minutes=given("campaign_minutes"),
        seconds=given("campaign_seconds"),
        only=given("campaign_only"),
        path=given("campaign_record") or (CUT_RESULTS if is_cut else RESULTS),
    )
    endings = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(ending, signal.default_int_handler) for ending in endings]
    yield Campaign(plan)
    for ending, handler in zip(endings, before, strict=True):
        signal.signal(ending, handler)
