"""`python -m benchmarks.fleet [campaign | prefixes | speeds | all] --minutes 10`

    campaign   sessions, unary calls, streams, batches, AddRequest with GetResult, cancels and lost
               streams over three servers, each of which is drained and replaced in turn; one is
               killed, and at the end there is a fourth
    prefixes   60 equally used prefixes over three servers, beside one with the cache of all three
    speeds     two servers with steps of 5 and 15 ms, beside each alone and round_robin of RPCs

The servers are processes around an engine that computes nothing (`servers`), on loopback addresses
of their own; the name that the client looks up is answered by this process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import grpc

from benchmarks.fleet.campaign import Campaign
from benchmarks.fleet.placing import prefixes, speeds
from benchmarks.records import cpu_name

OUTPUT = Path("benchmarks/results/fleet.json")


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("what", choices=("campaign", "prefixes", "speeds", "all"))
    parser.add_argument("--minutes", type=float, default=10, help="how long the campaign goes on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    record: dict[str, Any] = {}
    if given.output.exists():
        record = json.loads(given.output.read_text())
    record["machine"] = {
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    wanted = ("speeds", "prefixes", "campaign") if given.what == "all" else (given.what,)
    for what in wanted:
        if what == "prefixes":
            record[what] = [
                prefixes(requests=6000, in_flight=48, cached=cached, seed=given.seed)
                for cached in (30, 22)
            ]
        elif what == "speeds":
            record[what] = speeds(turns=3, seconds=8, running=8)
        else:
            record[what] = Campaign(seconds=given.minutes * 60, seed=given.seed).run()
        print(json.dumps({what: record[what]}, indent=1))
        given.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
