"""Part `load`: resource use stays constant under load.

Two measurements test the same promise. `traced` counts the Python memory that each request leaves
behind, on the scripted engine; it detects a leak of a kilobyte per request within seconds. `mixed`
runs a real server under open-loop load of all kinds and measures the memory, threads and files of
its processes from outside.
"""

from __future__ import annotations

import asyncio

from tests.campaign.calm import beside
from tests.campaign.load.flat import Sample, Watch, growth, not_flat
from tests.campaign.load.mixed import KINDS, Load
from tests.campaign.load.traced import MOST_BYTES, bytes_per_request
from tests.campaign.parts import Course, Part, Tried

SECONDS, CUT_SECONDS = 1200.0, 10.0
REQUESTS, CUT_REQUESTS = 2000, 200
CALM_S, CUT_CALM_S = 60.0, 2.0
EXPECTED = ("OK", "CANCELLED (bare)", "cancelled by its caller")
"""How requests may end here; the server can keep up with the rate."""


def run(course: Course) -> None:
    if course.is_wanted("traced"):
        course.add(traced(course.either(REQUESTS, CUT_REQUESTS)))
    if course.is_wanted("mixed"):
        course.add(mixed(course))


def traced(count: int) -> Tried:
    """Measure the bytes that each request leaves behind, as counted by the allocator."""
    found = asyncio.run(bytes_per_request(count))
    is_much = found > MOST_BYTES
    return Tried(
        name="traced",
        what="requests by every RPC, some cancelled: what stays of each in the front end",
        promises=(7,),
        count=4 * count,
        worst=f"{found:.0f} bytes of each request",
        wrong=[f"{found:.0f} bytes stay of each, above {MOST_BYTES:.0f}"] if is_much else (),
    )


def mixed(course: Course) -> Tried:
    """Run mixed open-loop load, and report the witness's figures and the processes' resource
    use.
    """
    seconds = course.seconds or course.either(SECONDS, CUT_SECONDS)
    with beside(course.either(CALM_S, CUT_CALM_S)) as there:
        course.say(f"calm: {there.gap}")
        pids = there.server.pids
        watch = Watch(pids)

        async def send() -> Load:
            async with there.server.sender() as s:
                load = Load(s, course.source("mixed"))
                await load.run(seconds)
                return load

        try:
            load = there.during(lambda: asyncio.run(send()))
        finally:
            watch.close()
        wrong = [] if there.server.pids == pids else ["a process was replaced"]
        wrong += there.faults()
    for name, samples in watch.samples.items():
        if not course.is_cut:  # too short for memory to settle
            wrong += not_flat(name, samples)
    odd = {end: count for end, count in load.tally.items() if count and end not in EXPECTED}
    wrong += [f"{count} {end}" for end, count in odd.items()]
    wrong += [f"none of {kind}" for kind in KINDS if not load.kinds[kind] and not course.is_cut]
    told = "; ".join(
        "{}: {:+.1f} MB, {:+.0f} threads, {:+.0f} files".format(
            name.replace("_", " "), *_shown(samples)
        )
        for name, samples in watch.samples.items()
    )
    return Tried(
        name="mixed",
        what=f"{seconds / 60:.1f} minutes of requests of {len(KINDS)} kinds, as they come",
        promises=(1, 2, 3, 4, 5, 7, 11),
        count=load.sent,
        worst=f"{told}; {there.gap}",
        wrong=wrong,
    )


def _shown(samples: list[Sample]) -> tuple[float, float, float]:
    memory, threads, files = growth(samples)
    return memory / 1e6, threads, files


LOAD = Part(
    name="load",
    meaning="what stays the same while everything else goes on: memory, threads, files",
    run=run,
    has_calm=False,
)
