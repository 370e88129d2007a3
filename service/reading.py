"""The message of calls that have one: it must be there in time, and a stranger's must be small.

    a call ──▶ (authenticated, served) ──▶ [a stranger's: its turn] ──▶ read ──▶ servicer

gRPC would read the message before it asks anybody: then whoever opens a call and sends half of a
message holds the memory of that half for as long as the connection lives. So the methods are
registered as if their requests were streams, and read their one message here: behind
authentication, and with patience of a few seconds.

What needs no authentication (health checks) is read in turns. Until it is a call's turn, HTTP/2's
flow control keeps its message at the client but for some KiB; when it is, gRPC lets the client
send as much as the receive limit allows, and only afterwards can be seen how much it was. So few
are read at a time. A message that is there takes a turn of no time; one that is not gives way
after `TURN_S` if others wait.

Whether a message is there only a read can tell, so those who send none must not stand before those
who do. There are two lines, each with half of the places. In the first stands one call of each
connection, unless the last one that stood there brought no message: whoever opens calls and leaves
them so holds a place there once, until `TURN_S` is over and somebody else comes. All other calls
stand in the second line. In both the newest is next, and if too many wait, the oldest is refused:
a check sends its message with the call and is over at once, so those that have waited for long are
those of a crowd. (All connections to a Unix socket count as one: gRPC does not tell them apart.)

A read is never cancelled here: gRPC's core would write its result into memory that is not there any
more. The call is given its status instead, which ends the read.
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

from engine.errors import HeadraceError
from service.call_errors import (
    MalformedMessageError,
    MessageMissingError,
    MessageTimeoutError,
    MessageTooLargeError,
    TooManyCallsError,
)
from service.status_table import abort, to_status

LARGE_BYTES = 64 << 10
"""Messages up to this size are parsed as they come: at worst some milliseconds."""
OPEN_TO_EVERYONE = "/grpc.health."  # probes have no token

MAX_OPEN_MESSAGE_BYTES = 4096
"""The largest message of a method that is open to everyone: it holds the name of a service."""
OPEN_BYTES = 24 << 20
"""How many bytes may be read at a time for such methods."""
MAX_TURNS = 16
MAX_QUEUED = 1024
"""How many calls of such methods may wait for their turn, in each line."""
TURN_S = 0.02
_MAX_REMEMBERED = 8192
"""How many connections are known at a time to have brought no message."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a message that could not be read. gRPC's own answer would be UNKNOWN, with the
    parser's inside; for a stream it would be a reader that ends without a word.
    """

    error: HeadraceError


@dataclass(frozen=True, slots=True)
class Unparsed:
    """Stands for a large message until it is its turn to be parsed."""

    raw: bytes
    parse: Callable[[bytes], Any]
    turn: asyncio.Lock


async def parsed(message: Any) -> Any:
    """The message that a call has received. Large ones are parsed one after the other, and whoever
    else has something to do comes in between: many that arrive together stop nobody for longer than
    one does.

    Raises:
        MalformedMessageError, MessageTooLargeError: it cannot be read.
    """
    if isinstance(message, Unparsed):
        async with message.turn:
            message = message.parse(message.raw)
            await asyncio.sleep(0)
    if isinstance(message, Unreadable):
        raise message.error
    return message


class _Patience:
    """Ends calls that have waited too long: by one timer for all of them.

    Attributes:
        waiting: the contexts of those that wait, the oldest first, and until when.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.waiting: dict[Any, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def begin(self, context: Any) -> None:
        """A call begins to wait."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._seconds
        self.waiting[context] = until
        if self._timer is None:
            self._timer = loop.call_at(until, self._look)

    def end(self, context: Any) -> None:
        """It waits no longer."""
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
        """End a call whose message was not there after so many seconds; its read ends then."""
        task = asyncio.create_task(_refuse(context, MessageTimeoutError(seconds)))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


async def _refuse(context: Any, error: HeadraceError) -> None:
    try:
        await abort(context, to_status(error))
    except grpc.aio.BaseError:
        return  # AbortError, as always; or the call has ended meanwhile


class _Turns:
    """Which calls of a line may read: the newest first.

    Attributes:
        free: places that nobody has.
        reading: the contexts of calls that read, the oldest first, and since when.
        waiting: the turns of those that wait for one, the oldest first. False: refused.
    """

    def __init__(self, places: int, patience: _Patience) -> None:
        self.free = places
        self.patience = patience
        self.reading: dict[Any, float] = {}
        self.waiting: dict[asyncio.Future[bool], None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def turn(self, context: Any) -> AsyncIterator[None]:
        """Wait for a turn, and have it.

        Raises:
            TooManyCallsError: too many have come since.
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
                if not turn.cancelled() and turn.result():  # it had come just now
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
        """Look after the oldest turn, while somebody waits for it."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            since = next(iter(self.reading.values()), loop.time())
            self._timer = loop.call_at(since + TURN_S, self._look)

    def _look(self) -> None:
        # The loop may have stood still: what has come meanwhile is taken first.
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
    """The two lines of calls that are open to everyone.

    Attributes:
        first, others: the lines.
        not_first: connections that have a call in the first line (True), or whose last call there
            brought no message (False).
    """

    def __init__(self, places: int, patience: _Patience) -> None:
        self.first = _Turns(places // 2, patience)
        self.others = _Turns(places - places // 2, patience)
        self.not_first: dict[str, bool] = {}

    @asynccontextmanager
    async def turn(self, context: Any) -> AsyncIterator[None]:
        """Wait for a turn, and have it. Left without an error, the call's message has come.

        Raises:
            TooManyCallsError: too many have come since.
        """
        peer = context.peer()
        if peer in self.not_first:
            async with self.others.turn(context):
                yield
            if not self.not_first.get(peer, True):  # it brings messages again
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
    """Reads the messages of methods that have one, and parses all of them."""

    def __init__(self, patience_s: float, max_receive_bytes: int, most_received: int) -> None:
        """`patience_s`: until when a message must be there; `max_receive_bytes`: how large it may
        be; `most_received`: how large gRPC takes one in.
        """
        self.patience = _Patience(patience_s)
        places = max(2, min(MAX_TURNS, OPEN_BYTES // most_received))
        self.lines = _Lines(places, self.patience)
        self._max_receive_bytes = max_receive_bytes
        self._turn = asyncio.Lock()

    def received(self, deserialize: Callable[[bytes], Any], is_open: bool, raw: bytes) -> Any:
        """What `parsed` takes, of a message's bytes. `is_open`: of a method that is open to
        everyone.
        """
        most = MAX_OPEN_MESSAGE_BYTES if is_open else self._max_receive_bytes
        if len(raw) > most:  # it is not parsed
            return Unreadable(MessageTooLargeError(len(raw), most))
        if len(raw) > LARGE_BYTES:
            return Unparsed(raw, partial(_parse, deserialize), self._turn)
        return _parse(deserialize, raw)

    async def read(self, context: Any) -> Any:
        """A call's message.

        Raises:
            MessageMissingError: the client has ended its side without one.
            MalformedMessageError, MessageTooLargeError: it cannot be read.
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
        """The same of a method that is open to everyone, in its turn."""
        async with self.lines.turn(context):
            return await self.read(context)


def _parse(deserialize: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        return deserialize(raw)
    except DecodeError:
        return Unreadable(MalformedMessageError())
