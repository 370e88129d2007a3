"""Work on long texts, off the event loop: tokenizing, chat templates, long answers.

    run(identity, size, work) ──▶ its caller's queue ──▶ lane: short | long ──▶ a thread
    answer(identity, size, work) ───────────────────────▶ lane: answers ──────▶ a thread

Each lane has one thread, so that what is short never waits for what takes seconds, and answers to
what was admitted wait for no text.
In a lane the turn goes to the caller who has had the least bytes worked on, and within a caller to
what came first: how much one caller has waiting is nothing to the others. How much may wait is
bounded, of each caller and of all; beyond that new work is refused, with advice when to come again.
Work whose caller goes (its task is cancelled) is dropped if it has not begun. Work that has begun
cannot be interrupted: whoever hands it in bounds its length, and sees to it that it does not hold
the interpreter's lock for long.

All methods run on one event loop. The threads belong to whoever made the pool.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from service.accounts import Account
from service.admission import Level, LimitReachedError
from service.errors import NotReadyError

THREADS = 3
"""How many threads the pool uses: one for each lane."""
INLINE_ANSWER_BYTES = 64 << 10
"""Answers up to about this size are made at once, on the event loop: some milliseconds."""
SHORT_BYTES = 16 << 10
"""Work on up to this much is short: some milliseconds."""
MAX_WAITING = 4096
"""How many pieces of work may wait, of all callers."""
MAX_WAITING_OF_IDENTITY = 1024
MAX_WAITING_BYTES = 64 << 20
"""How many bytes of texts may wait, of all callers; one text is taken in any case."""
MAX_WAITING_BYTES_OF_IDENTITY = 16 << 20
_TURN_BYTES = 1 << 10
"""What a turn counts for beyond its bytes: no work is free."""

_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class _Work:
    identity: str
    size: int
    call: Callable[[], Any]
    done: asyncio.Future[Any]


@dataclass(slots=True)
class _Caller:
    """A caller who has work waiting in a lane. `served`: bytes, as the lane counts them."""

    served: int
    queue: deque[_Work] = field(default_factory=deque)


class _Waiting:
    """How much waits, of one caller or of all."""

    __slots__ = ("num_bytes", "number")

    def __init__(
        self, number: int, num_bytes: int, clock: Callable[[], float], jitter: Callable[[], float]
    ) -> None:
        self.number = Level(number, clock, jitter)
        self.num_bytes = Level(num_bytes, clock, jitter)

    def add(self, size: int) -> None:
        self.number.add(1)
        self.num_bytes.add(size)

    def remove(self, size: int, *, served: bool) -> None:
        self.number.remove(1, served=served)
        self.num_bytes.remove(size, served=served)


class _Lane:
    """One thread, and the callers whose work waits for it."""

    def __init__(
        self, executor: Executor, begun: Callable[[_Work], None] = lambda work: None
    ) -> None:
        """`begun` is called when the turn of some work has come."""
        self._executor = executor
        self._begun = begun
        self._callers: dict[str, _Caller] = {}
        self._floor = 0  # what the caller had been served whose turn was last
        self._busy = False

    def add(self, work: _Work) -> None:
        caller = self._callers.get(work.identity)
        if caller is None:
            # Who had nothing waiting has no claim to the turns that went by.
            caller = self._callers[work.identity] = _Caller(self._floor)
        caller.queue.append(work)
        if not self._busy:
            self._next()

    def drop(self, work: _Work) -> bool:
        """Take work back; whether it had not begun."""
        caller = self._callers.get(work.identity)
        if caller is None or work not in caller.queue:
            return False
        caller.queue.remove(work)
        if not caller.queue:
            del self._callers[work.identity]
        return True

    def take_all(self) -> list[_Work]:
        """Everything that waits; nothing waits then."""
        waiting = [work for caller in self._callers.values() for work in caller.queue]
        self._callers.clear()
        return waiting

    def _next(self) -> None:
        self._busy = bool(self._callers)
        if not self._busy:
            return
        identity, caller = min(self._callers.items(), key=lambda item: item[1].served)
        work = caller.queue.popleft()
        self._floor = caller.served
        caller.served += work.size + _TURN_BYTES
        if not caller.queue:
            del self._callers[identity]
        self._begun(work)
        running = asyncio.get_running_loop().run_in_executor(self._executor, work.call)
        running.add_done_callback(lambda result: self._finish(work, result))

    def _finish(self, work: _Work, result: asyncio.Future[Any]) -> None:
        if result.cancelled():  # the threads' owner has closed them
            work.done.cancel()
            return
        error = result.exception()
        if not work.done.done():  # else its caller has gone
            if error is not None:
                work.done.set_exception(error)
            else:
                work.done.set_result(result.result())
        self._next()


class TextPool:
    """See the module."""

    def __init__(
        self,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """A pool on the threads of `executor`, which should have THREADS. `clock`, `jitter`: as of
        AdmissionControl.
        """
        self._clock = clock
        self._jitter = jitter
        self._short = _Lane(executor, self._begun)
        self._long = _Lane(executor, self._begun)
        self._answers = _Lane(executor)
        self._all = _Waiting(MAX_WAITING, MAX_WAITING_BYTES, clock, jitter)
        self._of: dict[str, _Waiting] = {}  # identities that have work waiting
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many texts wait."""
        return self._all.number.present

    async def run(self, account: Account, size: int, call: Callable[[], _T]) -> _T:
        """Run `call` in a thread when it is its turn.

        Args:
            account: for whom it counts.
            size: about how many bytes it holds and works on.
            call: bounded in length; raises what this method is to raise.

        Raises:
            LimitReachedError: too much waits already, of this identity or of all.
            NotReadyError: the pool is closed.
        """
        self._check_open()
        identity = account.key
        self._check(identity, size)
        work = _Work(identity, size, call, asyncio.get_running_loop().create_future())
        lane = self._short if size <= SHORT_BYTES else self._long
        self._all.add(size)
        if identity not in self._of:
            self._of[identity] = _Waiting(
                MAX_WAITING_OF_IDENTITY, MAX_WAITING_BYTES_OF_IDENTITY, self._clock, self._jitter
            )
        self._of[identity].add(size)
        lane.add(work)
        try:
            result: _T = await work.done
        finally:
            if lane.drop(work):
                self._left(work, served=False)
        return result

    async def answer(self, account: Account, size: int, call: Callable[[], _T]) -> _T:
        """Make an answer to what was admitted before: at once, or in a thread where it is long.
        Never refused for want of room.

        Args:
            account: for whom it counts.
            size: of the answer, about, in bytes.
            call: makes it.

        Raises:
            NotReadyError: the pool is closed.
        """
        if size <= INLINE_ANSWER_BYTES:
            return call()
        self._check_open()
        work = _Work(account.key, size, call, asyncio.get_running_loop().create_future())
        self._answers.add(work)
        try:
            result: _T = await work.done
        finally:
            self._answers.drop(work)
        return result

    def close(self) -> None:
        """Refuse what waits, and what comes."""
        self._closed = True
        texts = [*self._short.take_all(), *self._long.take_all()]
        for work in texts:
            self._left(work, served=False)
        for work in (*texts, *self._answers.take_all()):
            if not work.done.done():
                work.done.set_exception(self._closed_error())

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> NotReadyError:
        return NotReadyError("DRAINING", "the server is shutting down; use another one")

    def _begun(self, work: _Work) -> None:
        self._left(work, served=True)

    def _left(self, work: _Work, *, served: bool) -> None:
        own = self._of[work.identity]
        own.remove(work.size, served=served)
        if not own.number.present:
            del self._of[work.identity]
        self._all.remove(work.size, served=served)

    def _check(self, identity: str, size: int) -> None:
        own = self._of.get(identity)
        for account, of, suffix in ((own, "of this caller ", "_OF_IDENTITY"), (self._all, "", "")):
            if account is None or not account.number.present:
                continue  # one text is taken in any case
            for level, amount, reason, option, what in (
                (account.number, 1, "TOO_MANY_TEXTS", "max_waiting_texts", "texts"),
                (account.num_bytes, size, "TOO_MUCH_TEXT", "max_waiting_text_bytes", "bytes"),
            ):
                if level.missing(amount) <= 0:
                    continue
                raise LimitReachedError(
                    reason + suffix,
                    f"{level.present} {what} {of}wait to be tokenized or made text, and this would "
                    f"be {amount} more; there may be {level.limit}: send less at the same time",
                    option=option + suffix.lower(),
                    limit=level.limit or 0,
                    present=level.present,
                    retry_after_s=level.advise(amount),
                )
