"""What a fleet of servers does: `python -m tests.campaign.fleet [campaign prefixes speeds] …`

    campaign   sessions, unary calls, streams, batches, AddRequest with GetResult, cancels and lost
               streams over three servers, each of which is drained and replaced in turn; one is
               killed, and at the end there is a fourth
    prefixes   60 equally used prefixes over three servers, beside one with the cache of all three
    speeds     two servers with steps of 5 and 15 ms, beside each alone and round_robin of RPCs

The servers are processes around an engine that computes nothing (`tests.service.fake_server`), on
loopback addresses of their own; the name that the client looks up is answered by this process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from benchmarks.records import Record
from benchmarks.rig.measurement import Measurement, option
from tests.campaign.fleet.campaign import Campaign
from tests.campaign.fleet.placing import prefixes, speeds

PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "speeds": lambda options: speeds(turns=3, seconds=8, running=8),
    "prefixes": lambda options: [
        prefixes(requests=6000, in_flight=48, cached=cached, seed=options.seed)
        for cached in (30, 22)
    ],
    "campaign": lambda options: Campaign(seconds=options.minutes * 60, seed=options.seed).run(),
}


def measure(options: argparse.Namespace, record: Record) -> None:
    for name, part in PARTS.items():
        if name in (options.what or PARTS):
            record.put(part(options), name)
            print(json.dumps({name: record.data[name]}, indent=1))


MEASUREMENT = Measurement(
    name="fleet",
    measure=measure,
    options=(
        option("what", [], "all, if none is given", nargs="*", choices=[*PARTS]),
        option("minutes", 10.0, "how long the campaign goes on"),
        option("seed", 1),
    ),
    resumes=("seed",),
)

if __name__ == "__main__":
    MEASUREMENT.run()
