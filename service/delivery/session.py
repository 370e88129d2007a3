"""A stream of results: what one RPC receives of the requests that are attached to it.

    request ──mark──▶ dirty requests ──take──▶ Batch ──▶ the RPC's writer (one message)
    answers ──reply─▶ replies ─────────────────┘

The writer loops: `receive` a batch and send it, until it is `finished`. While
a send is blocked nothing is taken, so everything merges in the requests' logs. The reader of a
session (StreamResult) adds requests and answers; GenerateStream has one request and no reader. The
stream is a mailbox: requests put themselves into it, and decide what is taken.

How a stream ends:
- `finished`: the client said that nothing follows (or the server drains), and all requests are
  delivered.
- `given_up`: its client reads nothing for minutes while ended requests wait for it. They are
  forgotten, so that they do not fill the server; the RPC ends with an error once it can write.
- refused: its client may not go on (`refuse`). The RPC ends with that, behind the answers.
- lost: the RPC ended before that. Its requests go on for the lease, or are cancelled. Whether a
  half-close was one or the first sign of a lost connection cannot be told when it is seen; it is
  concluded only by a normal end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from service.delivery.events import Detached, NumberedEvent, Reply
from service.delivery.result_errors import RequestMovedError, ResultsNotReadError

if TYPE_CHECKING:
    from service.delivery.request import ServedRequest
    from service.load import LoadReport

MAX_BATCH_BYTES = 2 << 20
"""A message that is about this large is sent; the rest goes into the next one."""
MAX_REPLIES = 512
"""With this many answers unread, no further command is read."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What goes into one message. `events`: with their requests' numbers on the session; `size`:
    about how many bytes they take.
    """

    replies: list[Reply]
    events: list[tuple[int, list[NumberedEvent]]]
    size: int


class ResultStream:
    """The requests and answers of one RPC. `Registry.open_stream` makes it.

    Attributes:
        lease_s: how long its requests go on after it was lost.
        closing: nothing more is to come from the client, or from the server because it drains.
        busy: commands that are being carried out; the stream is not finished before they are.
        requests: those that are attached and not fully delivered, with their numbers: 1, 2, 3 and
            so on in a session, 0 in other streams.
        ended_at: when which of them have ended; monotonic seconds.
        last_taken: when something was taken last.
        moved: the last request that another stream took over.
        is_session: whether it takes commands; else it has one request.
        initial_credit: how many tokens of each of its requests may be sent before more are granted;
            None: there are no credits.
        load: the engine's load, as far as the client is to be told it; None: it is not.
        has_room: set while answers are being read: a client that only writes is not listened to for
            ever.
        given_up: whether ended requests were let go, because the client read nothing for minutes.
        is_over: whether the RPC has ended.
    """

    def __init__(self, on_taken: Callable[[int], None], *, is_session: bool = False) -> None:
        """A stream: of a session, or of an RPC that has one request and takes no commands.
        `on_taken` is told of about how many bytes of memory were taken.
        """
        self._on_taken = on_taken
        self._dirty: dict[ServedRequest, None] = {}
        self._replies: list[Reply] = []
        self._wake = asyncio.Event()
        self.has_room = asyncio.Event()
        self.has_room.set()
        self._refusal: BaseException | None = None
        self._has_last_word = False  # what came before the refusal was received
        self.is_over = False
        self.last_taken = 0.0
        self.ended_at: dict[ServedRequest, float] = {}
        self.requests: dict[ServedRequest, int] = {}
        self._numbers = 0
        self.moved: ServedRequest | None = None
        self.given_up = False
        self.lease_s = 0.0
        self.initial_credit: int | None = None
        self.load: LoadReport | None = None
        self.closing = not is_session
        self.is_session = is_session
        self.busy = 0

    # The requests' and the reader's side

    def mark(self, request: ServedRequest) -> None:
        """One of its requests has something to take."""
        if not self._dirty:  # else the writer is awake
            self._wake.set()
        self._dirty[request] = None

    def add(self, request: ServedRequest) -> None:
        """It has one more request, which gets a number."""
        if self.is_session:
            self._numbers += 1
        self.requests[request] = self._numbers

    def remove(self, request: ServedRequest) -> None:
        """It does not have a request any more."""
        self.requests.pop(request, None)
        self.ended_at.pop(request, None)
        self._dirty.pop(request, None)

    def moved_away(self, request: ServedRequest) -> None:
        """A request that it had goes to another stream from now on."""
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
        """Answers that were not taken yet."""
        return len(self._replies)

    def close(self) -> None:
        """Nothing more is to come: end once everything is delivered."""
        self.closing = True
        self._wake.set()

    def nudge(self) -> None:
        """Let the writer look again whether the stream is finished."""
        self._wake.set()

    def refuse(self, error: BaseException) -> None:
        """Its client may not go on: the RPC ends with this error, behind the answers that are
        there; not where it was about to end anyway.
        """
        if not self.closing:
            self._refusal = error
        self._wake.set()

    def give_up(self) -> None:
        """Its client reads nothing: those of its requests that have ended were let go."""
        self.given_up = True
        self._wake.set()

    # The writer's side

    def take(self) -> Batch | None:
        """Take what is pending; None: nothing is."""
        self._wake.clear()
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
                    held += numbered.event.held
        if not replies and not events:
            return None
        self.last_taken = time.monotonic()
        self._on_taken(held)
        return Batch(replies, events, size)

    @property
    def finished(self) -> bool:
        """Whether the RPC ends now: nothing is left and nothing is to come."""
        return self.closing and not (self.busy or self.requests or self._dirty or self._replies)

    async def receive(self) -> Batch | None:
        """Wait for what goes into the next message; None: the RPC ends as it should.

        Raises:
            ResultsNotReadError: results were forgotten, because nobody read them.
            HeadraceError: what `refuse` was given; the answers before it were received.
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

    def check_end(self, request: ServedRequest) -> None:
        """Called by the writer of a single request's stream, once nothing is left of it.

        Raises:
            RequestMovedError: its results go to another stream.
            HeadraceError: it failed.
        """
        if self.moved is request:
            raise RequestMovedError(request.request_id)
        request.log.raise_failure()
