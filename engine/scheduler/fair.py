"""Service is shared among the callers that have work: the least served comes first."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import ClassVar

from engine.kv_cache.manager import KVCacheManager
from engine.request import Request
from engine.scheduler.base import Scheduler, StepPlan
from engine.scheduler.callers import OUTPUT_COST, service_of
from engine.scheduler.shares import Order, Share, Shares
from engine.scheduler.time_limits import TimeLimits
from engine.types import RequestKey

LEAD = 16 * OUTPUT_COST
"""Service that a caller without more than its share of the places is given before it gives one up
to a caller that has none.
"""
MAX_LEAD = 128 * OUTPUT_COST
"""The same where tokens must be computed again for the change."""
_DECODES, _PREFILLS, _QUEUE = 0, 1, 2
"""What a caller's turn is about."""


class FairScheduler(Scheduler):
    """Virtual token counters (see `engine.scheduler.shares`), with chunks and preemption.

    1. Decoding requests come first, as long as a quarter of the token budget is left for prompts;
       where it is not, they take their turns with the prompts. What is left goes to the callers'
       prompts, of the least served caller first, and of each before its queue. So neither
       streams nor prompts of one caller keep out another's.
    2. A caller's waiting requests come by priority, then those that were begun, then by arrival. A
       higher priority takes the place of a lower one of the same caller.
    3. A caller that has nothing in the batch waits for no end of another's request. Where places
       or blocks are short, a request of the most served caller gives its own up: at once, if that
       caller holds more than its weighted share of the places; else when it has been given LEAD
       more than the caller that waits. So each place that changes hands between two callers
       that hold no more than their shares was paid for with service. A place that is given up
       loses no KV as long as there are blocks (`set_aside`).
    4. When blocks run out, a caller that holds more than its share of the places gives up a request
       before one that does not; of these, the most served caller does; and of its requests the one
       of the lowest priority that came last.
    5. The least served caller's head of the queue is not passed by where blocks are short.
    6. A waiting request whose time limit cannot be met is ended instead of run (see TimeLimits).

    Nobody starves: whoever waits keeps its counter, and the counters of all who are served before
    it rise above it, also those of new callers. Within a caller, a low priority waits for as long
    as higher ones keep coming.
    """

    heeds_priorities: ClassVar[bool] = True

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_batch_tokens: int,
        max_requests_per_batch: int,
        safety_margin: float | None = None,
    ) -> None:
        super().__init__(
            kv_cache,
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=max_requests_per_batch,
            safety_margin=safety_margin,
        )
        self._shares = Shares(self.callers, self._busiest)
        self._limits = TimeLimits(kv_cache, self.waiting, max_batch_tokens)
        self._is_choosing = False

    # ---- the queue -----------------------------------------------------------------------------

    def queued(self, request: Request) -> None:
        """Enter it into its caller's queue."""
        # Who gives a place up was served until now: there is no idle time to be no credit.
        self._shares.queued(request, lifts=not self._is_choosing)
        self._limits.queued(request)

    def unqueued(self, request: Request) -> None:
        """Take it out of its caller's queue."""
        self._shares.unqueued(request)
        self._limits.tidy()

    def unhold(self, request: Request) -> None:
        """Let a held request go on. The time in which it was held is no credit."""
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
        """The first of the least served caller."""
        share = self._shares.peek()
        return None if share is None else share.head()

    def served(self, request: Request, service: int) -> None:
        """Count it."""
        self._shares.served(request, service)

    def measured(self, num_tokens: int, seconds: float) -> None:
        """Remember how long a step took."""
        self._limits.measured(num_tokens, seconds)

    def take_hopeless(self, now: float) -> Iterable[Request]:
        """Those whose time limits cannot be met."""
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
    """One step that is put together.

    Attributes:
        given: what each caller gets by it, divided by its weight, as far as that is known.
        begun: the requests that are started by it.
        victims: who is preempted when blocks run out, the last first.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        shares: Shares,
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
        """Put the requests in."""
        plan = self._plan
        runnable = self._scheduler.runnable()
        has_prompts = any(one.num_tokens_to_compute > 1 for one in runnable)
        for_decodes = plan.budget - plan.budget // 4
        # Mostly all that run decode, and all of them can: then their order does not matter.
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
        """Leave the callers' order as it was."""
        self._shares.put_back(self._popped)

    def _extend_by_order(self, runnable: set[RequestKey], for_decodes: int) -> None:
        """Put those that decode in, if the budget lasts for all of them, and let the others have
        their turns.
        """
        places = self._places()
        order = [one for share in sorted(places, key=_level) for one in places[share]]
        # Who holds more than its share gives up what is beyond it before all others.
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
        """The requests in the batch that were there before, by caller, in their order."""
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
        """The least served caller, with what it got by this step, and what its turn is about."""
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
        """Put a request into the step, if it still runs and blocks can be had."""
        scheduler, plan = self._scheduler, self._plan
        if request.key not in scheduler.running:
            return
        num_preempted = len(plan.preempted)
        if scheduler.make_room(plan, request, self.victims) and scheduler.extend(plan, request):
            self._note(request)
        # While those who run are short of blocks, nobody is begun.
        self._is_queue_open = self._is_queue_open and len(plan.preempted) == num_preempted

    def _note(self, request: Request) -> None:
        share = self._shares.of(request)
        service = service_of(self._plan.parts[request.key])
        self.given[share] = self.given.get(share, 0.0) + service / self._shares.weight(share)

    # ---- requests that wait ----------------------------------------------------------------------

    def _begin(self, share: Share) -> None:
        """Start the head of a caller's queue, if need be in another's place."""
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
            # Blocks are short, and nobody passes it by; or there is no time; or there is no place
            # even for a caller that has none, and the others have no better claim.
            self._is_queue_open = False

    def _take_place(self, share: Share, head: Request, is_full: bool) -> bool:
        """Start a request in the place of others. Nobody is disturbed where that does not help."""
        scheduler, plan = self._scheduler, self._plan
        if scheduler.callers.num_running(share.caller):
            victims = self._lower(head)
        else:
            victims = self._overserved(share, head, is_full)
        # Who has nothing to compute ends by itself.
        victims = [one for one in victims if not one.is_generated]
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
        """The caller's own requests of a lower priority; the lowest first."""
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
        """Who gives a place or blocks up for a caller that has none; the first at first."""
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
        """How many of the places that are taken are each caller's by its weight, at least one.
        `more`: the weight of one that has none yet.
        """
        num_running = sum(map(len, places.values()))
        weights = {share: self._shares.weight(share) for share in places}
        total = sum(weights.values()) + more
        return {
            share: max(1, math.ceil(num_running * weight / total))
            for share, weight in weights.items()
        }


def _level(share: Share) -> tuple[float, int]:
    """Who of those that run was served the least."""
    return share.counter, share.since


def _rank(request: Request) -> tuple[int, bool, float, int]:
    """The order of a caller's requests in the batch: the last one gives up its place first."""
    prefills = request.num_tokens_to_compute > 1
    return -request.spec.priority, prefills, request.arrival, request.key
