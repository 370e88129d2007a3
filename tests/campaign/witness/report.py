"""A witness's report: waits by kind, errors, and the memory of the server's processes."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

WORST_KEPT = 8
"""The number of longest waits whose times are kept."""


class WitnessError(Exception):
    """The server cannot be witnessed; the message says why."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits of one kind, in seconds; all 0 if there were none.

    Attributes:
        count: the number of waits; an open wait is included with its duration so far.
        late_s: how late the witness's timer was during the worst wait. If this is a large part of
            the wait, the delay is due to the witness's machine rather than to the server.
    """

    count: int = 0
    worst_s: float = 0.0
    late_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of one process, in bytes.

    Attributes:
        start, now: at the beginning and the end of the window; `now` is 0 if the process is gone.
        peak: the highest in between, from samples, or from the kernel's high-water mark if it rose.
    """

    pid: int
    start: int
    now: int
    peak: int

    @property
    def growth(self) -> int:
        """The peak growth since the beginning of the window."""
        return self.peak - self.start

    @property
    def is_gone(self) -> bool:
        return self.now == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a witness saw in one window of time.

    Attributes:
        requests: the number of requests that ended with all their tokens.
        gaps: the waits between two messages with tokens of one request.
        first_tokens: the waits from a request's start to its first token, including refused tries.
        tokenize, health: the waits from a call to its answer.
        wrong_tokens: the number of tokens that differ from the undisturbed run or came out of
            order.
        lost_tokens: the number of tokens missing when an accepted request ended early.
        wrong_texts: the number of Tokenize answers that differ from the undisturbed run.
        not_serving: the number of health checks that failed or had another answer than SERVING.
        refusals: the number of requests, Tokenize calls and health checks that were refused or
            failed, by code and reason.
        memory: the memory of the watched processes, by name.
    """

    seconds: float
    tokens: int
    requests: int
    gaps: Waits
    first_tokens: Waits
    tokenize: Waits
    health: Waits
    wrong_tokens: int
    lost_tokens: int
    wrong_texts: int
    not_serving: int
    refusals: Mapping[str, int]
    ticks: int
    lag: Waits
    memory: Mapping[str, Memory]

    @property
    def losses(self) -> list[str]:
        """What a caller who behaves must never see; empty if the witness did not."""
        if not (self.wrong_tokens or self.lost_tokens or self.not_serving):
            return []
        return [
            f"the witness: {self.wrong_tokens} wrong and {self.lost_tokens} lost tokens, "
            f"{self.not_serving} times not SERVING"
        ]


class Timer:
    """Records how late the witness's event loop was, and when.

    Measurements during a lag are not due to the server alone.

    Attributes:
        ticks: how often the timer fired.
        lags: how late it fired each time, in seconds.
    """

    def __init__(self) -> None:
        self.ticks = 0
        self.lags = array("d")
        self._late: list[tuple[float, float]] = []

    def tick(self, now: float, lag: float, noted: float) -> None:
        """Record a tick at `now`. Lags of at least `noted` seconds are kept with their time."""
        self.ticks += 1
        self.lags.append(lag)
        if lag >= noted:
            self._late.append((now, lag))

    def latest_within(self, began: float, ended: float) -> float:
        """Return the longest lag that overlaps a period of time."""
        return max(
            (lag for at, lag in self._late if at >= began and at - lag <= ended), default=0.0
        )


class Watch:
    """Measures waits of one kind."""

    def __init__(self) -> None:
        self._seconds = array("d")
        self._worst: list[tuple[float, float]] = []  # length, when it began
        self._open: dict[object, float] = {}

    def begin(self, key: object, now: float) -> None:
        self._open[key] = now

    def end(self, key: object, now: float) -> None:
        began = self._open.pop(key)
        self._seconds.append(now - began)
        self._worst.append((now - began, began))
        if len(self._worst) > 2 * WORST_KEPT:
            self._worst = sorted(self._worst, reverse=True)[:WORST_KEPT]

    def drop(self, key: object) -> None:
        """Discard a wait. What was awaited did not come, which is counted elsewhere."""
        self._open.pop(key, None)

    def reset(self, now: float) -> None:
        """Begin a new window. Open waits are measured from now."""
        self._seconds = array("d")
        self._worst = []
        self._open = dict.fromkeys(self._open, now)

    def waits(self, now: float, timer: Timer) -> Waits:
        """Return the figures; an open wait counts with its duration so far."""
        running = [(now - began, began) for began in self._open.values()]
        seconds = [*self._seconds, *(length for length, _ in running)]
        if not seconds:
            return Waits()
        length, began = max([*self._worst, *running])
        return Waits(len(seconds), max(seconds), timer.latest_within(began, began + length))


def lag_figures(timer: Timer) -> Waits:
    worst_s = max(timer.lags, default=0.0)
    return Waits(len(timer.lags), worst_s, worst_s)
