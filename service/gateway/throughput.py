"""Computes the engine's token throughput from readings of its counter."""

from __future__ import annotations

WINDOW_S = 2.0
"""The shortest time to average over."""


class Throughput:
    """Tokens per second since the previous reading, or over `WINDOW_S` if readings come faster."""

    def __init__(self) -> None:
        self._start: tuple[float, int] | None = None
        self._rate = 0.0

    def of(self, moment: float, tokens: int) -> float:
        """Return the throughput at a given time.

        Args:
            moment: monotonic seconds.
            tokens: how many tokens were generated since the engine started. A smaller number than
                before means that the engine was restarted.
        """
        if self._start is None or tokens < self._start[1]:
            self._start = (moment, tokens)
            self._rate = 0.0
        since, before = self._start
        if moment - since >= WINDOW_S:
            self._rate = (tokens - before) / (moment - since)
            self._start = (moment, tokens)
        return self._rate
