"""What each caller was given beside the others: virtual token counters.

After Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. A caller's counter is
the service that it was given (see `engine.scheduler.callers`), divided by its weight; of the
callers that wait, the one with the lowest comes first. A caller that begins to wait is lifted to
the floor, so that the time in which it asked for nothing is no credit:

- where others wait, to the lowest counter among them;
- where nobody waits, nobody lacks anything: to the counter of whoever holds the most places in the
  batch for its weight, since a place is what the caller may want of it;
- where nobody holds a place either, to the counter of whoever left last.

The paper's floor alone lets new callers without end keep out an old one, whose counter is a little
above theirs: each of them begins at the lowest counter there is, which then does not rise. So those
that were given nothing yet make no floor for others, and of equal ones without a place in the batch
the one that has waited longest comes first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.request import Request
from engine.scheduler.callers import Callers
from engine.scheduler.request_heap import RequestHeap
from engine.types import CallerKey, RequestKey

_REMEMBERED = 1024
"""Callers without requests that are remembered, those that are the most ahead of the floor."""

Order = tuple[float, bool, int]
"""Who comes first, the lowest: the counter, whether it has a place in the batch, and since when it
waits.
"""


@dataclass(slots=True, eq=False)
class Share:
    """One caller's.

    Attributes:
        caller: its name.
        counter: the service that it was given, divided by its weight at that time.
        is_new: it was lifted when it began to wait, and was given nothing since.
        since: when it began to wait, counted in such beginnings.
        waiting: its requests in the queue.
        queue: them in their order: by priority, then those that were begun, then by arrival.
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
        """The one of its waiting requests whose turn is next."""
        first = self.queue.peek()
        return None if first is None else first[1]


class _Lowest:
    """A heap of callers with lazy deletion. Of each only the entry that was made last counts; one
    whose order has risen since is moved when it comes up.
    """

    def __init__(self, order: Callable[[Share], Order | None]) -> None:
        """`order`: a caller's; None: it does not belong here any more."""
        self._order = order
        self._entries: list[tuple[Order, int, Share]] = []
        self._latest: dict[Share, int] = {}
        self._serial = 0

    def __len__(self) -> int:
        """How many entries there are, of those that count and of others."""
        return len(self._entries)

    def push(self, share: Share) -> None:
        """Enter a caller, or enter it anew."""
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
        """The lowest. None: there is nobody."""
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
        """Leave out the one that `peek` has returned, until it is pushed again."""
        _, _, share = heapq.heappop(self._entries)
        del self._latest[share]

    def discard(self, share: Share) -> None:
        """Forget a caller. Harmless where it is not here."""
        self._latest.pop(share, None)

    def _counts(self, entry: tuple[Order, int, Share]) -> bool:
        return self._latest.get(entry[2]) == entry[1]


class Shares:
    """The shares of the callers that have requests, and of some that had.

    O(log n) at each change, n callers that wait; amortised.
    """

    def __init__(self, callers: Callers, busiest: Callable[[], float]) -> None:
        """Begin with none.

        Args:
            callers: who has requests that run or wait.
            busiest: the counter of whoever holds the most places for its weight; 0: nobody does.
        """
        self._callers = callers
        self._busiest = busiest
        self._shares: dict[CallerKey, Share] = {}
        self._first = _Lowest(lambda one: self.order(one) if one.waiting else None)
        self._floor = _Lowest(
            lambda one: self.order(one) if one.waiting and not one.is_new else None
        )
        self._last = 0.0  # the counter of whoever left last
        self._begun = 0
        self._kept = 0  # how many there were when it was last looked who can be forgotten

    def __len__(self) -> int:
        """How many callers are remembered."""
        return len(self._shares)

    def of(self, request: Request) -> Share:
        """The share of a request's caller. One that is not known yet begins at the floor."""
        caller = request.spec.caller
        share = self._shares.get(caller)
        if share is None:
            self._forget()
            share = Share(caller, self.floor())
            self._shares[caller] = share
        return share

    def order(self, share: Share, given: float = 0.0) -> Order:
        """A caller's place among the others; `given`: of this step, not counted yet."""
        has_place = given > 0 or self._callers.num_running(share.caller) > 0
        return share.counter + given, has_place, share.since

    def weight(self, share: Share) -> float:
        """What a caller that has requests is due beside others."""
        return self._callers.weight(share.caller)

    def wake(self, request: Request) -> None:
        """A request will run that neither ran nor waited."""
        share = self.of(request)
        if not self._callers.has(share.caller):
            share.counter = max(share.counter, self.floor())

    def queued(self, request: Request, *, lifts: bool) -> None:
        """A request has entered the queue. Harmless where it was there. `lifts`: whether its caller
        is lifted to the floor if it begins to wait by that.
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
        """A request has left the queue."""
        share = self.of(request)
        del share.waiting[request.key]
        share.queue.tidy()
        if not share.waiting:
            self._first.discard(share)
            self._floor.discard(share)

    def left(self, request: Request) -> None:
        """A request has ended, or is held: its caller may have no place any more."""
        share = self._shares.get(request.spec.caller)
        if share is not None:
            self._last = share.counter
            self._enter(share)

    def served(self, request: Request, service: int) -> None:
        """A request's caller was given service."""
        share = self.of(request)
        share.counter += service / self.weight(share)
        if share.is_new:
            share.is_new = False
            self._enter(share)

    def floor(self) -> float:
        """Where a caller that begins to wait comes in, if it is not above that already."""
        lowest = self._floor.peek() or self._first.peek()
        return lowest.counter if lowest is not None else self._busiest() or self._last

    def peek(self) -> Share | None:
        """The one that waits and comes first. None: nobody waits."""
        return self._first.peek()

    def pop(self) -> None:
        """Leave the first one out, until it is put back."""
        self._first.pop()

    def put_back(self, shares: Iterable[Share]) -> None:
        """Undo `pop`."""
        for share in shares:
            self._first.push(share)

    def _enter(self, share: Share) -> None:
        self._first.push(share)
        self._floor.push(share)

    def _forget(self) -> None:
        """Make room for a new caller: of those without requests, the ones that are not above the
        floor would be lifted to it anyway, and few of the others are kept. Amortised O(1).
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
