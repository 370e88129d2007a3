"""Part `storms`: large numbers of concurrent calls, and changes that an operator makes meanwhile.

Each storm runs against a new server with default settings. The tokens and health checks of a
witness are judged; its waits are only reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.campaign.calm import look, witnessed
from tests.campaign.hostile.server import Server
from tests.campaign.parts import Course, Part, Tried, some
from tests.campaign.storms import operating
from tests.campaign.storms.calls import Crowd, non_readers

CALM_S, CUT_CALM_S = 20.0, 1.0
UNREAD_S = 10.0
Storm = Callable[[Server], Awaitable[tuple[int, str, list[str]]]]
"""Runs a storm; returns the number of calls, the worst value seen, and the violations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One storm, in full and for the cut; `cut` is None if the cut does not include it."""

    name: str
    what: str
    promises: tuple[int, ...]
    whole: Storm
    cut: Storm | None = None
    tls: bool = False


def _calls(calls: int, connections: int) -> Storm:
    async def storm(server: Server) -> tuple[int, str, list[str]]:
        crowd = Crowd(server, calls, connections)
        await crowd.run()
        seen, wrong = crowd.judge()
        odd = {
            end: count for end, count in crowd.tally.items() if end not in ("OK", "refused again")
        }
        return calls, seen, wrong + [f"{count} {end}" for end, count in odd.items()]

    return storm


def _unread(count: int, seconds: float) -> Storm:
    async def storm(server: Server) -> tuple[int, str, list[str]]:
        still = await non_readers(server, count, seconds)
        return count, f"{still} were open at the end", []

    return storm


def _times(storm: Callable[[Server, int], Awaitable[tuple[int, str, list[str]]]], n: int) -> Storm:
    return lambda server: storm(server, n)


ROWS = (
    Row(
        name="calls at once",
        what="calls at once on 30 connections, of which those that are refused come again as told",
        promises=(3, 7, 9),
        whole=_calls(3000, 30),
    ),
    Row(
        name="connections",
        what="calls at once, each on a connection of its own",
        promises=(3, 7),
        whole=_calls(300, 300),
        cut=_calls(60, 60),
    ),
    Row(
        name="non-readers",
        what="streams of 1,500 tokens that nobody reads",
        promises=(3, 7),
        whole=_unread(50, UNREAD_S),
    ),
    Row(
        name="callers rotated",
        what="calls while the callers' file changes: one caller comes and goes",
        promises=(10,),
        whole=_times(operating.rotate_callers, 10),
    ),
    Row(
        name="certificates rotated",
        what="TLS connections while the certificate is renewed",
        promises=(10,),
        whole=_times(operating.rotate_certificates, 10),
        tls=True,
    ),
    Row(
        name="tokens revoked",
        what="open sessions whose caller's token is taken away",
        promises=(10,),
        whole=_times(operating.revoke, 50),
        cut=_times(operating.revoke, 5),
    ),
    Row(
        name="full disk",
        what="calls of known and unknown callers while the log's file takes nothing more",
        promises=(11,),
        whole=_times(operating.full_disk, 400),
    ),
)


def run(course: Course) -> None:
    """Run each storm."""
    for row in ROWS:
        storm = row.cut if course.is_cut else row.whole
        if storm is not None and course.is_wanted(row.name):
            course.add(_stormed(course, row, storm))


def _stormed(course: Course, row: Row, storm: Storm) -> Tried:
    with witnessed(tls=row.tls) as (server, witness):
        calm = look(witness, course.either(CALM_S, CUT_CALM_S))
        witness.begin()

        async def send() -> tuple[int, str, list[str]]:
            return await storm(server)

        count, worst, wrong = asyncio.run(send())
        seen = witness.report()
        wrong += server.faults() + seen.losses
    gaps = (
        f"gap {seen.gaps.worst_s * 1e3:.0f} ms (calm {calm.gaps.worst_s * 1e3:.0f}), health "
        f"{seen.health.worst_s * 1e3:.0f} ms"
    )
    return Tried(
        name=row.name,
        what=row.what,
        promises=row.promises,
        count=count,
        worst=f"{worst}; {gaps}" if worst else gaps,
        wrong=some(wrong),
    )


STORMS = Part(
    name="storms",
    meaning="many at once, and what an operator changes meanwhile",
    minutes=8,
    run=run,
    has_calm=False,
)
