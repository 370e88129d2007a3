"""Part `storms`: large numbers of concurrent calls, and changes that an operator makes meanwhile.

Each storm runs against a new server with default settings. The tokens and health checks of a
witness are judged; its waits are only reported.
"""

from __future__ import annotations

import asyncio

from tests.campaign.calm import beside
from tests.campaign.parts import Course, Part, Tried
from tests.campaign.storms import calls, operating
from tests.campaign.storms.storm import ROWS, Found, Storm

CALM_S, CUT_CALM_S = 20.0, 1.0
__all__ = ["ROWS", "STORMS", "calls", "operating"]


def run(course: Course) -> None:
    for row in ROWS:
        size = course.either(row.whole, row.cut)
        if size is not None and course.is_wanted(row.name):
            course.add(_stormed(course, row, size))


def _stormed(course: Course, row: Storm, size: int) -> Tried:
    with beside(course.either(CALM_S, CUT_CALM_S), tls=row.tls) as there:

        async def send() -> Found:
            async with there.server.sender() as s:
                return await row.run(there.server, s, size)

        count, worst, wrong = there.during(lambda: asyncio.run(send()))
        wrong += there.faults()
    return Tried(
        name=row.name,
        what=row.what,
        promises=row.promises,
        count=count,
        worst="; ".join(filter(None, (worst, f"{there.gap}, {there.health}"))),
        wrong=wrong,
    )


STORMS = Part(
    name="storms",
    meaning="many at once, and what an operator changes meanwhile",
    run=run,
    has_calm=False,
)
