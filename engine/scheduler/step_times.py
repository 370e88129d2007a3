"""A lower bound on the duration of steps, from recently measured ones."""

from __future__ import annotations

from collections import deque

_REMEMBERED = 64


class StepTimes:
    """The durations of the last 64 steps.

    The estimate is optimistic: it is more likely to keep a request that cannot finish in time than
    to end one that could.
    """

    def __init__(self, max_batch_tokens: int) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._all: deque[float] = deque(maxlen=_REMEMBERED)
        self._full: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step."""
        self._all.append(seconds)
        if num_tokens >= self._max_batch_tokens:
            self._full.append(seconds)

    def at_least(self, num_tokens: int) -> float:
        """Return the least time, in seconds, to compute this many tokens of one request; 0 before
        any step was measured.

        A request that is alone in every step needs ⌊tokens / budget⌋ full steps and one for the
        rest. Full steps are assumed to be as fast as the fastest remembered full step, the last one
        as fast as the fastest of all.
        """
        if not self._all:
            return 0.0
        fastest = min(self._all)
        full_steps, rest = divmod(num_tokens, self._max_batch_tokens)
        fastest_full = min(self._full, default=fastest)
        return full_steps * fastest_full + (fastest if rest else 0.0)
