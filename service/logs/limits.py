"""Limits what is logged, and how often: clients that can cause a line must not be able to fill a
disk, or to crowd out other lines.

That a caller has gone is no line. gRPC reports as an error, with a traceback, that it could not
send to one whose going it notices a moment later.

Each place in the code that logs may log BURST lines at once and then one a second; the next line
tells how many were left out. The debug level is exempt, because its users want everything.
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
    """How much a place in the code may still log; `left` counts lines and grows with time."""

    left: float
    as_of: float
    skipped: int = 0


class LogLimits:
    """Counts lines by the place that logs them. Not safe to use from several threads at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._places: dict[tuple[str | None, str, int], _Place] = {}

    def admit(self, record: logging.LogRecord) -> int | None:
        """Check whether a record may be logged. None: no; otherwise how many from the same place
        were left out since the last one.
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
    """Whether gRPC tells of a batch of operations that failed: on a server's side that is so once
    the call is over.
    """
    kind = record.exc_info[0] if record.exc_info else None
    name = record.name.partition(".")[0]
    return name == "grpc" and kind is not None and kind.__name__ == "ExecuteBatchError"
