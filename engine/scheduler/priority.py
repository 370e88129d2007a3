"""Orders requests by priority, then by arrival, and starts none that cannot finish in time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import ClassVar, Unpack

from engine.contract.request import Request
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.scheduler.base import Scheduler, SchedulerLimits, StepPlan
from engine.scheduler.request_heap import RequestHeap
from engine.scheduler.time_limits import TimeLimits


class PriorityScheduler(Scheduler):
    """Higher priority first; within a priority, the request that arrived first.

    1. Within a priority, running requests come before waiting ones, and decoding ones before those
      still in prefill.
    2. If blocks run out, the request to preempt is the latest arrival of the lowest priority.
    3. If there is no slot or not enough room for a waiting request, it preempts running requests of
        lower priority, lowest first, provided that makes room for it. It does not preempt requests
        of equal priority. No request overtakes the head of the queue, the first to arrive of the
        highest priority.
    4. A waiting request whose time limit cannot be met is ended instead of run (see TimeLimits).

    A request of low priority waits for as long as higher-priority ones keep coming.
    """

    heeds_priorities: ClassVar[bool] = True

    def __init__(self, kv_cache: KVCacheManager, **limits: Unpack[SchedulerLimits]) -> None:
        super().__init__(kv_cache, **limits)
        self._queue = RequestHeap(self.waiting)
        self._limits = TimeLimits(kv_cache, self.waiting, self.max_batch_tokens)

    # ---- the queue -----------------------------------------------------------------------------

    def queued(self, request: Request) -> None:
        """Add a request to the heaps. A request that was held while waiting is added again, so the
        heaps are also tidied here.
        """
        self._queue.tidy()
        self._queue.push(_rank(request), request)
        self._limits.queued(request)

    def next_waiting(self) -> Request | None:
        """Return the earliest request among those with the highest priority."""
        first = self._queue.peek()
        return None if first is None else first[1]

    def remove(self, request: Request) -> None:
        """Remove a request; the heaps drop it later."""
        super().remove(request)
        self._queue.tidy()
        self._limits.tidy()

    # ---- time limits ---------------------------------------------------------------------------

    def measured(self, num_tokens: int, seconds: float) -> None:
        """Record how long a step took."""
        self._limits.measured(num_tokens, seconds)

    def take_hopeless(self, now: float) -> Iterable[Request]:
        """Return the waiting requests whose time limits cannot be met."""
        return self._limits.take(now)

    # ---- a step --------------------------------------------------------------------------------

    def choose(self, plan: StepPlan, now: float) -> None:
        """Fill the step; see the class."""
        if not self.waiting and self.extend_all(plan):
            return
        turns = deque(sorted(self.runnable(), key=_turn))
        victims = sorted(self.running.values(), key=_rank)
        is_open = True
        while plan.budget > 0:
            while turns and turns[0].key not in self.running:
                turns.popleft()
            head = self.next_waiting() if is_open else None
            if head is not None and (not turns or head.spec.priority > turns[0].spec.priority):
                if self._limits.is_hopeless(head, now):
                    self._queue.pop()
                else:
                    is_open = self._admit(plan, head, victims, now)
            elif turns:
                request, num_preempted = turns.popleft(), len(plan.preempted)
                if self.make_room(plan, request, victims):
                    self.extend(plan, request)
                # While running requests are short of blocks, none is started.
                is_open = is_open and len(plan.preempted) == num_preempted
            else:
                return

    def _admit(self, plan: StepPlan, head: Request, victims: list[Request], now: float) -> bool:
        """Start the head of the queue, replacing requests of lower priority if necessary."""
        if head.key in plan.preempted:
            return False
        if self.admit(plan, head, now):
            return True
        lower = [one for one in victims if one.spec.priority < head.spec.priority]
        if not lower or not self.could_admit(plan, head, lower):
            return False
        for _ in lower:
            self.preempt(plan, victims.pop())
            if self.admit(plan, head, now):
                return True
        return False


def _rank(request: Request) -> tuple[float, float, int]:
    """Return a sort key by which the first request runs first and is preempted last."""
    return -request.spec.priority, request.arrival, request.key


def _turn(request: Request) -> tuple[int, bool, float, int]:
    """Return a sort key for the order in which running requests get their shares of the token
    budget.
    """
    prefills = request.num_tokens_to_compute > 1
    return -request.spec.priority, prefills, request.arrival, request.key
