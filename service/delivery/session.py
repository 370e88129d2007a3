"""A stream of results: everything that one RPC sends for the requests attached to it.

    request ──mark──▶ dirty requests ──take──▶ Batch ──▶ the RPC's writer (one message)
    answers ──reply─▶ replies ─────────────────┘

The writer loops: it calls `receive` for a batch and sends it, until the stream is `finished`. While
a send is blocked nothing is taken, so everything merges in the requests' logs. The reader of a
session (StreamResult) adds requests and answers. GenerateStream has one request and no reader. The
stream is a mailbox: requests put themselves into it, and decide what is taken.

A stream ends in one of these ways:
- `finished`: the client has half-closed (or the server drains), and all requests are delivered.
- `given_up`: its client reads nothing for minutes while ended requests wait for it. These requests
  are dropped, so that they do not fill the server. The RPC ends with an error once it can write.
- refused: its client may not continue (`refuse`). The RPC ends with that error, after the answers.
- lost: the RPC ended before that. Its requests continue for the lease, or are cancelled. A
  half-close cannot be told from a lost connection when it is seen. Only a normal end of the RPC
  shows that it was a half-close.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

from service.delivery.charges import StreamCharge
from service.delivery.events import Detached, NumberedEvent, Reply, in_flight
from service.delivery.load_watch import LoadReport
from service.delivery.log import EventLog
from service.errors.result_errors import RequestMovedError, ResultsNotReadError

MAX_BATCH_BYTES = 2 << 20
"""The approximate size of the largest message. The rest goes into the next one."""
MAX_REPLIES = 512
"""With this many unread answers, no further command is read."""


class AttachedRequest(Protocol):
    """A request, as seen by the stream of its results.

    Attributes:
        request_id: its id, as its owner knows it.
        log: its events.
    """

    request_id: str
    log: EventLog

    def take(self, limit: int) -> list[NumberedEvent]:
        """Take the next events, of about `limit` bytes. After the last event the request leaves the
        stream.
        """
        ...

    def leave(self) -> None:
        """Leave the stream, whose client reads nothing."""
        ...

    def lost(self, lease_s: float) -> None:
        """Continue without the stream for `lease_s` seconds, or be cancelled."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """The content of one message. `events`: the events with their requests' numbers on the session.
    `size`: the approximate number of bytes that they take.
    """

    replies: list[Reply]
    events: list[tuple[int, list[NumberedEvent]]]
    size: int


class ResultStream:
    """The requests and answers of one RPC. Created by `Registry.open_stream`.

    Attributes:
        lease_s: how long its requests continue after it is lost.
        closing: whether nothing new will come, because the client has half-closed or the server
            drains.
        busy: the number of commands in progress. The stream is not finished before they are.
        requests: the requests that are attached and not fully delivered, with their numbers: 1, 2,
            3, … in a session, 0 in other streams.
        ended_at: when each of these requests ended, if it has, in monotonic seconds.
        last_taken: when something was last taken.
        moved: the last request that another stream has taken over.
        is_session: whether it accepts commands. Otherwise it has one request.
        initial_credit: the number of tokens of each request that may be sent before more are
            granted, or None if credit is not used.
        load: reports of the engine's load for the client, or None if it did not ask for them.
        has_room: set while answers are being read, so that the server stops reading from a client
            that only writes.
        given_up: whether ended requests were dropped because the client read nothing for minutes.
        is_over: whether the RPC has ended.
    """

    def __init__(self, sending: StreamCharge, *, is_session: bool = False) -> None:
        """Make a stream for a session, or for an RPC with one request and no commands. `sending`:
        the charge for its messages.
        """
        self._sending = sending
        self._dirty: dict[AttachedRequest, None] = {}
        self._replies: list[Reply] = []
        self._wake = asyncio.Event()
        self.has_room = asyncio.Event()
        self.has_room.set()
        self._refusal: BaseException | None = None
        self._has_last_word = False  # everything before the refusal was received
        self.is_over = False
        self.last_taken = 0.0
        self.ended_at: dict[AttachedRequest, float] = {}
        self.requests: dict[AttachedRequest, int] = {}
        self._numbers = 0
        self.moved: AttachedRequest | None = None
        self.given_up = False
        self.lease_s = 0.0
        self.initial_credit: int | None = None
        self.load: LoadReport | None = None
        self.closing = not is_session
        self.is_session = is_session
        self.busy = 0

    # The requests' and the reader's side

    def mark(self, request: AttachedRequest) -> None:
        """Record that a request of this stream has something to take."""
        if not self._dirty:  # else the writer is awake
            self._wake.set()
        self._dirty[request] = None

    def add(self, request: AttachedRequest) -> None:
        """Add a request, and assign it a number."""
        if self.is_session:
            self._numbers += 1
        self.requests[request] = self._numbers

    def remove(self, request: AttachedRequest) -> None:
        """Remove a request."""
        self.requests.pop(request, None)
        self.ended_at.pop(request, None)
        self._dirty.pop(request, None)

    def moved_away(self, request: AttachedRequest) -> None:
        """Remove a request that now goes to another stream."""
        self.moved = request
        if self.is_session:
            self.reply(Detached(request.request_id, self.requests[request]))
        self._wake.set()

    def reply(self, reply: Reply) -> None:
        """Answer a command."""
        self._replies.append(reply)
        if len(self._replies) >= MAX_REPLIES:
            self.has_room.clear()
        self._wake.set()

    @property
    def unread_replies(self) -> int:
        """The number of answers that have not been taken yet."""
        return len(self._replies)

    def close(self) -> None:
        """Accept nothing new, and end once everything is delivered."""
        self.closing = True
        self._wake.set()

    def nudge(self) -> None:
        """Let the writer check again whether the stream is finished."""
        self._wake.set()

    def refuse(self, error: BaseException) -> None:
        """End the RPC with this error after the pending answers, because its client may not
        continue. Has no effect if the RPC is about to end anyway.
        """
        if not self.closing:
            self._refusal = error
        self._wake.set()

    def give_up(self) -> None:
        """Record that ended requests were dropped, because the client reads nothing."""
        self.given_up = True
        self._wake.set()

    # The writer's side

    def take(self) -> Batch | None:
        """Take everything that is pending. Called once the last message was sent. Return None if
        nothing is pending.
        """
        self._wake.clear()
        self._sending.set(0)
        if not self._dirty and not self._replies:
            return None
        replies, self._replies = self._replies, []
        self.has_room.set()
        events = []
        size = held = 0
        while self._dirty and size < MAX_BATCH_BYTES:
            request = next(iter(self._dirty))
            del self._dirty[request]
            number = self.requests[request]  # its last event makes it leave
            taken = request.take(MAX_BATCH_BYTES - size)
            if taken:
                events.append((number, taken))
                for numbered in taken:
                    size += numbered.event.size
                    held += in_flight(numbered.event)
        if not replies and not events:
            return None
        self.last_taken = time.monotonic()
        self._sending.set(held)
        return Batch(replies, events, size)

    def end(self) -> None:
        """Record that the RPC has ended."""
        self.is_over = True
        self._sending.set(0)

    @property
    def finished(self) -> bool:
        """Whether the RPC ends now: everything is delivered and nothing new will come."""
        return self.closing and not (self.busy or self.requests or self._dirty or self._replies)

    async def receive(self) -> Batch | None:
        """Wait for the content of the next message. Return None if the RPC ends normally.

        Raises:
            ResultsNotReadError: results were dropped because the client did not read them.
            HeadraceError: the error given to `refuse`, after the answers before it were received.
        """
        while True:
            if self.given_up:
                raise ResultsNotReadError
            refusal = self._refusal
            if refusal is not None and self._has_last_word:
                raise refusal
            self._has_last_word = refusal is not None
            if (batch := self.take()) is not None:
                return batch
            if self.finished:
                return None
            if refusal is None:
                await self._wake.wait()

    def check_end(self, request: AttachedRequest) -> None:
        """Check how a stream of a single request ends. Called by its writer when nothing is left to
        send.

        Raises:
            RequestMovedError: the request's results go to another stream.
            HeadraceError: the request failed.
        """
        if self.moved is request:
            raise RequestMovedError(request.request_id)
        request.log.raise_failure()
