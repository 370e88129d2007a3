"""A stream of results: what one RPC receives of the requests that are attached to it.

    registry ──mark──▶ dirty requests ──take──▶ Batch ──▶ the RPC's writer (one message)

The writer loops: take a batch and send it; when there is none, end if `finished`, else wait. While
a send is blocked nothing is taken, so everything merges in the requests' logs. The reader of a
session (StreamResult) adds requests and answers; GenerateStream and Generate have one request and
no reader.

How a stream ends:
- `finished`: the client said that nothing follows (or the server drains), and all requests are
  delivered.
- `given_up`: its client reads nothing for minutes while ended requests wait for it. They are
  forgotten, so that they do not fill the server; the RPC ends with an error once it can write.
- `lost`: the RPC ended before that. Its requests go on for the lease, or are cancelled. Whether a
  half-close was one or the first sign of a lost connection cannot be told when it is seen; it is
  concluded only by a normal end.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from service.delivery.errors import RequestFailedError, RequestMovedError, ResultsNotReadError
from service.delivery.events import Detached, NumberedEvent, Reply

if TYPE_CHECKING:
    from service.delivery.log import RequestLog
    from service.delivery.registry import Registry

MAX_BATCH_BYTES = 2 << 20
"""A message that is about this large is sent; the rest goes into the next one."""
MAX_REPLIES = 512
"""With this many answers unread, no further command is read."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What goes into one message. `events`: with their requests' names; `size`: about how many
    bytes they take.
    """

    replies: list[Reply]
    events: list[tuple[str, list[NumberedEvent]]]
    size: int


class ResultStream:
    """The requests and answers of one RPC.

    Attributes:
        lease_s: how long its requests go on after it was lost.
        closing: nothing more is to come from the client, or from the server because it drains.
        busy: commands that are being carried out; the stream is not finished before they are.
        logs: the requests that are attached and not fully delivered.
        moved: the last request that another stream took over.
        is_session: whether it takes commands; else it has one request.
        initial_credit: how many tokens of each of its requests may be sent before more are granted;
            None: there are no credits.
        given_up: whether ended requests were let go, because the client read nothing for minutes.
    """

    def __init__(self, registry: Registry, *, is_session: bool = False) -> None:
        """A stream: of a session, or of an RPC that has one request and takes no commands."""
        self._registry = registry
        self._dirty: dict[RequestLog, None] = {}
        self._replies: list[Reply] = []
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._over = False
        self._last_taken = 0.0
        self._ended_at: dict[RequestLog, float] = {}  # of its requests that wait to be taken
        self._unread_timer: asyncio.TimerHandle | None = None
        self.logs: set[RequestLog] = set()
        self.moved: RequestLog | None = None
        self.given_up = False
        self.lease_s = 0.0
        self.initial_credit: int | None = None
        self.closing = not is_session
        self.is_session = is_session
        self.busy = 0
        registry.streams.add(self)

    # The registry's and the reader's side

    def attach(self, log: RequestLog, from_seq: int) -> None:
        """Make the log's events from `from_seq` on (which was checked) go here, away from where
        they went.
        """
        if log.stream is not None and log.stream is not self:
            log.stream.detach(log)
        log.stream = self
        log.move_to(from_seq)
        log.credit = self.initial_credit
        if log not in self.logs:
            self.logs.add(log)
            self._registry.on_attached(log)
        if log.is_takeable:
            self.mark(log)
        elif log.delivered:
            self._release(log)
        if log.stream is self:
            self._registry.flow.taken(log)
            if log.ended:
                self.expect_reader(log, self._registry.unread_s)
        if self._over:  # it was lost while the request was on its way
            self._drop(log)
            self._registry.on_lost(self, [log])

    def detach(self, log: RequestLog) -> None:
        """The log's events go elsewhere from now on."""
        self._drop(log)
        self._dirty.pop(log, None)
        self.moved = log
        if self.is_session:
            self.reply(Detached(log.request_id))
        self._wake.set()

    def mark(self, log: RequestLog) -> None:
        """The log has something to take."""
        if not self._dirty:  # else the writer is awake
            self._wake.set()
        self._dirty[log] = None

    def reply(self, reply: Reply) -> None:
        """Answer a command."""
        self._replies.append(reply)
        if len(self._replies) >= MAX_REPLIES:
            self._room.clear()
        self._wake.set()

    async def room(self) -> None:
        """Wait until answers are being read: a client that only writes is not listened to for
        ever.
        """
        await self._room.wait()

    def close(self) -> None:
        """Nothing more is to come: end once everything is delivered."""
        self.closing = True
        self._wake.set()

    def nudge(self) -> None:
        """Let the writer look again whether the stream is finished."""
        self._wake.set()

    def expect_reader(self, log: RequestLog, limit_s: float) -> None:
        """One of its requests has ended: if such a one waits, and nothing was taken, for this many
        seconds, nobody reads.
        """
        self._ended_at[log] = time.monotonic()
        if self._unread_timer is None:
            self._wait_for_reader(limit_s, limit_s)

    def _wait_for_reader(self, delay_s: float, limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._unread_timer = loop.call_later(delay_s, self._check_reader, limit_s)

    def _check_reader(self, limit_s: float) -> None:
        self._unread_timer = None
        ended = list(self._ended_at)
        if not ended or self._over:
            return
        since = max(self._last_taken, min(self._ended_at.values()))
        left_s = since + limit_s - time.monotonic()
        if left_s > 0:
            self._wait_for_reader(left_s, limit_s)
            return
        self.given_up = True
        for log in ended:
            self._dirty.pop(log, None)
            self._drop(log)
            log.stream = None
            self._registry.on_given_up(log)
        self._wake.set()

    # The writer's side

    def take(self) -> Batch | None:
        """Take what is pending; None: nothing is."""
        self._wake.clear()
        if not self._dirty and not self._replies:
            return None
        replies, self._replies = self._replies, []
        self._room.set()
        events = []
        size = held = 0
        while self._dirty and size < MAX_BATCH_BYTES:
            log = next(iter(self._dirty))
            del self._dirty[log]
            taken = log.take_for_stream(MAX_BATCH_BYTES - size)
            if taken:
                events.append((log.request_id, taken))
                for numbered in taken:
                    size += numbered.event.size
                    held += numbered.event.held
            if log.ended and log.delivered:
                self._release(log)
                continue
            if log.flow.is_held or log.credit is not None:
                self._registry.flow.taken(log)
            if (log.cursor < log.next_seq or log.credit is not None) and log.is_takeable:
                self._dirty[log] = None  # it goes on in the next message
        if not replies and not events:
            return None
        self._last_taken = time.monotonic()
        self._registry.on_taken(held)
        return Batch(replies, events, size)

    def _drop(self, log: RequestLog) -> None:
        if log in self.logs:
            self.logs.remove(log)
            self._ended_at.pop(log, None)
            self._registry.on_detached(log)

    def _release(self, log: RequestLog) -> None:
        self._drop(log)
        log.stream = None
        self._registry.on_delivered(log)

    async def wait(self) -> None:
        """Wait until there may be something to take, or the stream may be finished."""
        await self._wake.wait()

    @property
    def finished(self) -> bool:
        """Whether the RPC ends now: nothing is left and nothing is to come."""
        return self.closing and not (self.busy or self.logs or self._dirty or self._replies)

    def complete(self) -> None:
        """The RPC ended as it should."""
        self._over = True
        self._stop_waiting()
        self._registry.streams.discard(self)

    def _stop_waiting(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def check_given_up(self) -> None:
        """Called by the writer, once it can write again.

        Raises:
            ResultsNotReadError: results were forgotten, because nobody read them.
        """
        if self.given_up:
            raise ResultsNotReadError

    def check_end(self, log: RequestLog) -> None:
        """Called by the writer of a single request's stream, once nothing is left of it.

        Raises:
            RequestMovedError: its results go to another stream.
            HeadraceError: it failed.
        """
        if self.moved is log:
            raise RequestMovedError(log.request_id)
        failed = log.failure
        if failed is not None and failed.error is not None:
            raise failed.error
        if failed is not None and failed.finish.failure is not None:
            raise RequestFailedError(failed.finish.failure)

    def lost(self) -> None:
        """The RPC is over. Unless it was complete: its requests go on for the lease, or are
        cancelled.
        """
        if self._over:
            return
        self._over = True
        self._stop_waiting()
        self._registry.streams.discard(self)
        logs = list(self.logs)
        for log in logs:
            self._drop(log)
        self._dirty.clear()
        self._registry.on_lost(self, logs)
