"""Operators' methods and reflection, by the hundred. Whoever may call them is trusted with the
server; that it stands still for them is wanted by nobody all the same.
"""

from __future__ import annotations

import itertools

from benchmarks.hostile import encoding as wire
from benchmarks.hostile.inputs.kinds import Group, Input
from benchmarks.hostile.sending import CONTROL, GENERATION, REFLECTION, Sender


async def statistics_watches(s: Sender) -> None:
    """300 WatchStatistics of ten messages a second."""
    every = wire.field(1, wire.count(2, 100_000_000))
    await s.crowd(300, lambda _: s.call(CONTROL + "WatchStatistics", every, token=s.operator))


async def list_requests(s: Sender) -> None:
    """Lists of 1,000 waiting requests, 64 at once."""
    spec = wire.text_input("Once upon a time") + wire.max_tokens(500, ignore_eos=True)
    await s.crowd(900, lambda _: s.call(GENERATION + "AddRequest", wire.request(spec)))
    await s.again(
        64, lambda _: s.call(CONTROL + "ListRequests", wire.count(2, 1000), token=s.operator)
    )


async def cancel_requests(s: Sender) -> None:
    """Cancels of 1,024 requests that nobody has, 16 at once."""
    name = wire.field(1, wire.field(1, "mallory") + wire.field(2, "none"))
    await s.again(16, lambda _: s.call(CONTROL + "CancelRequests", name * 1024, token=s.operator))


async def reflection(s: Sender) -> None:
    """Questions for all services and for the largest file, on four streams."""
    questions = itertools.cycle(
        [wire.field(7, "*"), wire.field(4, "headrace.v1.GenerationService"), wire.field(3, "none")]
    )
    await s.crowd(4, lambda _: s.session(questions, method=REFLECTION))


CONTROL_GROUP = Group(
    "control",
    (
        Input(
            name="reflection",
            meaning="reflection on four streams, as fast as it is answered",
            send=reflection,
        ),
        Input(
            name="statistics-watches",
            meaning="300 WatchStatistics of ten messages a second",
            send=statistics_watches,
        ),
        Input(
            name="cancel-requests",
            meaning="CancelRequests of 1,024 unknown ids, 16 at once",
            send=cancel_requests,
        ),
        Input(
            name="list-requests",
            meaning="ListRequests of 1,000 waiting requests, 64 at once",
            send=list_requests,
        ),
    ),
)
