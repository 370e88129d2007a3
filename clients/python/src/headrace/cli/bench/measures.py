"""What is measured, in bounded memory however long the load lasts: times go into histograms of
fixed buckets, and what happened when into a fixed number of cells, which become longer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.errors import HeadraceError
from headrace.results import Result

_LEAST = 1e-6  # seconds: the lower end of the first bucket
_RATIO = 1.01  # of a bucket's ends
_MOST_BUCKETS = math.ceil(math.log(1e6 / _LEAST, _RATIO))  # up to eleven days
_MOST_NAMES = 100
_CELLS = 240
_FIRST_CELL = 0.25  # seconds


class Histogram:
    """Times in buckets that are 1 % wide: a percentile is at most 0.5 % from the true one. At most
    2,778 buckets. The least, the greatest and the mean are exact.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.least = math.inf
        self.greatest = 0.0
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float, count: int = 1) -> None:
        """Counts a time so many times."""
        seconds = max(seconds, 0.0)
        self.count += count
        self.total += seconds * count
        self.least = min(self.least, seconds)
        self.greatest = max(self.greatest, seconds)
        place = math.floor(math.log(max(seconds, _LEAST) / _LEAST, _RATIO))
        self._buckets[min(place, _MOST_BUCKETS)] += count

    @property
    def mean(self) -> float | None:
        """The mean, seconds; None: nothing was counted."""
        return self.total / self.count if self.count else None

    def percentile(self, percent: float) -> float | None:
        """The least time that at least so many per cent of all do not exceed, seconds; None:
        nothing was counted.
        """
        wanted = max(math.ceil(self.count * percent / 100), 1)
        for place, count in sorted(self._buckets.items()):
            wanted -= count
            if wanted <= 0:
                middle: float = _LEAST * math.pow(_RATIO, place + 0.5)
                return min(max(middle, self.least), self.greatest)
        return None

    def buckets(self) -> Iterator[tuple[float, float, int]]:
        """The lower and the upper end of each bucket that is not empty, seconds, and its count."""
        for place, count in sorted(self._buckets.items()):
            yield _LEAST * _RATIO**place, _LEAST * _RATIO ** (place + 1), count


class Timeline:
    """A count over time, in at most 240 cells. When time outgrows them, each two become one."""

    def __init__(self) -> None:
        self.cell_seconds = _FIRST_CELL
        self.cells: list[int] = []

    def add(self, seconds: float, count: int) -> None:
        """Counts so many at a time since the beginning."""
        while (place := int(seconds / self.cell_seconds)) >= _CELLS:
            self.cells = [sum(self.cells[i : i + 2]) for i in range(0, len(self.cells), 2)]
            self.cell_seconds *= 2
        self.cells += [0] * (place + 1 - len(self.cells))
        self.cells[place] += count


@dataclass(frozen=True, slots=True)
class Goals:
    """What a good request does; None: that does not matter.

    Attributes:
        ttft: seconds until its first token, at most.
        itl: seconds from token to token, at most, in the request's mean.
    """

    ttft: float | None = None
    itl: float | None = None

    @property
    def are_set(self) -> bool:
        """Whether there are any."""
        return self.ttft is not None or self.itl is not None


@dataclass(slots=True)
class Tally:
    """Everything that was measured. Times of the clock that `Progress` is given, in seconds.

    Attributes:
        goals: of a good request.
        ttft: from when each request was due to its first token.
        itl: from token to token. Tokens that come in one piece share the wait before it.
        stall: the longest wait between two pieces, of each request that had two.
        whole: from when each request that was finished was due to its end.
        late: from when each request was due until it was sent the first time.
        refused, failed, retried, ends: how many, by reason.
        interrupted: requests that were cancelled because the load was ended.
    """

    goals: Goals = field(default_factory=Goals)
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    stall: Histogram = field(default_factory=Histogram)
    whole: Histogram = field(default_factory=Histogram)
    late: Histogram = field(default_factory=Histogram)
    started: int = 0
    done: int = 0
    good: int = 0
    interrupted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    timeline: Timeline = field(default_factory=Timeline)
    began: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def ended(self) -> int:
        """How many requests have ended, and not because the load was."""
        return self.done + self.refused.total() + self.failed.total()


class Progress:
    """One request's times."""

    def __init__(self, tally: Tally, due: float) -> None:
        """`due`: when it was to be sent."""
        self._tally = tally
        self._due = due
        self._first: float | None = None
        self._last = 0.0
        self._tokens = 0
        self._stall = 0.0
        tally.started += 1

    def sent(self, now: float) -> None:
        """It was sent the first time."""
        self._tally.late.add(now - self._due)

    def waits_for_room(self, refusal: HeadraceError) -> None:
        """The server has no room for it; it is sent again."""
        count(self._tally.retried, reason(refusal))

    def output(self, tokens: int, now: float) -> None:
        """A piece of its output came."""
        if not tokens:
            return
        tally = self._tally
        tally.output_tokens += tokens
        tally.timeline.add(now - tally.began, tokens)
        if self._first is None:
            self._first = now
            tally.ttft.add(now - self._due)
        else:
            waited = now - self._last
            tally.itl.add(waited / tokens, tokens)
            self._stall = max(self._stall, waited)
            self._tokens += tokens
        self._last = now

    def finished(self, result: Result, now: float) -> None:
        """It ended as it should."""
        tally = self._tally
        tally.done += 1
        tally.whole.add(now - self._due)
        if self._tokens:
            tally.stall.add(self._stall)
        tally.prompt_tokens += result.usage.prompt_tokens
        tally.cached_tokens += result.usage.cached_tokens
        count(tally.ends, result.finish_reason.name)
        tally.good += self._is_good()

    def _is_good(self) -> bool:
        goals = self._tally.goals
        if goals.ttft is not None and (self._first is None or self._first - self._due > goals.ttft):
            return False
        if goals.itl is None or self._first is None or not self._tokens:
            return True
        return (self._last - self._first) / self._tokens <= goals.itl


def reason(error: HeadraceError) -> str:
    """What an error is counted under: the server's reason, or the code."""
    return error.reason or error.code.name


def count(counter: Counter[str], name: str) -> None:
    """Counts a name; there are at most 100, which a server could choose."""
    counter[name if name in counter or len(counter) < _MOST_NAMES else "other"] += 1
