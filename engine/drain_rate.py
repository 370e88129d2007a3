"""How fast something leaves what is full, and so when to come again.

    left ──▶ amounts, by slices of the window ──▶ a rate
    advise(missing, claim) = (what is missing + what others were told to come for) / rate

The engine's queue, and each limit of the service (`service.admission`), has one. What is counted is
the caller's: requests, tokens, bytes.

Whoever is refused is told when to come again, and is counted from then until that time: the next
one is told a later time, as if they stood in a line. So as many come at a time as there is room for
then, and not all of them when the first of them could. Nothing is kept for anybody: who comes
without having been told takes what is free.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 10.0
"""What left longer ago says nothing of now."""
SLICE_S = 0.5
"""How finely the window slides."""
MIN_DELAY_S = 0.05
"""The shortest advice: a caller must not spin."""
MAX_DELAY_S = 120.0
"""The longest advice."""
UNKNOWN_DELAY_S = 0.25
"""The advice where nothing has left yet, at first; it grows with how long nothing does."""
MARGIN = 0.1
"""How much later than by the rate anybody is told to come, as a part: no rate is exact."""
JITTER = 0.1
"""As a part of the advice, at most: callers do not come at the same moment. 1 where no rate is
known.
"""
_CLAIM_SLICE_S = 0.25
"""How finely it is known when those who were told to come will be there."""


class DrainRate:
    """What left within the last WINDOW_S seconds, and who was told to come. One thread at a time;
    O(1) for each that leaves; bounded memory, however many are refused.

    A rate is of the time in which so much was there that its like leaves when it is full: `begin`
    says when that begins. It is measured from the first that leaves then (how long that one took
    says nothing of how many follow), for SLICE_S at least.
    """

    __slots__ = ("_claimed", "_claims", "_clock", "_jitter", "_last", "_since", "_slices")

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`clock`: monotonic seconds. `jitter`: a number from 0 to 1, another one each time."""
        self._clock = clock
        self._jitter = jitter
        self._slices: deque[tuple[float, float]] = deque()  # when it began, what left in it
        self._since: float | None = None  # when the first left
        self._last = clock()
        self._claims: dict[int, float] = {}  # by the slice of time in which they come
        self._claimed = 0.0  # all of them

    def begin(self) -> None:
        """From now on there is much."""
        self._slices.clear()
        self._since = None
        self._last = self._clock()

    def left(self, amount: float = 1.0) -> None:
        """This much has left."""
        now = self._last = self._clock()
        if self._since is None:
            self._since = now
        if now == self._since:
            return
        slices = self._slices
        if slices and now - slices[-1][0] < SLICE_S:
            start, before = slices[-1]
            slices[-1] = (start, before + amount)
            return
        slices.append((now, amount))
        self._forget(now)

    def advise(self, missing: float, claim: float, before: float | None = None) -> float:
        """When somebody who is refused now should come again: in MIN_DELAY_S to MAX_DELAY_S.

        Args:
            missing: how much must leave before there is room.
            claim: how much whoever is told this will take then.
            before: how much of what others were told to come for has its turn before, at most;
                None: all of it.
        """
        now = self._clock()
        self._forget(now)
        gone = sum(amount for _, amount in self._slices)
        measured = 0.0 if self._since is None else min(now - self._since, WINDOW_S)
        if not gone or measured < SLICE_S:
            delay = max(now - self._last, UNKNOWN_DELAY_S) * (1 + self._jitter())
            return min(delay, MAX_DELAY_S)
        line = self._claimed if before is None else min(self._claimed, before)
        delay = (missing + line) * measured / gone
        delay = max(delay * (1 + MARGIN + JITTER * self._jitter()), MIN_DELAY_S)
        if delay > MAX_DELAY_S:  # told to come, but not for certain to find room
            return MAX_DELAY_S * (1 - JITTER * self._jitter())
        self._claim(now + delay, claim)
        return delay

    def _claim(self, when: float, amount: float) -> None:
        index = int(when / _CLAIM_SLICE_S)
        self._claims[index] = self._claims.get(index, 0.0) + amount
        self._claimed += amount

    def _forget(self, now: float) -> None:
        slices = self._slices
        while slices and now - slices[0][0] > WINDOW_S:
            slices.popleft()
        claims, index = self._claims, int(now / _CLAIM_SLICE_S)
        if claims and min(claims) < index:
            self._claims = {when: amount for when, amount in claims.items() if when >= index}
            self._claimed = sum(self._claims.values())
