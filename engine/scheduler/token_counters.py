"""Compares how much service callers have received, with virtual token counters.

Based on Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. A caller's counter is
the service that it has received (see `engine.scheduler.live_callers`), divided by its weight. Of
the waiting callers, the one with the lowest counter comes first. When a caller begins to wait, its
counter is raised to a floor, so that it gets no credit for the time in which it requested nothing:

- if others wait, to the lowest counter among them;
- if nobody waits, to the counter of the caller that holds the most batch slots for its
  weight, because the new caller may need one of these slots;
- if nobody holds a slot either, to the counter of the caller that left last.

With the paper's floor alone, an endless series of new callers could keep out an old one whose
counter is slightly above theirs: each begins at the lowest counter, so the lowest never rises.
Therefore, callers that have received no service yet do not count for the floor. Among callers with
equal counters and no slot in the batch, the one that has waited longest comes first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.contract.request import Request
from engine.contract.types import CallerKey, RequestKey
from engine.scheduler.live_callers import LiveCallers
from engine.scheduler.request_heap import RequestHeap

_REMEMBERED = 1024
"""How many callers without requests are remembered: those furthest above the floor."""

Order = tuple[float, bool, int]
"""The sort key of a caller, lowest first: its counter, whether it has a slot in the batch, and
since when it has waited.
"""


@dataclass(slots=True, eq=False)
class Share:
    """One caller's counter and queue.

    Attributes:
        caller: the caller's name.
        counter: the service that it has received, divided by its weight at that time.
        is_new: whether it was raised to the floor and has received no service since.
        since: when it began to wait, as a sequence number.
        waiting: its requests in the queue.
        queue: the same requests, ordered by priority, then those that were started before, then by
            arrival.
    """

    caller: CallerKey
    counter: float
    is_new: bool = False
    since: int = 0
    waiting: dict[RequestKey, Request] = field(default_factory=dict)
    queue: RequestHeap = field(init=False)

    def __post_init__(self) -> None:
        self.queue = RequestHeap(self.waiting)

    def head(self) -> Request | None:
        """Return the waiting request that comes next."""
        first = self.queue.peek()
        return None if first is None else first[1]


class _Lowest:
    """A heap of callers with lazy deletion. Only the latest entry of a caller counts; if its order
    has risen since, the entry is moved when it reaches the top.
    """

    def __init__(self, order: Callable[[Share], Order | None]) -> None:
        """`order`: returns a caller's order, or None if it no longer belongs here."""
        self._order = order
        self._entries: list[tuple[Order, int, Share]] = []
        self._latest: dict[Share, int] = {}
        self._serial = 0

    def __len__(self) -> int:
        """The number of entries, including outdated ones."""
        return len(self._entries)

    def push(self, share: Share) -> None:
        """Add a caller, or update its entry."""
        order = self._order(share)
        if order is None:
            return
        self._serial += 1
        self._latest[share] = self._serial
        heapq.heappush(self._entries, (order, self._serial, share))
        if len(self._entries) > 2 * len(self._latest) + 64:
            self._entries = [entry for entry in self._entries if self._counts(entry)]
            heapq.heapify(self._entries)

    def peek(self) -> Share | None:
        """Return the caller with the lowest order, or None if there is no caller."""
        while self._entries:
            entry = self._entries[0]
            share = entry[2]
            order = self._order(share)
            if order == entry[0] and self._counts(entry):
                return share
            heapq.heappop(self._entries)
            if self._counts(entry):
                del self._latest[share]
                self.push(share)
        return None

    def pop(self) -> None:
        """Leave out the caller that `peek` returned, until it is pushed again."""
        _, _, share = heapq.heappop(self._entries)
        del self._latest[share]

    def discard(self, share: Share) -> None:
        """Remove a caller. Does nothing if it is not in the heap."""
        self._latest.pop(share, None)

    def _counts(self, entry: tuple[Order, int, Share]) -> bool:
        return self._latest.get(entry[2]) == entry[1]


class TokenCounters:
    """The shares of the callers that have requests, and of some that had requests before.

    O(log n) for each change, amortised, with n waiting callers.
    """

    def __init__(self, callers: LiveCallers, busiest: Callable[[], float]) -> None:
        """Start with no shares.

        Args:
            callers: the callers with running or waiting requests.
            busiest: returns the counter of the caller that holds the most batch slots for its
                weight, or 0 if nobody holds one.
        """
        self._callers = callers
        self._busiest = busiest
        self._shares: dict[CallerKey, Share] = {}
        self._first = _Lowest(lambda one: self.order(one) if one.waiting else None)
        self._floor = _Lowest(
            lambda one: self.order(one) if one.waiting and not one.is_new else None
        )
        self._last = 0.0  # the counter of the caller that left last
        self._begun = 0
        self._kept = 0  # how many there were after the last clean-up

    def __len__(self) -> int:
        """The number of callers that are remembered."""
        return len(self._shares)

    def of(self, request: Request) -> Share:
        """Return the share of a request's caller. A new caller begins at the floor."""
        caller = request.spec.caller
        share = self._shares.get(caller)
        if share is None:
            self._forget()
            share = Share(caller, self.floor())
            self._shares[caller] = share
        return share

    def order(self, share: Share, given: float = 0.0) -> Order:
        """Return a caller's sort key. `given`: service in this step that is not counted yet."""
        has_place = given > 0 or self._callers.num_running(share.caller) > 0
        return share.counter + given, has_place, share.since

    def weight(self, share: Share) -> float:
        """Return the effective weight of a caller that has requests."""
        return self._callers.weight(share.caller)

    def wake(self, request: Request) -> None:
        """Record that a request that neither ran nor waited before will run."""
        share = self.of(request)
        if not self._callers.has(share.caller):
            share.counter = max(share.counter, self.floor())

    def queued(self, request: Request, *, lifts: bool) -> None:
        """Record that a request has entered the queue. Does nothing if it is already in the queue.
        `lifts`: whether the caller is raised to the floor if this is its first waiting request.
        """
        share = self.of(request)
        is_begun = request.first_scheduled is not None
        if not share.waiting:
            floor = self.floor() if lifts else -math.inf
            if share.counter <= floor:
                share.counter = floor
                share.is_new = not is_begun
            self._begun += 1
            share.since = self._begun
        share.waiting[request.key] = request
        share.queue.tidy()
        share.queue.push((-request.spec.priority, not is_begun, request.arrival), request)
        self._enter(share)

    def unqueued(self, request: Request) -> None:
        """Record that a request has left the queue."""
        share = self.of(request)
        del share.waiting[request.key]
        share.queue.tidy()
        if not share.waiting:
            self._first.discard(share)
            self._floor.discard(share)

    def left(self, request: Request) -> None:
        """Record that a request has ended or is held, so its caller may no longer have a slot."""
        share = self._shares.get(request.spec.caller)
        if share is not None:
            self._last = share.counter
            self._enter(share)

    def served(self, request: Request, service: int) -> None:
        """Record the service that a request's caller has received."""
        share = self.of(request)
        share.counter += service / self.weight(share)
        if share.is_new:
            share.is_new = False
            self._enter(share)

    def floor(self) -> float:
        """Return the lowest counter at which a caller may begin to wait."""
        lowest = self._floor.peek() or self._first.peek()
        return lowest.counter if lowest is not None else self._busiest() or self._last

    def peek(self) -> Share | None:
        """Return the first waiting caller, or None if nobody waits."""
        return self._first.peek()

    def pop(self) -> None:
        """Leave the first caller out, until it is put back."""
        self._first.pop()

    def put_back(self, shares: Iterable[Share]) -> None:
        """Undo `pop`."""
        for share in shares:
            self._first.push(share)

    def _enter(self, share: Share) -> None:
        self._first.push(share)
        self._floor.push(share)

    def _forget(self) -> None:
        """Make room for a new caller. Callers without requests are dropped if they are not above
        the floor, to which they would be raised anyway; only a few of the others are kept.
        Amortised O(1).
        """
        if len(self._shares) < self._kept + _REMEMBERED:
            return
        floor = self.floor()
        idle = [one for one in self._shares.values() if not self._callers.has(one.caller)]
        idle.sort(key=lambda one: -one.counter)
        for number, share in enumerate(idle):
            if number >= _REMEMBERED or share.counter <= floor:
                del self._shares[share.caller]
        self._kept = len(self._shares)
