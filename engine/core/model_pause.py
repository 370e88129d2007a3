"""Lets threads stop the engine's loop between two steps so that they can use the model.

    visitor  with Pause: ask ─▶ waits until the loop is parked ─▶ the block ─▶ leave
    loop     step ─▶ park ───────────────── asleep ────────────────────────────▶ step

Several threads may be in the window at the same time; the loop continues when the last one has
left.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType

from typing_extensions import override

from engine.contract.errors import EngineUnavailableError, ModelChangedError
from engine.core.threads import await_on_own_thread

logger = logging.getLogger(__name__)


class ModelWindow:
    """The window between two steps. It uses the loop's lock and condition."""

    def __init__(self, changed: threading.Condition) -> None:
        """Create the window for a loop that is not running yet.

        Args:
            changed: the loop's condition, the only one on which the loop sleeps.
        """
        self._changed = changed
        self._process: int | None = None  # the one in which the loop runs
        self._visitors: Counter[int] = Counter()
        self._is_parked = False

    @property
    def is_wanted(self) -> bool:
        """Whether any thread is in the window, or waiting for the loop to park."""
        return bool(self._visitors)

    @property
    def is_entered_here(self) -> bool:
        """Whether the calling thread is in the window."""
        return threading.get_ident() in self._visitors

    @property
    def is_parked(self) -> bool:
        """Whether the loop is asleep because a thread is in the window."""
        return self._is_parked

    # ---- visitors ------------------------------------------------------------------------------

    def ask(self) -> int:
        """Ask the loop to park. Return a number to pass to `leave`.

        Raises:
            EngineUnavailableError: the loop is not running.
        """
        visitor = threading.get_ident()
        if self._process != os.getpid():  # before the lock, which a fork may have left locked
            raise EngineUnavailableError(
                "the engine is not running, so there is no step to wait for; start() it first"
            )
        with self._changed:
            self._visitors[visitor] += 1
            self._changed.notify_all()
        return visitor

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Wait until the loop is parked, or the visitor has left.

        Raises:
            EngineUnavailableError: the loop ended before it could park.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_parked or is_over() or self._process is None)
            if not self._is_parked and not is_over():
                raise EngineUnavailableError("the engine ended before the pause began")

    def leave(self, visitor: int) -> None:
        """Leave the window. May be called on a different thread from `ask`."""
        with self._changed:
            self._visitors[visitor] -= 1
            if not self._visitors[visitor]:
                del self._visitors[visitor]
            self._changed.notify_all()

    # ---- the loop; all with the condition held -------------------------------------------------

    def loop_started(self) -> None:
        """Record that the loop was started."""
        self._process = os.getpid()

    def loop_ended(self) -> None:
        """Record that the loop has ended, and end all waits for it."""
        self._process = None
        self._changed.notify_all()

    def park(self) -> None:
        """Sleep until no thread is in the window."""
        while self._visitors:
            self._is_parked = True
            self._changed.notify_all()
            self._changed.wait()
        self._is_parked = False


class Pause(AbstractContextManager[None], AbstractAsyncContextManager[None]):
    """One visit to the window: `with pause:`, or `async with pause:`, which does not block the
    event loop while waiting.

    Nothing is paused until the block is entered, so an unused object has no effect. The pause ends
    when the block ends, normally or with an error, when the wait is cancelled, or when an entered
    object is garbage-collected.
    """

    def __init__(self, window: ModelWindow, at_end: Callable[[], None]) -> None:
        """Create a visit.

        Args:
            at_end: called at the end of the block, while the loop is still parked.
        """
        self._window = window
        self._at_end = at_end
        self._entered = threading.Lock()  # held while somebody is in the block, or on the way there
        self._visitor: int | None = None
        self._process = 0

    def __enter__(self) -> None:
        """Wait until no step is running.

        Raises:
            EngineUnavailableError: the engine is not running, or ends before the window opens.
            RuntimeError: the object is already in use.
        """
        self._ask()
        try:
            self._wait()
        except BaseException:  # also if the wait is interrupted: the loop must not stay parked
            self._leave()
            raise

    @override
    async def __aenter__(self) -> None:
        self._ask()
        try:
            await await_on_own_thread(self._wait, "headrace-pause")
        except BaseException:  # also if the task is cancelled
            self._leave()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let the steps continue.

        Raises:
            ModelChangedError: modules of the model were replaced. If the block itself raised, this
                error is logged instead, so that the block's error propagates.
        """
        if self._process != os.getpid():
            return  # a fork within the block; no loop waits here
        try:
            self._at_end()
        except ModelChangedError as changed:
            if error is None:
                raise
            logger.warning("a pause ended with an error, and before that: %s", changed)
        finally:
            self._leave()

    @override
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, traceback)

    def __del__(self) -> None:
        if self._process == os.getpid():
            self._leave()

    def _ask(self) -> None:
        if not self._entered.acquire(blocking=False):
            raise RuntimeError("this pause is in use; call pause() for each block")
        try:
            self._visitor = self._window.ask()
            self._process = os.getpid()
        except BaseException:
            self._entered.release()
            raise

    def _wait(self) -> None:
        self._window.wait(lambda: self._visitor is None)

    def _leave(self) -> None:
        visitor, self._visitor = self._visitor, None
        if visitor is not None:
            self._window.leave(visitor)
            self._entered.release()
