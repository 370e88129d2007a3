"""All parts in the order in which they run."""

from __future__ import annotations

from tests.campaign.bytes.part import BYTES
from tests.campaign.door.part import DOOR
from tests.campaign.drains import DRAINS
from tests.campaign.ends.part import ENDS
from tests.campaign.hostile.part import HOSTILE
from tests.campaign.load.part import LOAD
from tests.campaign.parts import Part
from tests.campaign.planted.part import PLANTED
from tests.campaign.proxy.part import PROXY
from tests.campaign.storms.part import STORMS

PARTS: dict[str, Part] = {
    one.name: one for one in (ENDS, HOSTILE, DOOR, PROXY, BYTES, STORMS, LOAD, DRAINS, PLANTED)
}
