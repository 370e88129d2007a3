"""Deadlines of calls, measured by the client's clock and enforced whatever the server does."""

from __future__ import annotations

import math
import time

from headrace.errors import DeadlineExceededError, invalid_argument


class Deadline:
    """The deadline of a call that starts now.

    Args:
        seconds: the time limit; None for no limit.

    Raises:
        InvalidArgumentError: `seconds` is negative or not finite.
    """

    __slots__ = ("_end", "_seconds")

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and not (seconds >= 0 and math.isfinite(seconds)):
            raise invalid_argument("timeout", f"{seconds!r} is no length of time")
        self._seconds = seconds
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """Returns the number of seconds left, or None if there is no limit."""
        return None if self._seconds is None else max(self._end - time.monotonic(), 0.0)

    def within(self, seconds: float) -> float:
        """Returns `seconds`, or the time left if that is shorter."""
        return max(min(seconds, self._end - time.monotonic()), 0.0)

    def end(self) -> None:
        """Makes the deadline pass now."""
        self._end = 0.0

    def check(self, request_id: str = "") -> None:
        """Raises an error if the deadline has passed.

        Raises:
            DeadlineExceededError: the deadline has passed.
        """
        if time.monotonic() >= self._end:
            raise self.passed(request_id)

    def passed(self, request_id: str = "") -> DeadlineExceededError:
        """Returns the error for a call whose deadline has passed."""
        return timed_out(self._seconds or 0.0, request_id)


def timed_out(seconds: float, request_id: str = "") -> DeadlineExceededError:
    """Returns the error for a call that has not ended within `seconds`."""
    return DeadlineExceededError(
        f"the call has not ended within its timeout of {seconds:g} s", request_id=request_id
    )


def shortest(*limits: float | None) -> float | None:
    """Returns the shortest limit, ignoring None; None if no limit is given."""
    return min((limit for limit in limits if limit is not None), default=None)
