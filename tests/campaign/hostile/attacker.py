"""The attacker's process.

For each input, it receives the input's name, reports that it is ready, sends the input and reports
the answers. It uses the line protocol of `benchmarks.adapters.loop` over its pipes. It runs at low
priority so that it does not take CPU time from the server on the same machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from typing import Any

from tests.campaign.hostile.inputs import INPUTS
from tests.campaign.hostile.sending import Card, Sender

NICENESS = 10


def main() -> None:
    """Send the inputs that are requested on stdin to one server."""
    os.nice(NICENESS)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    load: dict[str, Any] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if "load" in order:
            load = order["load"]
            answer: dict[str, Any] = {"ready": {}}
        else:
            answer = {"done": asyncio.run(attack(load, order["run"]["seconds"]))}
        print(json.dumps(answer), flush=True)


async def attack(load: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Send an input for at most `seconds`.

    Returns the time taken, the tally of answers and the number of connections.
    """
    one = INPUTS[load["input"]]
    began = time.monotonic()
    async with Sender(
        load["target"],
        Card(**load["card"]),
        token=load["token"],
        operator=load["operator"],
        tls_target=load["tls_target"],
        seed=load["seed"],
    ) as found:
        try:
            async with asyncio.timeout(seconds):
                await one.send(found)
        except TimeoutError:
            pass
        return _told(found, time.monotonic() - began)


def _told(found: Sender, seconds: float) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "answers": dict(found.tally.most_common()),
        "connections": found.connections,
    }


if __name__ == "__main__":
    main()
