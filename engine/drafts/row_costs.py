"""What rows of drafts cost: measured when the model is loaded, corrected by the steps since.

    seconds = of the number of rows + attended token·(requests' + share·drafts')

The time by rows has steps: a product computes a tile of rows at a time, so that some rows more cost
nothing. How much longer or less a step takes than was measured at load is learned separately for
steps without drafts, for those with some, and for each number of rows of these, so that they are
compared as they are now. A step that was delayed by something else counts little.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_REMEMBERED = 9
"""How many steps with the same number of rows are remembered."""
_OF_ALL = 25
"""How many steps with any number of rows."""
_AT_LOAD = 3
"""How many steps the measurement at load counts as."""


class DecodeRows(NamedTuple):
    """The rows of a step in which all requests decode.

    Attributes:
        num_requests, num_drafts: the numbers of rows.
        context: how many tokens the requests' rows attend to, in all.
        draft_context: the same of the drafts' rows.
    """

    num_requests: int
    num_drafts: int
    context: int
    draft_context: int

    @property
    def num_rows(self) -> int:
        return self.num_requests + self.num_drafts


@dataclass(frozen=True, slots=True)
class RowTimes:
    """What was measured at load, in seconds.

    Attributes:
        counts: numbers of rows, ascending from 1.
        seconds: a step's time with each of them and hardly any context.
        token_s: the time for each token that a request's own row attends to.
        draft_token_s: the same for a draft's row.
    """

    counts: tuple[int, ...]
    seconds: tuple[float, ...]
    token_s: float
    draft_token_s: float


class _Error:
    """The median of the last errors (of the logarithm), and of some zeros, which stand for what was
    measured at load.
    """

    __slots__ = ("_last", "median")

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self.median = 0.0
        self._last = deque([0.0] * _AT_LOAD, maxlen=remembered)

    def learn(self, error: float) -> None:
        self._last.append(error)
        self.median = sorted(self._last)[len(self._last) // 2]


class RowCosts:
    """Estimates the time of steps; see the module."""

    def __init__(self, times: RowTimes) -> None:
        self._token_s, self._draft_token_s = times.token_s, times.draft_token_s
        self._seconds = _interpolated(times.counts, times.seconds)
        self._plain = _Error(_OF_ALL)
        self._drafted = _Error(_OF_ALL)  # beyond that
        self._errors: dict[int, _Error] = {}

    def estimate(self, rows: DecodeRows) -> float:
        """Return a step's expected time, in seconds."""
        error = self._plain.median
        if rows.num_drafts:
            known = self._errors.get(rows.num_rows)
            error += self._drafted.median + (0.0 if known is None else known.median)
        return self._measured_at_load(rows) * math.exp(error)

    def learn(self, rows: DecodeRows, seconds: float) -> None:
        """Record a step's time, in seconds."""
        if seconds <= 0 or not rows.num_requests:
            return
        error = math.log(seconds / self._measured_at_load(rows))
        if not rows.num_drafts:
            self._plain.learn(error)
            return
        known = self._errors.setdefault(rows.num_rows, _Error())
        error -= self._plain.median
        self._drafted.learn(error - known.median)
        known.learn(error - self._drafted.median)

    def _measured_at_load(self, rows: DecodeRows) -> float:
        count, by_rows = rows.num_rows, self._seconds
        if count < len(by_rows):
            seconds = by_rows[count]
        else:
            seconds = by_rows[-1] * count / (len(by_rows) - 1)
        return seconds + self._token_s * rows.context + self._draft_token_s * rows.draft_context


def _interpolated(counts: Sequence[int], times: Sequence[float]) -> list[float]:
    """Return the time by number of rows, index 0 unused."""
    found = [times[0]]
    for index, count in enumerate(counts):
        before = counts[index - 1] if index else 0
        start = found[-1] if index else times[0]
        for row in range(before + 1, count + 1):
            found.append(start + (times[index] - start) * (row - before) / (count - before))
    return found
