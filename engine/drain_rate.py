"""How fast something leaves what is full, and so when to come again.

    left ──▶ amounts, by slices of the window ──▶ seconds_until(amount) = amount / rate

The engine's queue, and each limit of the service (`service.admission`), has one. What is counted
is the caller's: requests, or tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 10.0
"""What left longer ago says nothing of now."""
SLICE_S = 0.5
"""How finely the window slides."""
MIN_DELAY_S = 0.05
"""The shortest advice: a caller must not spin."""
MAX_DELAY_S = 30.0
"""The longest advice: what is full now may be free by then, whatever the rate was."""
UNKNOWN_DELAY_S = 1.0
"""The advice where nothing has left yet, at first; it grows with how long nothing does."""


class DrainRate:
    """What left within the last WINDOW_S seconds. One thread at a time; O(1) for each that leaves.

    A rate is of the time in which there was something that could leave: `begin` says when that
    begins.
    """

    __slots__ = ("_clock", "_last", "_since", "_slices")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._slices: deque[tuple[float, float]] = deque()  # when it began, what left in it
        self._since = self._last = clock()

    def begin(self) -> None:
        """It was empty, and is not any more."""
        self._slices.clear()
        self._since = self._last = self._clock()

    def left(self, amount: float = 1.0) -> None:
        """This much has left."""
        now = self._last = self._clock()
        slices = self._slices
        if slices and now - slices[-1][0] < SLICE_S:
            start, before = slices[-1]
            slices[-1] = (start, before + amount)
            return
        slices.append((now, amount))
        self._forget(now)

    def seconds_until(self, amount: float) -> float:
        """When this much more should have left, at the present rate: MIN_DELAY_S to MAX_DELAY_S."""
        now = self._clock()
        self._forget(now)
        gone = sum(amount for _, amount in self._slices)
        if gone > 0:
            measured = max(min(now - self._since, WINDOW_S), SLICE_S)
            delay = amount * measured / gone
        else:
            delay = max(now - self._last, UNKNOWN_DELAY_S)
        return min(max(delay, MIN_DELAY_S), MAX_DELAY_S)

    def _forget(self, now: float) -> None:
        slices = self._slices
        while slices and now - slices[0][0] > WINDOW_S:
            slices.popleft()
