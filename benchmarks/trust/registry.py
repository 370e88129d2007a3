"""All parts in the order in which they run."""

from __future__ import annotations

from benchmarks.trust.bytes.part import BYTES
from benchmarks.trust.door.part import DOOR
from benchmarks.trust.ends.part import ENDS
from benchmarks.trust.hostile.part import HOSTILE
from benchmarks.trust.load.part import LOAD
from benchmarks.trust.parts import Part
from benchmarks.trust.planted.part import PLANTED
from benchmarks.trust.proxy.part import PROXY
from benchmarks.trust.storms.part import STORMS

PARTS: dict[str, Part] = {
    one.name: one for one in (ENDS, HOSTILE, DOOR, PROXY, BYTES, STORMS, LOAD, PLANTED)
}
