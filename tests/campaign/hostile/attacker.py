"""What an attacker's process does with an input: it sends it and tells what was answered."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from tests.campaign.hostile.inputs import INPUTS
from tests.campaign.hostile.sending import Sender

Done = tuple[dict[str, int], int]
"""The tally of answers, and the number of connections."""


def attacked(name: str, seconds: float, **sender: Any) -> Done:
    """Send an input, as `attack` does, on an event loop of its own."""
    return asyncio.run(attack(name, seconds, **sender))


async def attack(name: str, seconds: float, **sender: Any) -> Done:
    """Send an input for at most `seconds`. `sender`: as of a Sender."""
    async with Sender(**sender) as s:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await INPUTS[name].send(s)
        return dict(s.tally.most_common()), s.connections
