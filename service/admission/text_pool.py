"""Runs work on long texts outside the event loop: tokenization, chat templates, long answers.

    run(account, size, work) ──▶ its caller's queue ──▶ lane: short | long ──▶ a thread
    answer(account, size, work) ───────────────────────▶ lane: answers ──────▶ a thread

Each lane has one thread, so short work never waits for work that takes seconds, and answers to
admitted requests do not wait for input texts. Within a lane, the next turn goes to the caller that
has had the fewest bytes processed for its weight, and to that caller's oldest work, so one caller's
backlog does not affect the others. The waiting work is limited, and each caller has a share of that
limit (`engine.fairness.shares`). Beyond it new work is refused, with advice when to try again. If
the calling task is cancelled, work that has not started is dropped. Work that has started cannot be
interrupted, so its submitter must bound its length and make sure that it does not hold the
interpreter's lock for long.

All methods run on one event loop. The creator of the pool owns the threads.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from service.admission.accounts import Account
from service.admission.bounds import Kind, bound_of
from service.errors.call_errors import NotReadyError

THREADS = 3
"""The number of threads that the pool uses: one for each lane."""
INLINE_ANSWER_BYTES = 64 << 10
"""Answers up to about this size are made immediately on the event loop, which takes a few
milliseconds.
"""
SHORT_BYTES = 16 << 10
"""The largest size of short work, which takes a few milliseconds."""
MAX_WAITING = 4096
"""The number of work items of all callers that may wait."""
MAX_WAITING_BYTES = 64 << 20
"""The number of bytes of text of all callers that may wait. A single text is always accepted."""
_TURN_BYTES = 1 << 10
"""The bytes that each turn counts in addition to its size, because no work is free."""
_WHAT = "wait to be tokenized or made text, and this would be {amount} more"
_REMEDY = "send less at the same time"
_NUMBER = Kind(
    what=f"{{present}} texts {_WHAT}",
    remedy=_REMEDY,
    reason="TOO_MANY_TEXTS",
    option="max_waiting_texts",
    limit=MAX_WAITING,
)
_BYTES = Kind(
    what=f"{{present}} bytes {_WHAT}",
    remedy=_REMEDY,
    reason="TOO_MUCH_TEXT",
    option="max_waiting_text_bytes",
    limit=MAX_WAITING_BYTES,
)

_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class _Work:
    account: Account
    size: int
    call: Callable[[], Any]
    done: asyncio.Future[Any]


@dataclass(slots=True, eq=False)
class _Caller:
    """A caller with work waiting in a lane. `served`: processed bytes, divided by its weight."""

    account: Account
    served: float
    queue: OrderedDict[_Work, None] = field(default_factory=OrderedDict)


class _Lane:
    """One thread, and the callers whose work waits for it. O(log callers) per work item."""

    def __init__(
        self, executor: Executor, begun: Callable[[_Work], None] = lambda work: None
    ) -> None:
        """`begun`: called when a work item gets its turn."""
        self._executor = executor
        self._begun = begun
        self._callers: dict[str, _Caller] = {}
        self._members: Counter[str] = Counter()  # by group: how many callers have work waiting
        # Heap of callers; outdated entries of callers that have left are skipped.
        self._turns: list[tuple[float, int, _Caller]] = []
        self._serial = itertools.count()
        self._floor = 0.0  # `served` of the caller that had the last turn
        self._busy = False

    def add(self, work: _Work) -> None:
        account = work.account
        caller = self._callers.get(account.key)
        if caller is None:
            # A caller that had nothing waiting gets no credit for that time.
            caller = self._callers[account.key] = _Caller(account, self._floor)
            self._members[account.group] += 1
            self._line_up(caller)
        caller.queue[work] = None
        if not self._busy:
            self._next()

    def drop(self, work: _Work) -> bool:
        """Withdraw a work item. Return whether it was still waiting."""
        caller = self._callers.get(work.account.key)
        if caller is None or work not in caller.queue:
            return False
        del caller.queue[work]
        if not caller.queue:
            self._leave(caller)
        return True

    def _line_up(self, caller: _Caller) -> None:
        if len(self._turns) > 2 * len(self._callers) + 64:  # most of the entries are outdated
            self._turns = [turn for turn in self._turns if self._is_waiting(turn[2])]
            heapq.heapify(self._turns)
        heapq.heappush(self._turns, (caller.served, next(self._serial), caller))

    def _is_waiting(self, caller: _Caller) -> bool:
        return self._callers.get(caller.account.key) is caller

    def _leave(self, caller: _Caller) -> None:
        account = caller.account
        del self._callers[account.key]
        self._members[account.group] -= 1
        if not self._members[account.group]:
            del self._members[account.group]

    def take_all(self) -> list[_Work]:
        """Remove and return all waiting work."""
        waiting = [work for caller in self._callers.values() for work in caller.queue]
        self._callers.clear()
        self._members.clear()
        self._turns.clear()
        return waiting

    def _next(self) -> None:
        self._busy = bool(self._callers)
        if not self._busy:
            return
        while not self._is_waiting(caller := heapq.heappop(self._turns)[2]):
            pass
        work, _ = caller.queue.popitem(last=False)
        self._floor = caller.served
        weight = work.account.weight / self._members[caller.account.group]
        caller.served += (work.size + _TURN_BYTES) / weight
        if caller.queue:
            self._line_up(caller)
        else:
            self._leave(caller)
        self._begun(work)
        running = asyncio.get_running_loop().run_in_executor(self._executor, work.call)
        running.add_done_callback(lambda result: self._finish(work, result))

    def _finish(self, work: _Work, result: asyncio.Future[Any]) -> None:
        if result.cancelled():  # the threads' owner has closed them
            work.done.cancel()
            return
        error = result.exception()
        if not work.done.done():  # else its caller was cancelled
            if error is not None:
                work.done.set_exception(error)
            else:
                work.done.set_result(result.result())
        self._next()


class TextPool:
    """Three lanes of threads for work on texts; see the module."""

    def __init__(
        self,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Make a pool on the threads of `executor`, which should have THREADS. `clock`, `jitter`:
        see AdmissionControl.
        """
        self._short = _Lane(executor, self._begun)
        self._long = _Lane(executor, self._begun)
        self._answers = _Lane(executor)
        self._number = bound_of(_NUMBER, clock, jitter)
        self._bytes = bound_of(_BYTES, clock, jitter)
        self._closed = False

    @property
    def waiting(self) -> int:
        """The number of waiting texts."""
        return self._number.present

    async def run(self, account: Account, size: int, call: Callable[[], _T]) -> _T:
        """Run `call` in a thread when its turn comes.

        Args:
            account: the account that is charged.
            size: the approximate number of bytes that the work holds and processes.
            call: the work, bounded in length. Its exceptions propagate.

        Raises:
            LimitReachedError: too much work is waiting.
            NotReadyError: the pool is closed.
        """
        self._check_open()
        self._check(account, size)
        work = _Work(account, size, call, asyncio.get_running_loop().create_future())
        lane = self._short if size <= SHORT_BYTES else self._long
        self._number.add(account, 1)
        self._bytes.add(account, size)
        lane.add(work)
        try:
            result: _T = await work.done
        finally:
            if lane.drop(work):
                self._left(work, served=False)
        return result

    async def answer(self, account: Account, size: int, call: Callable[[], _T]) -> _T:
        """Make an answer for an admitted request: immediately, or in a thread if it is long. Never
        refused because of waiting work.

        Args:
            account: the account that is charged.
            size: the answer's approximate size, in bytes.
            call: makes the answer.

        Raises:
            NotReadyError: the pool is closed.
        """
        if size <= INLINE_ANSWER_BYTES:
            return call()
        self._check_open()
        work = _Work(account, size, call, asyncio.get_running_loop().create_future())
        self._answers.add(work)
        try:
            result: _T = await work.done
        finally:
            self._answers.drop(work)
        return result

    def close(self) -> None:
        """Refuse the waiting work and all new work."""
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
        self._number.remove(work.account, 1, served=served)
        self._bytes.remove(work.account, work.size, served=served)

    def _check(self, account: Account, size: int) -> None:
        if not self._number.present:
            return  # a single text is always accepted
        for bound, amount in ((self._number, 1), (self._bytes, size)):
            if (refusal := bound.ask(account, amount)) is not None:
                raise bound.error(refusal, amount)
