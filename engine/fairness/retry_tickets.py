"""Retry tickets: refused requests that come back as advised go before new ones.

    put ──▶ its place is kept, from half the advised time on … ──▶ drop, or nobody comes

When many callers ask, a place that becomes free goes to the next one to ask. A caller coming back
at the advised time would therefore find it taken by a newcomer. To prevent this, each refused
request is identified by a ticket, and other requests of the same caller leave as much room as the
tickets that are now due need. Callers do not wait for each other's tickets:
`engine.fairness.shares` decides what each of them is due.

Each call takes O(log n), and memory is bounded. Used by one thread at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass

MAX_TICKETS = 65_536
"""The maximum number of tickets known at a time. Refusals beyond it get no ticket."""
SOON_S = 0.5
"""A place is kept from (delay - SOON_S) / 2 seconds after the refusal, or immediately if the
advised delay is below SOON_S. It may become free that early, because advice is longer than the rate
implies, and rates change.
"""
KEPT_S = 5.0
"""How many seconds a place is kept after the advised time. In a burst of calls, a request that
arrives in time may be read late.
"""


@dataclass(slots=True, eq=False)
class _Place:
    """The place of one ticket. `due` is the advised time, and `is_kept` whether others leave room
    for it now.
    """

    key: str
    amount: int
    due: float
    is_kept: bool = False


class RetryTickets:
    """The retry tickets of all callers. Times are in seconds of one monotonic clock.

    Attributes:
        places: the place of each known ticket. Others read it to see whether there are any.
    """

    __slots__ = ("_changes", "_kept", "_number", "places")

    def __init__(self) -> None:
        self.places: dict[Hashable, _Place] = {}
        self._kept: dict[str, int] = {}  # by caller: the sum of what is kept
        self._changes: list[tuple[float, int, Hashable, _Place]] = []  # heap: when, a serial number
        self._number = 0

    def due_in(self, key: str, ticket: str, now: float) -> float:
        """Return the seconds until a ticket is due, or 0 if it is due now or unknown."""
        place = self.places.get((key, ticket))
        return 0.0 if place is None else max(place.due - now, 0.0)

    def kept(self, key: str, now: float) -> int:
        """Return the amount that a caller's due tickets reserve, and for which its other requests
        must leave room.
        """
        self._advance(now)
        return self._kept.get(key, 0)

    def is_kept(self, key: str, ticket: str) -> bool:
        """Whether a place is kept for this ticket, as of the last call of `kept`."""
        place = self.places.get((key, ticket))
        return place is not None and place.is_kept

    def put(self, key: str, ticket: str, amount: int, now: float, delay: float) -> None:
        """Keep a place for an amount that was told to come back in `delay` seconds."""
        self.drop(key, ticket)
        if len(self.places) >= MAX_TICKETS or len(self._changes) >= 2 * MAX_TICKETS:
            return
        name = (key, ticket)
        place = self.places[name] = _Place(key, amount, now + delay)
        self._at(now + max(delay - SOON_S, 0.0) / 2, name, place)

    def drop(self, key: str, ticket: str) -> None:
        """Forget a ticket because its request was admitted. Harmless if the ticket is unknown."""
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
