"""What the scripted servers of one vector have seen, and the requests that they serve.

1. A call comes in (`server.py`) and is a `Call` here; what it asks for is an `Arrival`: a request
   to begin, or one to attach.
2. The vector's steps wait for arrivals, answer them, and send events (`Stage.take`, `Served.tell`).
3. Whatever no step has asked for is a fault at the end (`Stage.leftovers`): a request that was sent
   twice, a cancel that nobody wanted, a stream that was left open.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from headrace.v1 import generation_pb2 as g
from headrace.v1 import generation_service_pb2 as s

T = TypeVar("T")

WAIT_SECONDS = 10.0
"""A bound for what must happen; never a pause."""
EARLY_SECONDS = 0.002
"""Clocks are read at both ends of a wait, and rounded."""


class Unmet(Exception):
    """The vector is not met; says what was wanted and what there was."""


@dataclass(frozen=True)
class End:
    """The end of a call, with its status."""

    status: status_pb2.Status | None = None
    """None: OK."""


@dataclass
class Call:
    """One RPC that a server has."""

    method: str
    server: str
    instance_id: str
    metadata: dict[str, str]
    began: float
    out: asyncio.Queue[bytes | End] = field(default_factory=asyncio.Queue)
    is_open: bool = True
    was_cancelled: bool = False
    """Whether its client (or a lost connection) ended it."""
    half_closed: bool = False
    live: dict[int, Served] = field(default_factory=dict)
    """A session's requests that have not ended, by their numbers."""
    numbers: int = 0
    said_instance: bool = False
    messages: list[Message] = field(default_factory=list)

    def send(self, message: Message, extra: bytes = b"") -> None:
        """Sends a message; `extra`: fields that no client knows, as bytes."""
        if self.method in ("StreamResult", "GenerateStream") and not self.said_instance:
            self.said_instance = True
            message.instance_id = self.instance_id  # type: ignore[attr-defined]
        self.out.put_nowait(message.SerializeToString() + extra)

    def finish(self, status: status_pb2.Status | None = None) -> None:
        """Ends the call."""
        self.out.put_nowait(End(status))


@dataclass
class Arrival:
    """A client asks to begin a request, or to attach one."""

    request_id: str
    kind: str
    """The RPC; on a session `add` or `attach`."""
    call: Call
    at: float
    message: Any
    """The spec, or the attach command."""
    command_id: int = 0
    required: tuple[str, ...] = ()
    answered: bool = False


class Served:
    """A request as a server has it: the truth that a driver's results are compared with."""

    def __init__(self, arrival: Arrival) -> None:
        self.request_id = arrival.request_id
        self.spec: g.GenerationSpec = arrival.message
        self.n = self.spec.n if self.spec.HasField("n") else 1
        self.log: list[g.ResultEvent] = []
        self.finished: set[int] = set()
        self.ended = False
        self.place(arrival.call)

    def place(self, call: Call) -> None:
        """Its events go there from now on."""
        self.call, self.number = call, 0
        if call.method == "StreamResult":
            call.numbers += 1
            self.number = call.numbers
            call.live[self.number] = self

    def note(self, event: g.ResultEvent) -> None:
        """Numbers an event, and keeps it."""
        event.seq = len(self.log) + 1
        self.log.append(event)
        kind = event.WhichOneof("event")
        if kind == "finished":
            self.finished.add(event.choice_index)
        if kind == "failed" or len(self.finished) == self.n:
            self.ended = True

    def tell(self, events: list[g.ResultEvent], extra: bytes = b"") -> None:
        """Sends events to where the request is."""
        call = self.call
        if call.method == "StreamResult":
            numbered = []
            for event in events:
                one = g.ResultEvent()
                one.CopyFrom(event)
                one.request_number = self.number
                numbered.append(one)
            call.send(s.StreamResultResponse(events=numbered), extra)
            if self.ended and events and events[-1] is self.log[-1]:
                call.live.pop(self.number, None)
        elif call.method == "GenerateStream":
            call.send(s.GenerateStreamResponse(events=events), extra)


class Stage:
    """All that the servers of one vector share."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.arrivals: list[Arrival] = []
        self.cancels: list[tuple[str, str]] = []
        """What was asked to be cancelled, and by which means: `session` or `Cancel`."""
        self.credits: Counter[str] = Counter()
        self.served: dict[str, Served] = {}
        """By the request's id: the last run of it."""
        self.faults: list[str] = []
        self.ignored: set[str] = set()
        """Ids of requests whose arrivals are nobody's business."""
        self.unasked: set[str] = set()
        """The servers that are ready, and whose model no client has asked for yet."""
        self._refused: dict[tuple[str, str], tuple[float, float]] = {}
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Something has happened: who waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(
        self, found: Callable[[], T | None], what: str, seconds: float = WAIT_SECONDS
    ) -> T:
        """Waits until there is what is wanted.

        Raises:
            Unmet: it does not come.
        """
        end = time.monotonic() + seconds
        while True:
            result = found()
            if result is not None and result is not False:
                return result
            left = end - time.monotonic()
            if left <= 0:
                raise Unmet(f"{what}: did not come within {seconds:g} s. {self.summary()}")
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def arrive(self, arrival: Arrival) -> None:
        """Notes what a client asks for; not before the time that it was told."""
        told = self._refused.pop((arrival.request_id, arrival.call.server), None)
        if told is not None and arrival.kind != "attach":
            refused_at, seconds = told
            waited = arrival.at - refused_at
            if waited < seconds - EARLY_SECONDS:
                self.faults.append(
                    f"request {arrival.request_id} came again after {waited:.3f} s; it was told "
                    f"to wait {seconds:.3f} s"
                )
        self.arrivals.append(arrival)
        self.changed()

    def refused(self, arrival: Arrival, seconds: float | None) -> None:
        """Notes that a request was refused, with this advice."""
        if seconds is not None:
            key = (arrival.request_id, arrival.call.server)
            self._refused[key] = (time.monotonic(), seconds)

    async def take(self, request_id: str, kind: str) -> Arrival:
        """The next arrival of a request (any new one, if its id is not known: "") of this kind
        (empty: one that begins it).
        """

        def fits(one: Arrival) -> bool:
            is_kind = one.kind == kind if kind else one.kind != "attach"
            return not one.answered and is_kind and one.request_id == request_id

        def find() -> Arrival | None:
            return next((one for one in self.arrivals if fits(one)), None)

        arrival = await self.until(find, f"{kind or 'the start'} of request {request_id}")
        arrival.answered = True
        return arrival

    def count(self, method: str) -> int:
        """How often a method was called."""
        return sum(call.method == method for call in self.calls)

    def open_calls(self) -> list[Call]:
        """The calls that have not ended."""
        return [call for call in self.calls if call.is_open]

    def leftovers(self) -> list[str]:
        """What no step has asked for."""
        found = list(self.faults)
        for one in self.arrivals:
            if not one.answered and one.request_id not in self.ignored:
                found.append(f"an unexpected {one.kind} of request {one.request_id}")
        for one, how in self.cancels:
            if one not in self.ignored:
                found.append(f"an unexpected cancel of {one} by {how}")
        return found

    def summary(self) -> str:
        """What the servers have seen, for messages."""
        calls = ", ".join(
            f"{one.method}@{one.server}{'' if one.is_open else ' (ended)'}"
            for one in self.calls
            if one.method not in ("Check", "GetModel")
        )
        arrivals = ", ".join(
            f"{one.kind} {one.request_id}{'' if one.answered else ' (unanswered)'}"
            for one in self.arrivals
        )
        return f"Seen: calls [{calls}]; requests [{arrivals}]; cancels {self.cancels}"


def make_status(told: dict[str, Any]) -> tuple[status_pb2.Status, float | None]:
    """A status of what a vector says, and the advice in it, in seconds."""
    from grpc import StatusCode

    code = StatusCode[told["code"]].value[0]
    message = told.get("message", f"scripted {told['code']}")
    status = status_pb2.Status(code=code, message=message)
    if "reason" in told:
        info = error_details_pb2.ErrorInfo(
            reason=told["reason"], domain="headrace.dev", metadata=told.get("metadata", {})
        )
        status.details.add().Pack(info)
    if "fields" in told:
        bad = error_details_pb2.BadRequest()
        for one in told["fields"]:
            bad.field_violations.add(field=one["field"], description=one["description"])
        status.details.add().Pack(bad)
    seconds = None
    if "retry_ms" in told:
        seconds = told["retry_ms"] / 1000
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(told["retry_ms"] * 1_000_000)
        status.details.add().Pack(retry)
    if told.get("unknown_detail"):
        status.details.add(type_url="type.googleapis.com/headrace.v9.Newer", value=b"\x0a\x01x")
    if told.get("spoiled_detail"):
        kind = "type.googleapis.com/google.rpc.BadRequest"
        status.details.add(type_url=kind, value=b"\x0a\xff")
    return status, seconds
