"""The measurements of a load, in bounded memory however long the load lasts.

Times are counted in histograms with fixed buckets. Counts over time go into a limited number of
cells, which grow longer over time.
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
    """A histogram of times, with buckets 1 % wide.

    A percentile is within 0.5 % of the true one. There are at most 2,778 buckets. The minimum,
    maximum and mean are exact.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.least = math.inf
        self.greatest = 0.0
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float, count: int = 1) -> None:
        """Adds a time, counted `count` times."""
        seconds = max(seconds, 0.0)
        self.count += count
        self.total += seconds * count
        self.least = min(self.least, seconds)
        self.greatest = max(self.greatest, seconds)
        place = math.floor(math.log(max(seconds, _LEAST) / _LEAST, _RATIO))
        self._buckets[min(place, _MOST_BUCKETS)] += count

    @property
    def mean(self) -> float | None:
        """The mean in seconds; None if the histogram is empty."""
        return self.total / self.count if self.count else None

    def percentile(self, percent: float) -> float | None:
        """Returns a percentile in seconds, or None if the histogram is empty.

        This is the smallest time that at least `percent` % of the times do not exceed.
        """
        wanted = max(math.ceil(self.count * percent / 100), 1)
        for place, count in sorted(self._buckets.items()):
            wanted -= count
            if wanted <= 0:
                middle: float = _LEAST * math.pow(_RATIO, place + 0.5)
                return min(max(middle, self.least), self.greatest)
        return None

    def buckets(self) -> Iterator[tuple[float, float, int]]:
        """Yields the lower and upper bound in seconds, and the count, of each non-empty bucket."""
        for place, count in sorted(self._buckets.items()):
            yield _LEAST * _RATIO**place, _LEAST * _RATIO ** (place + 1), count


class Timeline:
    """A count over time, in at most 240 cells. When they do not suffice, pairs of cells are
    merged.
    """

    def __init__(self) -> None:
        self.cell_seconds = _FIRST_CELL
        self.cells: list[int] = []

    def add(self, seconds: float, count: int) -> None:
        """Adds `count` at a time given in seconds since the start."""
        while (place := int(seconds / self.cell_seconds)) >= _CELLS:
            self.cells = [sum(self.cells[i : i + 2]) for i in range(0, len(self.cells), 2)]
            self.cell_seconds *= 2
        self.cells += [0] * (place + 1 - len(self.cells))
        self.cells[place] += count


@dataclass(frozen=True, slots=True)
class Goals:
    """The goals that make a request count as good. None means no goal.

    Attributes:
        ttft: the maximum number of seconds to the first token.
        itl: the maximum mean time between tokens of a request, in seconds.
    """

    ttft: float | None = None
    itl: float | None = None

    @property
    def are_set(self) -> bool:
        """Whether there are any goals."""
        return self.ttft is not None or self.itl is not None


@dataclass(slots=True)
class Tally:
    """All measurements. Times are in seconds of the clock used for `Progress`.

    Attributes:
        goals: the goals of a good request.
        ttft: from when each request was due to its first token.
        itl: from token to token. Tokens that arrive in one chunk share the wait before it.
        stall: the longest wait between two chunks, for each request with at least two.
        whole: from when each finished request was due to its end.
        late: from when each request was due until it was first sent.
        refused, failed, retried, ends: the number of requests, by reason.
        interrupted: the number of requests cancelled because the load was interrupted.
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
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    timeline: Timeline = field(default_factory=Timeline)
    began: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def ended(self) -> int:
        """The number of requests that have ended, except those interrupted with the load."""
        return self.done + self.refused.total() + self.failed.total()


class Progress:
    """Records the times of one request."""

    def __init__(self, tally: Tally, due: float) -> None:
        """Initializes the record of a request that is to be sent at `due`."""
        self._tally = tally
        self._due = due
        self._first: float | None = None
        self._last = 0.0
        self._tokens = 0
        self._stall = 0.0
        tally.started += 1

    def sent(self, now: float) -> None:
        """Records that the request was sent for the first time."""
        self._tally.late.add(now - self._due)

    def waits_for_room(self, refusal: HeadraceError) -> None:
        """Records that the server had no room for the request, so that it is sent again."""
        count(self._tally.retried, reason(refusal))

    def output(self, tokens: int, now: float) -> None:
        """Records that a chunk of output arrived."""
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
        """Records that the request finished successfully."""
        tally = self._tally
        tally.done += 1
        tally.whole.add(now - self._due)
        if self._tokens:
            tally.stall.add(self._stall)
        tally.prompt_tokens += result.usage.prompt_tokens
        tally.cached_tokens += result.usage.cached_tokens
        tally.draft_tokens += result.usage.draft_tokens
        tally.accepted_draft_tokens += result.usage.accepted_draft_tokens
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
    """The name that an error is counted under: the server's reason, or the status code."""
    return error.reason or error.code.name


def count(counter: Counter[str], name: str) -> None:
    """Counts a name. After 100 different names, new ones are counted as "other".

    The limit exists because a server could choose arbitrary names.
    """
    counter[name if name in counter or len(counter) < _MOST_NAMES else "other"] += 1
