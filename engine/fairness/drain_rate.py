"""Estimates how fast a full queue drains, to tell refused callers when to try again.

    left ──▶ amounts, by slices of the window ──▶ a rate
    advise(missing, claim) = (what is missing + what others were told to come for) / rate

The engine's queue has one estimator, and so does each limit of the service
(`service.admission.admission_control`). It counts whatever its user counts: requests, tokens or
bytes.

Each refused caller is told when to try again and is counted until that time, so the next one is
told a later time, as in a line. Callers thus come back as room becomes free, not all at the same
time. Nothing is reserved: a caller without such advice takes whatever is free.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from itertools import accumulate, combinations

WINDOW_S = 10.0
"""The length of the sliding window, in seconds; older departures are not counted."""
SLICE_S = 0.5
"""The resolution of the sliding window, in seconds."""
MIN_DELAY_S = 0.05
"""The shortest advised delay, in seconds, so that callers do not spin."""
MAX_DELAY_S = 120.0
"""The longest advised delay, in seconds."""
UNKNOWN_DELAY_S = 0.25
"""The shortest advised delay, in seconds, while no rate is known. The advice grows with the time
since the last departure.
"""
MARGIN = 0.1
"""The fraction by which the advised delay exceeds what the rate implies, because no rate is exact.
"""
JITTER = 0.1
"""The largest random addition, as a fraction of the advised delay, so that callers do not come back
at the same moment. It is 1 if no rate is known.
"""
BEST_COUNT = 256
"""The rate is that of the best section of the window with at least this many departures. Departures
are slower during a burst of calls, which takes the machine's time, than after it.
"""
_CLAIM_SLICE_S = 0.25
"""The resolution of the times at which advised callers are expected."""


class DrainRate:
    """What left within the last WINDOW_S seconds, and how much was told to come back.

    Used by one thread at a time. Each departure takes O(1), and memory is bounded regardless of the
    number of refusals.

    The rate is only measured while the queue is full enough for it to be meaningful, which `begin`
    signals. The measurement starts at the first departure after that, because the time before says
    nothing about the rate, and lasts at least SLICE_S.
    """

    __slots__ = ("_claimed", "_claims", "_clock", "_jitter", "_last", "_since", "_slices")

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`clock` returns monotonic seconds. `jitter` returns a random number from 0 to 1."""
        self._clock = clock
        self._jitter = jitter
        # When it began, what left in it, in how many departures.
        self._slices: deque[tuple[float, float, int]] = deque()
        self._since: float | None = None  # when the first left
        self._last = clock()
        self._claims: dict[int, float] = {}  # by the slice of time in which they come
        self._claimed = 0.0  # all of them

    def begin(self) -> None:
        """Start measuring, because the queue is now full enough."""
        self._slices.clear()
        self._since = None
        self._last = self._clock()

    def left(self, amount: float = 1.0) -> None:
        """Count a departure."""
        now = self._last = self._clock()
        if self._since is None:
            self._since = now
        if now == self._since:
            return
        slices = self._slices
        if slices and now - slices[-1][0] < SLICE_S:
            start, before, number = slices[-1]
            slices[-1] = (start, before + amount, number + 1)
            return
        slices.append((now, amount, 1))
        self._forget(now)

    def advise(
        self, missing: float, claim: float, before: float | None = None, margin: float = MARGIN
    ) -> float:
        """Return how many seconds a caller refused now should wait before trying again: MIN_DELAY_S
        to MAX_DELAY_S.

        Args:
            missing: how much must leave before there is room.
            claim: how much this caller will take then.
            before: the maximum amount of other callers' claims that go before this one. None: all
                of them.
            margin: the fraction by which the advised delay exceeds what the rate implies.
        """
        now = self._clock()
        self._forget(now)
        gone = sum(amount for _, amount, _ in self._slices)
        measured = 0.0 if self._since is None else min(now - self._since, WINDOW_S)
        if not gone or measured < SLICE_S:
            delay = max(now - self._last, UNKNOWN_DELAY_S) * (1 + self._jitter())
            return min(delay, MAX_DELAY_S)
        line = self._claimed if before is None else min(self._claimed, before)
        delay = (missing + line) / max(gone / measured, self._best())
        delay = max(delay * (1 + margin + JITTER * self._jitter()), MIN_DELAY_S)
        if delay > MAX_DELAY_S:  # advised, but not certain to find room
            return MAX_DELAY_S * (1 - JITTER * self._jitter())
        self._claim(now + delay, claim)
        return delay

    def _best(self) -> float:
        """Return the highest rate over consecutive slices with at least BEST_COUNT departures, or 0
        if there are none.
        """
        amounts = [0.0, *accumulate(amount for _, amount, _ in self._slices)]
        numbers = [0, *accumulate(number for _, _, number in self._slices)]
        best = 0.0
        for first, last in combinations(range(len(self._slices)), 2):
            if numbers[last] - numbers[first] >= BEST_COUNT:
                seconds = self._slices[last][0] - self._slices[first][0]
                best = max(best, (amounts[last] - amounts[first]) / seconds)
        return best

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
