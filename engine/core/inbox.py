"""Commands from other threads for the engine's loop, which carries them out in order between two
steps.

    any thread      put, call ──▶ inbox
    engine thread   inbox ──carry_out──▶ commands, answers

The inbox has no lock: the loop's condition guards `put`, `call` and `close`. `carry_out` takes
commands from the other end without the lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial


class Inbox:
    """The pending commands, and the futures of those whose callers wait for a result."""

    def __init__(self) -> None:
        self._commands: deque[Callable[[], object]] = deque()
        self._calls: set[Future[None]] = set()

    def __bool__(self) -> bool:
        """Whether any command is waiting."""
        return bool(self._commands)

    def put(self, command: Callable[[], object]) -> None:
        """Add a command whose caller does not wait. The loop handles its exceptions."""
        self._commands.append(command)

    def call(self, action: Callable[[], None]) -> Future[None]:
        """Add a command. The returned future completes, with the command's error if any, once it
        was carried out.
        """
        call: Future[None] = Future()
        self._calls.add(call)
        self._commands.append(partial(self._answer, call, action))
        return call

    def carry_out(self) -> None:
        """Carry out the commands present now. Commands that arrive meanwhile run after the next
        step.
        """
        for _ in range(len(self._commands)):
            self._commands.popleft()()

    def close(self, error: Exception) -> None:
        """Drop the commands and fail their futures with `error`."""
        self._commands.clear()
        for call in self._calls:
            if call.set_running_or_notify_cancel():
                call.set_exception(error)
        self._calls.clear()

    def _answer(self, call: Future[None], action: Callable[[], None]) -> None:
        # The caller may have stopped waiting, which cancels the future; the command is still
        # carried out.
        is_awaited = call.set_running_or_notify_cancel()
        try:
            action()
        except Exception as error:  # handed over, not hidden: the future raises it
            if not is_awaited:
                raise
            call.set_exception(error)
        else:
            if is_awaited:
                call.set_result(None)
        finally:
            self._calls.discard(call)
