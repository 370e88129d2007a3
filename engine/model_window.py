"""Lets threads stop the engine's loop between two of its steps, for their own work on the model.

    visitor  enter ─▶ waits until the loop is parked ─▶ the window ─▶ leave
    loop     step ─▶ park ─────────────── asleep ─────────────────────▶ step

Several threads may be in the window at the same time; the loop goes on when the last one has left.
"""

from __future__ import annotations

import threading
from collections import Counter

from engine.errors import EngineUnavailableError


class ModelWindow:
    """The window between two steps. It uses the loop's lock and condition."""

    def __init__(self, changed: threading.Condition) -> None:
        """Create the window for a loop that does not run yet.

        Args:
            changed: the loop's condition; the loop sleeps only on this one.
        """
        self._changed = changed
        self._visitors: Counter[int] = Counter()
        self._is_running = False
        self._is_parked = False

    @property
    def is_wanted(self) -> bool:
        """Whether somebody is in the window, or waits for the loop to park."""
        return bool(self._visitors)

    @property
    def is_entered_here(self) -> bool:
        """Whether the calling thread is in the window."""
        return threading.get_ident() in self._visitors

    # ---- visitors ------------------------------------------------------------------------------

    def enter(self) -> int:
        """Wait until the loop is parked, and keep it parked. Returns a number to pass to `leave`.

        Raises:
            EngineUnavailableError: the loop does not run, or ended before it could park.
        """
        visitor = threading.get_ident()
        with self._changed:
            if not self._is_running:
                raise EngineUnavailableError(
                    "the engine is not running, so there is no step to wait for; start() it first"
                )
            self._visitors[visitor] += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._is_parked or not self._is_running)
                if not self._is_parked:
                    raise EngineUnavailableError("the engine ended before the window opened")
            except BaseException:  # also if the wait is interrupted: the loop must not stay parked
                self._drop(visitor)
                raise
        return visitor

    def leave(self, visitor: int) -> None:
        """Leave the window. May be called on another thread than `enter`."""
        with self._changed:
            self._drop(visitor)

    def _drop(self, visitor: int) -> None:
        self._visitors[visitor] -= 1
        if not self._visitors[visitor]:
            del self._visitors[visitor]
        self._changed.notify_all()

    # ---- the loop; all with the condition held -------------------------------------------------

    def loop_started(self) -> None:
        """Note that the loop was started."""
        self._is_running = True

    def loop_ended(self) -> None:
        """Note that the loop has ended, and end all waits for it."""
        self._is_running = False
        self._changed.notify_all()

    def park(self) -> None:
        """Sleep until nobody is in the window."""
        while self._visitors:
            self._is_parked = True
            self._changed.notify_all()
            self._changed.wait()
        self._is_parked = False
