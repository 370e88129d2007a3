"""Reads the message of unary requests. It must arrive in time, and be small for unauthenticated
calls.

    a call ──▶ (authenticated, served) ──▶ [a stranger's: its turn] ──▶ read ──▶ servicer

gRPC would read the message before it calls any of our code. A client could then open a call, send
half of a message, and hold the memory of that half as long as its connection lives. So the methods
are registered as if their requests were streams, and their one message is read here: after
authentication, and within a few seconds.

Calls that need no authentication (health checks) are read in turns. Before a call's turn, HTTP/2's
flow control keeps all but a few KiB of its message at the client. In its turn, gRPC lets the client
send as much as the receive limit allows, and the size is only known afterwards. So only a few are
read at a time. If the message has already arrived, the turn takes no time. If not, it ends after
`TURN_S` if others wait.

Only a read can tell whether a message has arrived, so calls without one must not block those that
have one. There are two queues, each with half of the places. The first has one call of each
connection, unless the connection's last call there sent no message. So a client that opens calls
and sends nothing gets a place there only once, until `TURN_S` is over and another call comes. All
other calls are in the second queue. In both queues the newest call is next, and if too many wait,
the oldest is refused. A health check sends its message with the call and is answered immediately,
so calls that have waited long are probably part of a flood. (All connections to a Unix socket count
as one, because gRPC does not distinguish them.)

A read is never cancelled here: gRPC's core would write its result into freed memory. Instead the
call is given its status, which ends the read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from engine.contract.errors import HeadraceError
from service.errors.call_errors import (
    MalformedMessageError,
    MessageMissingError,
    MessageTimeoutError,
    MessageTooLargeError,
    TooManyCallsError,
)
from service.errors.status_table import abort, to_status

LARGE_BYTES = 64 << 10
"""Messages up to this size are parsed immediately, which takes a few milliseconds at most."""
OPEN_TO_EVERYONE = "/grpc.health."  # probes have no token

MAX_OPEN_MESSAGE_BYTES = 4096
"""The largest message of a method that is open to all callers. It only has the name of a service.
"""
OPEN_BYTES = 24 << 20
"""The number of bytes that may be read at a time for such methods."""
MAX_TURNS = 16
MAX_QUEUED = 1024
"""The number of calls of such methods that may wait for their turn in each queue."""
TURN_S = 0.02
_MAX_REMEMBERED = 8192
"""The number of connections remembered because they sent no message."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a message that could not be parsed. Without this, gRPC would answer UNKNOWN with
    the parser's internal error, or end the reader of a stream without a reason.
    """

    error: HeadraceError


@dataclass(frozen=True, slots=True)
class Unparsed:
    """A large message that waits for its turn to be parsed."""

    raw: bytes
    parse: Callable[[bytes], Any]
    turn: asyncio.Lock


async def parsed(message: Any) -> Any:
    """Parse the message that a call has received. Large messages are parsed one at a time, with
    other tasks in between, so several of them block the event loop no longer than one does.

    Raises:
        MalformedMessageError, MessageTooLargeError: the message cannot be read.
    """
    if isinstance(message, Unparsed):
        async with message.turn:
            message = message.parse(message.raw)
            await asyncio.sleep(0)
    if isinstance(message, Unreadable):
        raise message.error
    return message


class _Patience:
    """Ends calls that have waited too long, with one timer for all of them.

    Attributes:
        waiting: the contexts of the waiting calls and their deadlines, oldest first.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.waiting: dict[Any, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def begin(self, context: Any) -> None:
        """Start timing a call's wait."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._seconds
        self.waiting[context] = until
        if self._timer is None:
            self._timer = loop.call_at(until, self._look)

    def end(self, context: Any) -> None:
        """Stop timing a call's wait."""
        self.waiting.pop(context, None)

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        for context, until in list(self.waiting.items()):
            if until > loop.time():
                self._timer = loop.call_at(until, self._look)
                return
            del self.waiting[context]
            self.give_up(context, self._seconds)

    def give_up(self, context: Any, seconds: float) -> None:
        """End a call whose message did not arrive within `seconds`. This also ends its read."""
        task = asyncio.create_task(_refuse(context, MessageTimeoutError(seconds)))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


async def _refuse(context: Any, error: HeadraceError) -> None:
    try:
        await abort(context, to_status(error))
    except grpc.aio.BaseError:
        return  # AbortError, as always; or the call has ended meanwhile


class _Turns:
    """Decides which calls of a queue may read, newest first.

    Attributes:
        free: the number of free places.
        reading: the contexts of calls that read, and since when, oldest first.
        waiting: the futures of calls that wait for a turn, oldest first. The result False means
            that the call was refused.
    """

    def __init__(self, places: int, patience: _Patience) -> None:
        self.free = places
        self.patience = patience
        self.reading: dict[Any, float] = {}
        self.waiting: dict[asyncio.Future[bool], None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def turn(self, context: Any) -> AsyncIterator[None]:
        """Return a context manager that waits for a turn. The turn lasts until its block exits.

        Raises:
            TooManyCallsError: too many newer calls wait.
        """
        await self._begin(context)
        try:
            yield
        finally:
            self._end(context)

    async def _begin(self, context: Any) -> None:
        loop = asyncio.get_running_loop()
        if self.free:
            self.free -= 1
        else:
            if len(self.waiting) >= MAX_QUEUED:
                self._refuse_oldest()
            turn = loop.create_future()
            self.waiting[turn] = None
            self._watch()
            try:
                has_come = await turn
            except asyncio.CancelledError:
                self.waiting.pop(turn, None)
                if not turn.cancelled() and turn.result():  # the turn had just come
                    self._pass_on()
                raise
            if not has_come:
                raise TooManyCallsError(MAX_QUEUED)
        self.reading[context] = loop.time()

    def _refuse_oldest(self) -> None:
        turn = next(iter(self.waiting))
        del self.waiting[turn]
        if not turn.done():  # else its call was cancelled
            turn.set_result(False)

    def _end(self, context: Any) -> None:
        if self.reading.pop(context, None) is not None:
            self._pass_on()

    def _pass_on(self) -> None:
        while self.waiting:
            turn, _ = self.waiting.popitem()
            if not turn.done():  # else its call was cancelled
                turn.set_result(True)
                return
        self.free += 1

    def _watch(self) -> None:
        """End the oldest turn when its time is up, while other calls wait."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            since = next(iter(self.reading.values()), loop.time())
            self._timer = loop.call_at(since + TURN_S, self._look)

    def _look(self) -> None:
        # The event loop may have been blocked: first handle the messages that arrived meanwhile.
        asyncio.get_running_loop().call_soon(self._give_way)

    def _give_way(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for context, since in list(self.reading.items())[: len(self.waiting)]:
            if now - since < TURN_S:
                break
            self.patience.give_up(context, TURN_S)
            self._end(context)
        if self.waiting:
            self._watch()


class _Lines:
    """The two queues of calls to methods that are open to all callers.

    Attributes:
        first, others: the queues.
        not_first: connections that have a call in the first queue (True), or whose last call there
            sent no message (False).
    """

    def __init__(self, places: int, patience: _Patience) -> None:
        self.first = _Turns(places // 2, patience)
        self.others = _Turns(places - places // 2, patience)
        self.not_first: dict[str, bool] = {}

    @asynccontextmanager
    async def turn(self, context: Any) -> AsyncIterator[None]:
        """Return a context manager that waits for a turn. The turn lasts until its block exits. If
        the block exits without an error, the message has arrived.

        Raises:
            TooManyCallsError: too many newer calls wait.
        """
        peer = context.peer()
        if peer in self.not_first:
            async with self.others.turn(context):
                yield
            if not self.not_first.get(peer, True):  # the connection sends messages again
                del self.not_first[peer]
            return
        self.not_first[peer] = True
        if len(self.not_first) > _MAX_REMEMBERED:
            del self.not_first[next(iter(self.not_first))]
        try:
            async with self.first.turn(context):
                yield
        except BaseException:
            self.not_first[peer] = False
            raise
        self.not_first.pop(peer, None)


class Reading:
    """Reads the messages of unary requests, and parses those of all requests."""

    def __init__(self, patience_s: float, max_receive_bytes: int, most_received: int) -> None:
        """`patience_s`: the seconds within which a message must arrive. `max_receive_bytes`: the
        largest message allowed. `most_received`: the largest message that gRPC itself accepts.
        """
        self.patience = _Patience(patience_s)
        places = max(2, min(MAX_TURNS, OPEN_BYTES // most_received))
        self.lines = _Lines(places, self.patience)
        self._max_receive_bytes = max_receive_bytes
        self._turn = asyncio.Lock()

    def received(self, deserialize: Callable[[bytes], Any], is_open: bool, raw: bytes) -> Any:
        """Prepare a message's bytes for `parsed`. `is_open`: whether the method is open to all
        callers.
        """
        most = MAX_OPEN_MESSAGE_BYTES if is_open else self._max_receive_bytes
        if len(raw) > most:  # it is not parsed
            return Unreadable(MessageTooLargeError(len(raw), most))
        if len(raw) > LARGE_BYTES:
            return Unparsed(raw, partial(_parse, deserialize), self._turn)
        return _parse(deserialize, raw)

    async def read(self, context: Any) -> Any:
        """Return a call's message.

        Raises:
            MessageMissingError: the client has ended its side without one.
            MalformedMessageError, MessageTooLargeError: the message cannot be read.
        """
        self.patience.begin(context)
        try:
            message = await context.read()
        finally:
            self.patience.end(context)
        if message is grpc.aio.EOF:
            raise MessageMissingError
        return await parsed(message)

    async def read_open(self, context: Any) -> Any:
        """Return the message of a call to a method that is open to all callers, when its turn
        comes. Raises the errors of `read` and of `_Lines.turn`.
        """
        async with self.lines.turn(context):
            return await self.read(context)


def _parse(deserialize: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        return deserialize(raw)
    except DecodeError:
        return Unreadable(MalformedMessageError())
