"""Hundreds of concurrent calls to the operators' methods and to reflection.

Callers of these methods are trusted with the server, but the calls must still not stall it.
"""

from __future__ import annotations

import itertools
from typing import Any

from google.protobuf.message import Message
from headrace.v1 import control_service_pb2 as control

from benchmarks.hostile import encoding as wire
from benchmarks.hostile.inputs.kinds import OK, Case, Group, Input, by_cases, invalid
from benchmarks.hostile.sending import CONTROL, GENERATION, REFLECTION, Sender


async def statistics_watches(s: Sender) -> None:
    """Open 300 WatchStatistics streams that each ask for ten messages a second."""
    every = wire.field(1, wire.count(2, 100_000_000))
    await s.crowd(300, lambda _: s.call(CONTROL + "WatchStatistics", every, token=s.operator))


async def list_requests(s: Sender) -> None:
    """List 1,000 waiting requests, with 64 calls at the same time."""
    spec = wire.text_input("Once upon a time") + wire.max_tokens(500, ignore_eos=True)
    await s.crowd(900, lambda _: s.call(GENERATION + "AddRequest", wire.request(spec)))
    await s.again(
        64, lambda _: s.call(CONTROL + "ListRequests", wire.count(2, 1000), token=s.operator)
    )


async def cancel_requests(s: Sender) -> None:
    """Cancel 1,024 unknown request ids per call, with 16 calls at the same time."""
    name = wire.field(1, wire.field(1, "mallory") + wire.field(2, "none"))
    await s.again(16, lambda _: s.call(CONTROL + "CancelRequests", name * 1024, token=s.operator))


async def reflection(s: Sender) -> None:
    """Ask reflection for all services and for the largest file, on four streams."""
    questions = itertools.cycle(
        [wire.field(7, "*"), wire.field(4, "headrace.v1.GenerationService"), wire.field(3, "none")]
    )
    await s.crowd(4, lambda _: s.session(questions, method=REFLECTION))


def _case(method: str, message: Message, *answers: str) -> Case:
    return Case(CONTROL + method, lambda s: message, answers or (OK,), is_operator=True)


def _list(*answers: str, **question: Any) -> Case:
    return _case("ListRequests", control.ListRequestsRequest(**question), *answers)


def _watch(interval: dict[str, int]) -> Case:
    message = control.WatchStatisticsRequest(interval=interval)
    return _case("WatchStatistics", message, *invalid("interval"))


def _level(level: int, *answers: str) -> Case:
    message = control.SetLogLevelRequest(level=level)  # type: ignore[arg-type]
    return _case("SetLogLevel", message, *answers)


def _cancels(*answers: str, requests: list[dict[str, str]]) -> Case:
    return _case("CancelRequests", control.CancelRequestsRequest(requests=requests), *answers)


_LONG = "\u20ac" * 300_000
OPERATORS = (
    by_cases(
        "list-pages",
        "pages of lists that are none, of the largest size, and of long identities",
        _list(page_size=2**32 - 1),
        _list(*invalid("page_token"), page_token="none"),
        _list(*invalid("page_token"), page_token=_LONG),
        _list(*invalid("page_token"), page_token="-1"),
        _list(identity=_LONG),
        _list(identity="\x00\n", page_size=0),
        fields=[
            "ListRequestsRequest.identity",
            "ListRequestsRequest.page_size",
            "ListRequestsRequest.page_token",
        ],
        width=8,
    ),
    by_cases(
        "watch-intervals",
        "statistics in intervals that are none",
        *map(
            _watch, ({}, {"nanos": 1}, {"seconds": -1}, {"seconds": 3601}, {"seconds": 2**63 - 1})
        ),
        fields=["WatchStatisticsRequest.interval"],
        width=8,
    ),
    by_cases(
        "long-reasons",
        "pauses and drains for reasons that are too long, and within times that are none",
        _case("Pause", control.PauseRequest(reason=_LONG), *invalid("reason")),
        _case("Pause", control.PauseRequest(reason="r" * 257), *invalid("reason")),
        _case("Drain", control.DrainRequest(reason=_LONG), *invalid("reason")),
        *(
            _case("Drain", control.DrainRequest(timeout=timeout), *invalid("timeout"))
            for timeout in (
                {"seconds": -1},
                {"seconds": 86_401},
                {"nanos": 2_000_000_000},
                {"seconds": 2**63 - 1},
            )
        ),
        fields=["PauseRequest.reason", "DrainRequest.reason", "DrainRequest.timeout"],
        width=8,
    ),
    by_cases(
        "cancelled-names",
        "cancels of requests of long names, of none, and of too many",
        _cancels(*invalid("requests[].identity"), requests=[{"request_id": "a"}]),
        _cancels(
            OK, *invalid("requests[].request_id"), requests=[{"identity": _LONG, "request_id": "a"}]
        ),
        _cancels(*invalid("requests[].request_id"), requests=[{"identity": "a"}]),
        _cancels(*invalid("requests"), requests=[]),
        _cancels(*invalid("requests"), requests=[{"identity": "a", "request_id": "b"}] * 1025),
        fields=["RequestName.identity", "RequestName.request_id"],
    ),
    by_cases(
        "prefixes-dropped",
        "the prefix cache dropped again and again, eight at once",
        _case("ResetPrefixCache", control.ResetPrefixCacheRequest()),
        fields=[],
        width=8,
    ),
    by_cases(
        "log-levels",
        "levels of the log that are none, and all others in turns",
        *(_level(level, *invalid("level")) for level in (0, 99, -1)),
        *map(_level, (4, 3, 1, 2)),
        fields=["SetLogLevelRequest.level"],
        width=4,
    ),
)
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
            fields=("WatchStatisticsRequest.interval",),
        ),
        Input(
            name="cancel-requests",
            meaning="CancelRequests of 1,024 unknown ids, 16 at once",
            send=cancel_requests,
            answers=(OK,),
            fields=("RequestName.identity", "RequestName.request_id"),
        ),
        Input(
            name="list-requests",
            meaning="ListRequests of 1,000 waiting requests, 64 at once",
            send=list_requests,
            answers=(OK,),
            fields=("ListRequestsRequest.page_size",),
        ),
        *OPERATORS,
    ),
)
