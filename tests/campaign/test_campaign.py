"""The campaign against the promises of docs/promises.md: `pytest -m campaign`, or `make trust`.

A part is one test, with `--campaign-part` only those that are named. What it finds is recorded, and
docs/trust.md is written from the records.
"""

from __future__ import annotations

import pytest

from tests.campaign.campaign import Campaign
from tests.campaign.parts import Part
from tests.campaign.registry import PARTS

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(0),  # a part takes up to an hour
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_what_is_promised_holds(part: Part, campaign: Campaign) -> None:
    if not campaign.has_time:
        pytest.skip("no time was left for it; the same command tries it")
    if wrong := campaign.run(part):
        found = [f"not as promised: {name}: {what}" for name, what in wrong.items()]
        pytest.fail("\n".join(found), pytrace=False)
