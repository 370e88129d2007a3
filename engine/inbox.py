"""What other threads ask of the engine's loop: commands, carried out between two steps, in order.

    any thread      put, call ──▶ inbox
    engine thread   inbox ──carry_out──▶ commands, answers

It has no lock of its own: the loop's condition guards `put`, `call` and `close`. `carry_out` takes
from the other end without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial


class Inbox:
    """The commands that were not carried out yet, and who waits for an answer."""

    def __init__(self) -> None:
        self._commands: deque[Callable[[], object]] = deque()
        self._calls: set[Future[None]] = set()

    def __bool__(self) -> bool:
        """Whether there is a command."""
        return bool(self._commands)

    def put(self, command: Callable[[], object]) -> None:
        """Add a command. Nobody waits for it; what it raises, the loop has to deal with."""
        self._commands.append(command)

    def call(self, action: Callable[[], None]) -> Future[None]:
        """Add a command whose end, or error, somebody waits for."""
        call: Future[None] = Future()
        self._calls.add(call)
        self._commands.append(partial(self._answer, call, action))
        return call

    def carry_out(self) -> None:
        """Carry out what is here now; not what comes meanwhile: steps must not wait for it."""
        for _ in range(len(self._commands)):
            self._commands.popleft()()

    def close(self, error: Exception) -> None:
        """Drop the commands; who waits for one gets the error."""
        self._commands.clear()
        for call in self._calls:
            if call.set_running_or_notify_cancel():
                call.set_exception(error)
        self._calls.clear()

    def _answer(self, call: Future[None], action: Callable[[], None]) -> None:
        # Whoever asked may have stopped waiting, which cancels the call; it is done all the same.
        is_awaited = call.set_running_or_notify_cancel()
        try:
            action()
        except Exception as error:  # handed over, not hidden: the caller raises it
            if not is_awaited:
                raise
            call.set_exception(error)
        else:
            if is_awaited:
                call.set_result(None)
        finally:
            self._calls.discard(call)
