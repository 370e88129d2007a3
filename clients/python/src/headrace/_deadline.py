"""Until when a call may take, by this client's own clock: kept whatever the server does."""

from __future__ import annotations

import math
import time

from headrace.errors import DeadlineExceededError, invalid_argument


class Deadline:
    """The end of a call's time, which begins now.

    Args:
        seconds: how long it may take; None: no limit.

    Raises:
        InvalidArgumentError: that is no length of time.
    """

    __slots__ = ("_end", "_seconds")

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and not (seconds >= 0 and math.isfinite(seconds)):
            raise invalid_argument("timeout", f"{seconds!r} is no length of time")
        self._seconds = seconds
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """How many seconds are left; None: there is no limit."""
        return None if self._seconds is None else max(self._end - time.monotonic(), 0.0)

    def within(self, seconds: float) -> float:
        """A wait of so many seconds, or of what is left."""
        return max(min(seconds, self._end - time.monotonic()), 0.0)

    def end(self) -> None:
        """Ends the time now."""
        self._end = 0.0

    def check(self, request_id: str = "") -> None:
        """Does nothing before the end.

        Raises:
            DeadlineExceededError: the time is over.
        """
        if time.monotonic() >= self._end:
            raise self.passed(request_id)

    def passed(self, request_id: str = "") -> DeadlineExceededError:
        """The error of a call whose time is over."""
        return timed_out(self._seconds or 0.0, request_id)


def timed_out(seconds: float, request_id: str = "") -> DeadlineExceededError:
    """The error of what has not ended within so many seconds."""
    return DeadlineExceededError(
        f"the call has not ended within its timeout of {seconds:g} s", request_id=request_id
    )


def shortest(*limits: float | None) -> float | None:
    """The shortest of these limits that there are."""
    return min((limit for limit in limits if limit is not None), default=None)
