"""Hundreds of concurrent calls to the operators' methods and to reflection.

Callers of these methods are trusted with the server, but the calls must still not stall it.
"""

from __future__ import annotations

import itertools

from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection_pb2
from headrace.v1 import control_service_pb2 as control

from tests.campaign.hostile import encoding as wire
from tests.campaign.hostile.inputs.derived import of
from tests.campaign.hostile.inputs.kinds import OK, Case, Group, invalid
from tests.campaign.hostile.sending import ADD, CONTROL, REFLECTION, Sender


def _case(method: str, message: Message, *answers: str) -> Case:
    return Case(CONTROL + method, lambda s: message, answers or (OK,), is_operator=True)


def _cancels(requests: list[dict[str, str]]) -> Case:
    message = control.CancelRequestsRequest(requests=requests)
    return _case("CancelRequests", message, *invalid("requests"))


CONTROL_GROUP = Group("control")


@CONTROL_GROUP.sends()
async def reflection(s: Sender) -> None:
    """Reflection on four streams, as fast as it is answered."""
    questions = itertools.cycle(
        reflection_pb2.ServerReflectionRequest(**question).SerializeToString()
        for question in (
            {"list_services": "*"},
            {"file_containing_symbol": "headrace.v1.GenerationService"},
            {"file_by_filename": "none"},
        )
    )
    await s.crowd(4, lambda _: s.session(questions, method=REFLECTION))


@CONTROL_GROUP.sends()
async def statistics_watches(s: Sender) -> None:
    """300 WatchStatistics of ten messages a second."""
    every = control.WatchStatisticsRequest(interval={"nanos": 100_000_000}).SerializeToString()
    await s.crowd(300, lambda _: s.call(CONTROL + "WatchStatistics", every, token=s.operator))


@CONTROL_GROUP.sends(answers=(OK,))
async def cancel_requests(s: Sender) -> None:
    """CancelRequests of 1,024 unknown ids, 16 at once."""
    names = [{"identity": "mallory", "request_id": "none"}] * 1024
    raw = control.CancelRequestsRequest(requests=names).SerializeToString()
    await s.again(16, lambda _: s.call(CONTROL + "CancelRequests", raw, token=s.operator))


@CONTROL_GROUP.sends(answers=(OK,))
async def list_requests(s: Sender) -> None:
    """ListRequests of 1,000 waiting requests, 64 at once."""
    added = wire.request(stop={"max_tokens": 500, "ignore_eos": True})
    page = control.ListRequestsRequest(page_size=1000).SerializeToString()
    await s.crowd(900, lambda _: s.call(ADD, added))
    await s.again(64, lambda _: s.call(CONTROL + "ListRequests", page, token=s.operator))


CONTROL_GROUP.tries(
    "list-pages",
    "pages of lists that are none, of the largest size, and of long identities",
    *of("ListRequestsRequest"),
    _case("ListRequests", control.ListRequestsRequest(page_token="-1"), *invalid("page_token")),
    width=8,
)
CONTROL_GROUP.tries(
    "watch-intervals",
    "statistics in intervals that are none",
    *(case for case in of("WatchStatisticsRequest.interval") if OK not in case.answers),
    width=8,
)
CONTROL_GROUP.tries(
    "long-reasons",
    "pauses and drains for reasons that are too long, and within times that are none",
    *of("PauseRequest.reason", "DrainRequest"),
    _case("Pause", control.PauseRequest(reason="r" * 257), *invalid("reason")),
    width=8,
)
CONTROL_GROUP.tries(
    "cancelled-names",
    "cancels of requests of long names, of none, and of too many",
    *of("RequestName"),
    _cancels([]),
    _cancels([{"identity": "a", "request_id": "b"}] * 1025),
)
CONTROL_GROUP.tries(
    "prefixes-dropped",
    "the prefix cache dropped again and again, eight at once",
    _case("ResetPrefixCache", control.ResetPrefixCacheRequest()),
    width=8,
)
CONTROL_GROUP.tries(
    "log-levels",
    "levels of the log that are none, and all others in turns",
    *of("SetLogLevelRequest.level"),
    *(
        _case("SetLogLevel", control.SetLogLevelRequest(level=level))  # type: ignore[arg-type]
        for level in (4, 3, 1, 2)
    ),
    width=4,
)
