"""Retry tickets: who was refused and comes again as advised goes before who comes for the first
time.

    put ──▶ its place is kept, from half the advised time on … ──▶ drop, or nobody comes

A place that comes free while many ask is taken by whoever asks next, so somebody who comes again at
the advised time would find it taken by a newcomer. So whatever is told to come again is known by
its ticket, and others of the same caller leave as much room as those that are due now need. Callers
do not wait for each other's tickets: `engine.fairness.shares` says what is due to each of them.

O(log n) for each call; memory is bounded. Used by one thread at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass

MAX_TICKETS = 65_536
"""How many tickets are known at a time; what is refused beyond them is not known again."""
SOON_S = 0.5
"""A place is kept from the time at which it comes free at the earliest: half the advised time, or
at once if less than this is advised. Advice is longer than the rate says, and rates change."""
KEPT_S = 5.0
"""How many seconds after the advised time a place is still kept. What comes in time may be read
late, in a storm of calls."""


@dataclass(slots=True, eq=False)
class _Place:
    """One ticket's. `due`: the advised time. `is_kept`: whether others leave room for it now."""

    key: str
    amount: int
    due: float
    is_kept: bool = False


class RetryTickets:
    """See the module. Times are in seconds of one monotonic clock.

    Attributes:
        places: one for each ticket that is known; for others to see whether there are any.
    """

    __slots__ = ("_changes", "_kept", "_number", "places")

    def __init__(self) -> None:
        self.places: dict[Hashable, _Place] = {}
        self._kept: dict[str, int] = {}  # by caller: the sum of what is kept
        self._changes: list[tuple[float, int, Hashable, _Place]] = []  # heap: when, a serial number
        self._number = 0

    def due_in(self, key: str, ticket: str, now: float) -> float:
        """The seconds until a ticket is due; 0: it is due now, or not known."""
        place = self.places.get((key, ticket))
        return 0.0 if place is None else max(place.due - now, 0.0)

    def kept(self, key: str, now: float) -> int:
        """For how much of a caller's, which is due, whatever else the caller wants leaves room."""
        self._advance(now)
        return self._kept.get(key, 0)

    def is_kept(self, key: str, ticket: str) -> bool:
        """Whether a place is kept for what has this ticket, as of the last `kept`."""
        place = self.places.get((key, ticket))
        return place is not None and place.is_kept

    def put(self, key: str, ticket: str, amount: int, now: float, delay: float) -> None:
        """Keep a place for what was told to come again in `delay` seconds."""
        self.drop(key, ticket)
        if len(self.places) >= MAX_TICKETS or len(self._changes) >= 2 * MAX_TICKETS:
            return
        name = (key, ticket)
        place = self.places[name] = _Place(key, amount, now + delay)
        self._at(now + max(delay - SOON_S, 0.0) / 2, name, place)

    def drop(self, key: str, ticket: str) -> None:
        """Forget a ticket, because what has it got in. Harmless if it is not known."""
        place = self.places.pop((key, ticket), None)
        if place is not None:
            self._release(place)

    def _at(self, when: float, name: Hashable, place: _Place) -> None:
        self._number += 1
        heapq.heappush(self._changes, (when, self._number, name, place))

    def _advance(self, now: float) -> None:
        changes = self._changes
        while changes and changes[0][0] <= now:
            _, _, name, place = heapq.heappop(changes)
            if self.places.get(name) is not place:
                continue
            if place.is_kept:
                del self.places[name]
                self._release(place)
            else:
                place.is_kept = True
                self._kept[place.key] = self._kept.get(place.key, 0) + place.amount
                self._at(place.due + KEPT_S, name, place)

    def _release(self, place: _Place) -> None:
        if place.is_kept:
            left = self._kept[place.key] - place.amount
            if left:
                self._kept[place.key] = left
            else:
                del self._kept[place.key]
