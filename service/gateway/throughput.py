"""How many tokens a second the engine generates, from its counter at the times it was read."""

from __future__ import annotations

WINDOW_S = 2.0
"""The shortest time that is averaged over."""


class Throughput:
    """Tokens a second since the reading before, or over `WINDOW_S` if readings come faster."""

    def __init__(self) -> None:
        self._start: tuple[float, int] | None = None
        self._rate = 0.0

    def of(self, moment: float, tokens: int) -> float:
        """The rate at a moment.

        Args:
            moment: monotonic seconds.
            tokens: how many were generated since the engine's start; less than before if it was
                started again.
        """
        if self._start is None or tokens < self._start[1]:
            self._start = (moment, tokens)
            self._rate = 0.0
        since, before = self._start
        if moment - since >= WINDOW_S:
            self._rate = (tokens - before) / (moment - since)
            self._start = (moment, tokens)
        return self._rate
