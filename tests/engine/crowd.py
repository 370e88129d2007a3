"""A crowd before a full house: many who want to get in at the same moment, and come again when they
were told to. No threads and no time but a clock of its own.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator
from typing import Protocol

Served = Iterator[tuple[float, int]]
"""After how many seconds how many leave, again and again."""
CALM_S = 20.0
"""How long the house is kept busy before the crowd comes."""


class Clock:
    """Seconds, as a test sets them."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class House(Protocol):
    """What is full.

    Attributes:
        limit, present: how many may be there, and are.
    """

    limit: int
    present: int

    def advise(self) -> float:
        """When one who is refused now should come again, seconds."""

    def enter(self) -> None:
        """One comes in."""

    def leave(self) -> None:
        """One leaves."""


class Crowd:
    """Who wants to get in.

    Attributes:
        told: to each who was refused when all came, in turn: after how many seconds to come again.
        first: how many of them got in when they came again for the first time.
        freed: when places came free, in seconds since they came.
        all_in_s: when everybody had got in.
    """

    def __init__(self, clock: Clock, house: House, served: Served, *, busy: int) -> None:
        """`busy`: so many are there all the time before, as others come for those who leave."""
        self.told: list[float] = []
        self.first = 0
        self.freed: list[float] = []
        self.all_in_s = 0.0
        self._clock = clock
        self._house = house
        self._served = served
        self._busy = busy
        self._inside = 0
        self._again: list[tuple[float, int, bool]] = []  # heap: when, who, whether the first time

    def come(self, count: int) -> None:
        """They come, and all goes on until everybody has got in."""
        clock, house = self._clock, self._house
        came_at = clock.now
        if self._busy:
            came_at += CALM_S
            self._fill(self._busy)
        while not self.told or self._inside < len(self.told):
            after_s, leaving = next(self._served)
            at = clock.now + after_s
            if not self.told and at > came_at:
                clock.now = came_at
                self._burst(count)
            while self._again and self._again[0][0] <= at:
                clock.now, who, is_first = heapq.heappop(self._again)
                self._try(who, is_first=is_first)
            clock.now = at
            for _ in range(min(leaving, house.present)):
                house.leave()
                if self.told:
                    self.freed.append(at - came_at)
            if not self.told:
                self._fill(self._busy)
        self.all_in_s = clock.now - came_at

    def check_told(self, batch_s: float = 0.0) -> None:
        """Nearly all got in when they were told to come, and the n-th who was refused was not told
        to come much later than when the n-th place came free.

        Args:
            batch_s: how long it is between two moments at which many leave: when in between they
                would have left cannot be known.
        """
        assert self.first >= 0.9 * len(self.told) > 0
        for told, free in zip(self.told, self.freed, strict=False):
            assert told <= 2 * free + 0.5 + batch_s

    def _fill(self, count: int) -> None:
        while self._house.present < count:
            self._house.enter()

    def _burst(self, count: int) -> None:
        house = self._house
        for who in range(count):
            if house.present < house.limit:
                house.enter()
                continue
            self.told.append(house.advise())
            heapq.heappush(self._again, (self._clock.now + self.told[-1], who, True))

    def _try(self, who: int, *, is_first: bool) -> None:
        if self._house.present < self._house.limit:
            self._house.enter()
            self._inside += 1
            self.first += is_first
        else:
            again = self._clock.now + self._house.advise()
            heapq.heappush(self._again, (again, who, False))


def evenly(per_second: float) -> Served:
    """One at a time."""
    return itertools.repeat((1 / per_second, 1))


def at_random(per_second: float) -> Served:
    """One at a time, whenever."""
    source = random.Random(5)
    while True:
        yield source.expovariate(per_second), 1


def by_the_batch(per_second: float) -> Served:
    """64 at a time."""
    return itertools.repeat((64 / per_second, 64))
