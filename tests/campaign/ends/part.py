"""Part `ends`: how requests end, whatever fails meanwhile.

The service is real and uses sockets; the engine's loop, core, scheduler and KV cache are real too.
Only the model is scripted (`tests.engine.fake_runner`): its tokens are computed by hand, and it
checks every batch and block. A `Gate` can hold back each step, so that a request stays in the
desired state. The engine runs in this process or in a separate one.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.campaign.ends.crowd import Crowd, crowds
from tests.campaign.ends.faults import FAULTS, Fault
from tests.campaign.ends.play import play
from tests.campaign.parts import Course, Part, Tried
from tests.service.ends import CELLS, Cell

PATIENCE_S = 90.0
"""The time after which a cell counts as stuck."""
CUT_CELLS = {False: 16, True: 2}
"""The number of cells per fault in the cut, by whether the engine is in a separate process."""
ROUNDS, CUT_ROUNDS = 20, 1
ROUND = 5_000
CUT_ROUND = 1_000
"""The number of requests of a round in the full part and in the cut, on one server."""
THREADS = 6
"""How many more threads than at the start may exist at the end: pools that gRPC keeps."""


def run(course: Course) -> None:
    """Run all rows with the server's logging disabled, since it would report thousands of
    faults.
    """
    logging.disable(logging.CRITICAL)
    try:
        for fault in FAULTS.values():
            if course.is_wanted(fault.name):
                course.add(asyncio.run(_beside(course, fault)))
        for number in range(course.either(ROUNDS, CUT_ROUNDS)):
            name = f"by chance {number + 1}"
            if course.is_wanted(name):
                course.add(_by_chance(course, name))
    finally:
        logging.disable(logging.NOTSET)


async def _beside(course: Course, fault: Fault) -> Tried:
    """Play every cell with the fault before and after the event; the cut plays a random sample."""
    plays = [(cell, is_first) for cell in CELLS for is_first in (True, False)]
    if course.is_cut:
        plays = course.source(fault.name).sample(plays, CUT_CELLS[fault.process])
    threads = _threads()
    wrong, longest = [], 0.0
    for number, (cell, is_first) in enumerate(plays):
        began = time.monotonic()
        wrong += await _played(course, fault, cell, is_first)
        longest = max(longest, time.monotonic() - began)
        if number % 50 == 49:
            course.say(f"{fault.name}: {number + 1} of {len(plays)}")
    gc.collect()
    if (tasks := len(asyncio.all_tasks())) > 1:
        wrong.append(f"{tasks - 1} tasks are left")
    if (more := _threads() - threads) > THREADS:
        wrong.append(f"{more} more threads than before")
    return Tried(
        name=fault.name,
        what=f"each cell of the ends table, before and after {fault.what}",
        promises=(1, 2, 3, 5, 6),
        count=len(plays),
        worst=f"{longest:.1f} s for a cell",
        wrong=wrong,
    )


def _threads() -> int:
    """Return the number of threads without log threads.

    A process normally has only one, but here each server starts one.
    """
    return sum(not one.name.startswith("log-") for one in threading.enumerate())


async def _played(course: Course, fault: Fault, cell: Cell, is_first: bool) -> list[str]:
    try:
        async with asyncio.timeout(PATIENCE_S):
            wrong = await play(cell, fault, is_first=is_first, folder=course.folder)
    except Exception as error:
        places = [
            f"{Path(one.filename).stem}:{one.lineno}"
            for one in traceback.extract_tb(error.__traceback__)
            if "/tests/campaign/" in one.filename
        ]
        wrong = [f"{type(error).__name__}: {error} ({' '.join(places)})"]
    order = "fault first" if is_first else "fault last"
    return [f"{cell}, {order}: {one}" for one in wrong]


def _by_chance(course: Course, name: str) -> Tried:
    """Run a round of random requests of all kinds with random events."""
    count = course.either(ROUND, CUT_ROUND)
    crowd = Crowd(course.source(name), count)
    wrong: list[str] = []
    try:
        asyncio.run(crowds(crowd, course.folder))
        wrong = crowd.wrong
    except Exception as error:
        wrong = [*crowd.wrong, f"{type(error).__name__}: {error}"]
    ends: Counter[str] = crowd.ends
    told = ", ".join(f"{number:,} {end}" for end, number in ends.most_common(6))
    return Tried(
        name=name,
        what=f"requests of all RPCs with cancels, cuts, attaches and failing steps ({told})",
        promises=(1, 2, 3, 5, 6),
        count=sum(ends.values()),
        wrong=wrong,
    )


ENDS = Part(
    name="ends",
    meaning="every way in which a request may end, beside every fault",
    run=run,
)
