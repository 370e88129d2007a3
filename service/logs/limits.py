"""Limits what is logged and how often, so that clients cannot fill a disk or crowd out other lines.

A client that disconnects is not logged. When gRPC fails to send to a client that has just
disconnected, it logs an error with a traceback, which is dropped.

Each source location may log BURST lines in a burst, and then one per second. The next line reports
how many were left out. Debug records are exempt because their users want everything.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

BURST = 100
PER_SECOND = 1.0
_MAX_PLACES = 4096


@dataclass(slots=True)
class _Place:
    """The log budget of one source location; `left` counts lines and grows with time."""

    left: float
    as_of: float
    skipped: int = 0


class LogLimits:
    """Counts lines by the source location that logs them. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the limits. `clock` returns monotonic seconds."""
        self._clock = clock
        self._places: dict[tuple[str | None, str, int], _Place] = {}

    def admit(self, record: logging.LogRecord) -> int | None:
        """Check whether a record may be logged.

        Returns:
            None if the record may not be logged. Otherwise, how many records from the same source
            location were left out since the last one that was logged.
        """
        if record.levelno < logging.INFO:
            return 0
        if _tells_that_a_caller_has_gone(record):
            return None
        now = self._clock()
        key = record.processName, record.name, record.lineno
        place = self._places.get(key)
        if place is None:
            if len(self._places) >= _MAX_PLACES:  # more than this code has
                self._places.clear()
            place = self._places[key] = _Place(BURST, now)
        place.left = min(BURST, place.left + (now - place.as_of) * PER_SECOND)
        place.as_of = now
        if place.left < 1:
            place.skipped += 1
            return None
        place.left -= 1
        skipped, place.skipped = place.skipped, 0
        return skipped


def _tells_that_a_caller_has_gone(record: logging.LogRecord) -> bool:
    """Whether gRPC reports a failed batch of operations. On a server, this happens only after the
    call is over.
    """
    kind = record.exc_info[0] if record.exc_info else None
    name = record.name.partition(".")[0]
    return name == "grpc" and kind is not None and kind.__name__ == "ExecuteBatchError"
