"""Shares service among the callers that have work; the least served caller comes first."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import ClassVar, Unpack

from engine.contract.request import Request
from engine.contract.types import RequestKey
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.scheduler.base import Scheduler, SchedulerLimits, StepPlan
from engine.scheduler.live_callers import OUTPUT_COST, service_of
from engine.scheduler.time_limits import TimeLimits
from engine.scheduler.token_counters import Order, Share, TokenCounters

LEAD = 16 * OUTPUT_COST
"""How far a caller may be ahead in service before it gives up a slot to a caller that has none,
while it holds no more than its share of the slots.
"""
MAX_LEAD = 128 * OUTPUT_COST
"""The upper limit of that lead if the exchange means that tokens must be computed again."""
_DECODES, _PREFILLS, _QUEUE = 0, 1, 2
"""The kinds of work that a caller can be chosen for."""


class FairScheduler(Scheduler):
    """Virtual token counters (see `engine.scheduler.token_counters`), with chunks and preemption.

    1. Decoding requests come first if that leaves a quarter of the token budget for prompts;
      otherwise they take turns with the prompts. The rest of the budget goes to prompts, those of
      the least served caller first; each caller's running prompts come before its queue. So one
      caller's streams and prompts do not keep out another's.
    2. A caller's waiting requests are ordered by priority, then those that were started before,
      then by arrival. A request may take the batch slot of a lower-priority request of the same
      caller.
    3. A caller that has nothing in the batch does not wait until another's request ends. If batch
      slots or blocks run out, a request of the most served caller gives up its own. It does so
      immediately if that caller holds more than its weighted share of the slots, and otherwise once
      that caller has received LEAD more service than the waiting caller. So a slot moves between
      two callers within their shares only after LEAD of service. A request that gives up its slot
      keeps its KV as long as there are blocks (`set_aside`).
    4. If blocks run out, a request is preempted. Callers that hold more than their share of the
      slots come first, and among these the most served caller. Of its requests, the last one of the
      lowest priority is preempted.
    5. If blocks are short, no request overtakes the first one of the least served caller.
    6. A waiting request whose time limit cannot be met is ended instead of run (see TimeLimits).

    No caller starves: a waiting caller keeps its counter, and the counters of all callers served
    before it, including new ones, rise above that. Within a caller, a low-priority request waits
    for as long as higher-priority ones keep coming.
    """

    heeds_priorities: ClassVar[bool] = True

    def __init__(self, kv_cache: KVCacheManager, **limits: Unpack[SchedulerLimits]) -> None:
        super().__init__(kv_cache, **limits)
        self._shares = TokenCounters(self.callers, self._busiest)
        self._limits = TimeLimits(kv_cache, self.waiting, self.max_batch_tokens)
        self._is_choosing = False

    # ---- the queue -----------------------------------------------------------------------------

    def queued(self, request: Request) -> None:
        """Add the request to its caller's queue."""
        # A request that gives up its place was served until now, so there is no idle time to
        # discount.
        self._shares.queued(request, lifts=not self._is_choosing)
        self._limits.queued(request)

    def unqueued(self, request: Request) -> None:
        """Remove the request from its caller's queue."""
        self._shares.unqueued(request)
        self._limits.tidy()

    def unhold(self, request: Request) -> None:
        """Let a held request continue. Its caller gets no credit for the time in which it was
        held.
        """
        if request.key in self.held:
            self._shares.wake(request)
        super().unhold(request)

    def hold(self, request: Request) -> None:
        """Leave a request out of all steps."""
        super().hold(request)
        self._shares.left(request)

    def remove(self, request: Request) -> None:
        """Forget a request."""
        super().remove(request)
        self._shares.left(request)

    def next_waiting(self) -> Request | None:
        """Return the first waiting request of the least served caller."""
        share = self._shares.peek()
        return None if share is None else share.head()

    def served(self, request: Request, service: int) -> None:
        """Add the service to the caller's counter."""
        self._shares.served(request, service)

    def measured(self, num_tokens: int, seconds: float) -> None:
        """Record how long a step took."""
        self._limits.measured(num_tokens, seconds)

    def take_hopeless(self, now: float) -> Iterable[Request]:
        """Return the waiting requests whose time limits cannot be met."""
        return self._limits.take(now)

    def _busiest(self) -> float:
        places: dict[Share, int] = {}
        for request in self.running.values():
            share = self._shares.of(request)
            places[share] = places.get(share, 0) + 1
        if not places:
            return 0.0
        return max(
            places, key=lambda one: (places[one] / self._shares.weight(one), one.counter)
        ).counter

    # ---- a step --------------------------------------------------------------------------------

    def choose(self, plan: StepPlan, now: float) -> None:
        """Fill the step; see the class."""
        if not self.waiting and self.extend_all(plan):
            return
        step = _FairStep(self, self._shares, self._limits, plan, now)
        self._is_choosing = True
        try:
            step.fill()
        finally:
            self._is_choosing = False
            step.close()


class _FairStep:
    """A step under construction.

    Attributes:
        given: the service each caller gets in the step so far, divided by its weight.
        begun: the requests that the step starts.
        victims: the requests to preempt when blocks run out, starting with the last.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        shares: TokenCounters,
        limits: TimeLimits,
        plan: StepPlan,
        now: float,
    ) -> None:
        self._scheduler = scheduler
        self._shares = shares
        self._limits = limits
        self._plan = plan
        self._now = now
        self.given: dict[Share, float] = {}
        self.begun: set[RequestKey] = set()
        self.victims: list[Request] = []
        self._work: dict[tuple[Share, int], list[Request]] = {}  # the next one last
        self._turns: list[tuple[Order, int, int, Share]] = []  # heap
        self._popped: list[Share] = []
        self._serial = itertools.count()
        self._is_queue_open = True

    def fill(self) -> None:
        """Put the requests into the step."""
        plan = self._plan
        runnable = self._scheduler.runnable()
        has_prompts = any(one.num_tokens_to_compute > 1 for one in runnable)
        for_decodes = plan.budget - plan.budget // 4
        # Usually all running requests decode and all fit; then their order does not matter.
        is_simple = not has_prompts and len(runnable) <= for_decodes
        if not is_simple or not self._scheduler.extend_all(plan):
            self._extend_by_order({one.key for one in runnable}, for_decodes)
        while plan.budget > 0:
            turn = self._next_turn()
            if turn is None:
                return
            share, kind = turn
            if kind == _QUEUE:
                self._begin(share)
            else:
                requests = self._work[share, kind]
                self._extend(requests.pop())
                if requests:
                    self._push(share, kind)

    def close(self) -> None:
        """Restore the order of the callers."""
        self._shares.put_back(self._popped)

    def _extend_by_order(self, runnable: set[RequestKey], for_decodes: int) -> None:
        """Put in the decoding requests if there is budget for all of them. The other requests take
        turns.
        """
        places = self._places()
        order = [one for share in sorted(places, key=_level) for one in places[share]]
        # A caller above its share first gives up what is beyond it.
        due = self._due(places)
        beyond = {one.key for share, ones in places.items() for one in ones[due[share] :]}
        self.victims = sorted(order, key=lambda one: one.key in beyond)
        order = [one for one in order if one.key in runnable]
        decoding = [one for one in order if one.num_tokens_to_compute == 1]
        if len(decoding) <= for_decodes:
            for request in decoding:
                self._extend(request)
        else:
            self._add_work(decoding, _DECODES)
        self._add_work([one for one in order if one.num_tokens_to_compute > 1], _PREFILLS)

    def _places(self) -> dict[Share, list[Request]]:
        """Return the requests that were already in the batch, by caller, in order."""
        places: dict[Share, list[Request]] = {}
        for key, request in self._scheduler.running.items():
            if key not in self.begun:
                places.setdefault(self._shares.of(request), []).append(request)
        for requests in places.values():
            requests.sort(key=_rank)
        return places

    # ---- whose turn it is ------------------------------------------------------------------------

    def _add_work(self, requests: list[Request], kind: int) -> None:
        for request in reversed(requests):
            share = self._shares.of(request)
            work = self._work.setdefault((share, kind), [])
            if not work:
                self._push(share, kind)
            work.append(request)

    def _push(self, share: Share, kind: int) -> None:
        order = self._shares.order(share, self.given.get(share, 0.0))
        heapq.heappush(self._turns, (order, kind, next(self._serial), share))

    def _next_turn(self) -> tuple[Share, int] | None:
        """Return the least served caller, counting what it got in this step, and which kind of work
        it is chosen for.
        """
        while True:
            first = self._shares.peek() if self._is_queue_open else None
            lowest = self._turns[0][0] if self._turns else None
            if first is not None and (lowest is None or self._shares.order(first) <= lowest):
                self._shares.pop()
                self._popped.append(first)
                self._push(first, _QUEUE)
            if not self._turns:
                return None
            order, kind, _, share = heapq.heappop(self._turns)
            if order != self._shares.order(share, self.given.get(share, 0.0)):
                self._push(share, kind)
            elif kind != _QUEUE or self._is_queue_open:
                return share, kind

    # ---- requests that run -----------------------------------------------------------------------

    def _extend(self, request: Request) -> None:
        """Put a request into the step if it still runs and there are blocks."""
        scheduler, plan = self._scheduler, self._plan
        if request.key not in scheduler.running:
            return
        num_preempted = len(plan.preempted)
        if scheduler.make_room(plan, request, self.victims) and scheduler.extend(plan, request):
            self._note(request)
        # While running requests are short of blocks, none is started.
        self._is_queue_open = self._is_queue_open and len(plan.preempted) == num_preempted

    def _note(self, request: Request) -> None:
        share = self._shares.of(request)
        service = service_of(self._plan.parts[request.key])
        self.given[share] = self.given.get(share, 0.0) + service / self._shares.weight(share)

    # ---- requests that wait ----------------------------------------------------------------------

    def _begin(self, share: Share) -> None:
        """Start the first request of a caller's queue, replacing another if necessary."""
        scheduler, plan = self._scheduler, self._plan
        head = share.head()
        if head is None or head.key in plan.preempted:
            return
        if self._limits.is_hopeless(head, self._now):
            share.queue.pop()
            self._push(share, _QUEUE)
            return
        is_full = len(scheduler.running) >= scheduler.max_requests_per_batch
        has_place = scheduler.callers.num_running(share.caller) > 0
        if scheduler.admit(plan, head, self._now) or self._take_place(share, head, is_full):
            self.begun.add(head.key)
            self._note(head)
            self._push(share, _QUEUE)
        elif not is_full or not has_place:
            # Either blocks are short, and nobody may overtake it; or there is no time; or there is
            # no place even for a caller that has none, and no other caller has a better claim.
            self._is_queue_open = False

    def _take_place(self, share: Share, head: Request, is_full: bool) -> bool:
        """Start a request in place of others. If that would not make room, leave the others
        alone.
        """
        scheduler, plan = self._scheduler, self._plan
        if scheduler.callers.num_running(share.caller):
            victims = self._lower(head)
        else:
            victims = self._overserved(share, head, is_full)
        # A request that has nothing to compute ends by itself.
        victims = [one for one in victims if not one.awaits_results]
        if not victims or not scheduler.could_admit(plan, head, victims):
            return False
        for victim in victims:
            scheduler.set_aside(plan, victim)
            if victim in self.victims:
                self.victims.remove(victim)
            if scheduler.admit(plan, head, self._now):
                return True
        return False

    def _lower(self, head: Request) -> list[Request]:
        """Return the caller's running requests of lower priority, lowest first."""
        caller, priority = head.spec.caller, head.spec.priority
        lower = [
            one
            for one in self._scheduler.running.values()
            if one.spec.priority < priority
            and one.spec.caller == caller
            and one.key not in self.begun
        ]
        return sorted(lower, key=_rank, reverse=True)

    def _overserved(self, share: Share, head: Request, is_full: bool) -> list[Request]:
        """Return the requests to set aside, in order, for a caller that has none in the batch."""
        places = self._places()
        due = self._due(places, self._shares.weight(share))
        wanted = LEAD + max(0, head.num_counted_tokens - head.num_computed_tokens)
        beyond: list[Request] = []
        ahead: list[Request] = []
        for other in sorted(places, key=_level, reverse=True):
            requests = places[other]
            lead = other.counter - share.counter
            if len(requests) > due[other] and (lead >= 0 or share.is_new):
                beyond += reversed(requests[due[other] :])
            else:
                again = 0 if is_full else requests[-1].num_tokens
                if lead * self._shares.weight(other) >= min(wanted + again, MAX_LEAD):
                    ahead.append(requests[-1])
        return beyond + ahead

    def _due(self, places: Mapping[Share, list[Request]], more: float = 0.0) -> dict[Share, int]:
        """Return how many of the occupied batch slots each caller is due by its weight, at least
        one. `more`: the weight of a caller that has no slot yet.
        """
        num_running = sum(map(len, places.values()))
        weights = {share: self._shares.weight(share) for share in places}
        total = sum(weights.values()) + more
        return {
            share: max(1, math.ceil(num_running * weight / total))
            for share, weight in weights.items()
        }


def _level(share: Share) -> tuple[float, int]:
    """Return a key that sorts callers in the batch by service, least served first."""
    return share.counter, share.since


def _rank(request: Request) -> tuple[int, bool, float, int]:
    """Return a key that sorts a caller's requests in the batch; the last one gives up its slot
    first.
    """
    prefills = request.num_tokens_to_compute > 1
    return -request.spec.priority, prefills, request.arrival, request.key
