"""Lets threads hold the engine's loop between two of its steps.

    holder   acquire ─▶ waits until the loop is parked ─▶ the window ─▶ release
    loop     step ─▶ park ─────────────── asleep ──────────────────────────▶ step

Several threads may hold at the same time; the loop goes on when the last one has left.
"""

from __future__ import annotations

import threading
from collections import Counter

from engine.errors import EngineUnavailableError


class PauseGate:
    """The gate between two steps. It shares the lock and the wake-ups of the loop that it holds."""

    def __init__(self, changed: threading.Condition) -> None:
        """Make a gate of a loop that does not run yet.

        Args:
            changed: the loop's condition; the loop sleeps on nothing else.
        """
        self._changed = changed
        self._holders: Counter[int] = Counter()
        self._is_running = False
        self._is_parked = False

    @property
    def is_wanted(self) -> bool:
        """Whether somebody holds the loop, or waits for it to park."""
        return bool(self._holders)

    @property
    def is_held_here(self) -> bool:
        """Whether the calling thread holds the loop."""
        return threading.get_ident() in self._holders

    # ---- holders -------------------------------------------------------------------------------

    def acquire(self) -> int:
        """Wait until the loop is parked, and keep it so. Returns what `release` takes.

        Raises:
            EngineUnavailableError: the loop does not run, or ended before it could park.
        """
        holder = threading.get_ident()
        with self._changed:
            if not self._is_running:
                raise EngineUnavailableError(
                    "the engine is not running, so there is nothing to pause; start() it first"
                )
            self._holders[holder] += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._is_parked or not self._is_running)
                if not self._is_parked:
                    raise EngineUnavailableError("the engine ended before it could be paused")
            except BaseException:  # also an interrupt of the wait: the loop must not stay held
                self._drop(holder)
                raise
        return holder

    def release(self, holder: int) -> None:
        """Leave the window. May be called on another thread than `acquire`."""
        with self._changed:
            self._drop(holder)

    def _drop(self, holder: int) -> None:
        self._holders[holder] -= 1
        if not self._holders[holder]:
            del self._holders[holder]
        self._changed.notify_all()

    # ---- the loop; all with the condition held -------------------------------------------------

    def opened(self) -> None:
        """The loop was started."""
        self._is_running = True

    def closed(self) -> None:
        """The loop has ended; nobody waits for it any more."""
        self._is_running = False
        self._changed.notify_all()

    def park(self) -> None:
        """Sleep until nobody holds the loop."""
        while self._holders:
            self._is_parked = True
            self._changed.notify_all()
            self._changed.wait()
        self._is_parked = False
