"""What a witness tells: how long it waited for what, what was wrong, and the servers' memory."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.measures import quantile

WORST_KEPT = 8
"""Of so many of the longest waits it is known when they were."""


class WitnessError(Exception):
    """The witness cannot be one; the message says why."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits of one kind, in seconds; all 0 where there was none.

    Attributes:
        count: how many there were; one that is not over counts with what it has come to.
        late_s: how late the witness' own timer was within the worst of them: a wait of which this
            is a large part says more of the witness' machine than of the server.
    """

    count: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0
    worst_s: float = 0.0
    late_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of one process, in bytes.

    Attributes:
        pid: the process.
        start, now: at the window's beginning, and at its end; now is 0 where the process has gone.
        peak: the most in between, by samples, or by the kernel's high-water mark where it rose.
    """

    pid: int
    start: int
    now: int
    peak: int

    @property
    def growth(self) -> int:
        """The most beyond what there was at the beginning."""
        return self.peak - self.start

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self.now == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a witness saw in one window of time.

    Attributes:
        seconds: how long the window was.
        tokens: tokens that came.
        requests: requests that ended with all their tokens.
        gaps: between two messages with tokens of one request.
        first_tokens: from a request's start, or a first try that was refused, to its first token.
        tokenize, health: from a call to its answer.
        wrong_tokens: tokens that were not those of the undisturbed run, or came out of order.
        lost_tokens: tokens that were still to come when an accepted request ended early.
        wrong_texts: answers of Tokenize that were not those of the undisturbed run.
        not_serving: health checks that were answered with anything else, or failed.
        refusals: how often a request, a Tokenize or a health check was refused, or failed, by code
            and reason.
        ticks: how often the witness' timer fired.
        lag: how late it fired each time.
        memory: of the processes that are watched, by the names that they were given.
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

    def as_json(self) -> dict[str, Any]:
        """As JSON can say it."""
        return asdict(self)

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Report:
        """What `as_json` gave."""
        waits = {
            name: Waits(**found[name])
            for name in ("gaps", "first_tokens", "tokenize", "health", "lag")
        }
        memory = {name: Memory(**one) for name, one in found["memory"].items()}
        return Report(**{**found, **waits, "memory": memory})


class Timer:
    """How late the witness' own event loop was, and when: what was measured then is not the
    server's doing alone.

    Attributes:
        ticks: how often it fired.
        lags: how late each time, in seconds.
    """

    def __init__(self) -> None:
        self.ticks = 0
        self.lags = array("d")
        self._late: list[tuple[float, float]] = []

    def tick(self, now: float, lag: float, noted: float) -> None:
        """It fired at `now`; lags of at least `noted` seconds are kept with their time."""
        self.ticks += 1
        self.lags.append(lag)
        if lag >= noted:
            self._late.append((now, lag))

    def latest_within(self, began: float, ended: float) -> float:
        """The longest lag that lies within a time, at least in part."""
        return max(
            (lag for at, lag in self._late if at >= began and at - lag <= ended), default=0.0
        )


class Watch:
    """Waits of one kind, as they end."""

    def __init__(self) -> None:
        self._seconds = array("d")
        self._worst: list[tuple[float, float]] = []  # length, when it began
        self._open: dict[object, float] = {}

    def begin(self, key: object, now: float) -> None:
        """A wait begins."""
        self._open[key] = now

    def end(self, key: object, now: float) -> None:
        """It is over."""
        began = self._open.pop(key)
        self._seconds.append(now - began)
        self._worst.append((now - began, began))
        if len(self._worst) > 2 * WORST_KEPT:
            self._worst = sorted(self._worst, reverse=True)[:WORST_KEPT]

    def drop(self, key: object) -> None:
        """It is not counted: what was waited for did not come, and that is counted elsewhere."""
        self._open.pop(key, None)

    def reset(self, now: float) -> None:
        """A new window: waits that are not over go on from now."""
        self._seconds = array("d")
        self._worst = []
        self._open = dict.fromkeys(self._open, now)

    def waits(self, now: float, timer: Timer) -> Waits:
        """The figures; what is not over counts with what it has come to."""
        running = [(now - began, began) for began in self._open.values()]
        seconds = [*self._seconds, *(length for length, _ in running)]
        if not seconds:
            return Waits()
        length, began = max([*self._worst, *running])
        return _figures(seconds, timer.latest_within(began, began + length))


def lag_figures(timer: Timer) -> Waits:
    """The timer's own lags as waits."""
    return _figures(timer.lags, max(timer.lags)) if timer.lags else Waits()


def _figures(seconds: Sequence[float], late_s: float) -> Waits:
    return Waits(len(seconds), quantile(seconds, 50), quantile(seconds, 99), max(seconds), late_s)
