"""Shows the progress of a download. On a terminal one line is redrawn; otherwise a line is printed
every few seconds (`engine.contract.startup`).
"""

from __future__ import annotations

import os
from collections.abc import Callable

from engine.contract.startup import Paced, Transfer

_USUAL_COLUMNS = 80
_CLEAR = "\x1b[K"


def sink_for(
    say: Callable[[str], None],
    is_terminal: bool,
    draw: Callable[[str], None],
    columns: Callable[[], int],
) -> Callable[[str], None]:
    """Return a sink for progress messages.

    Args:
        say: prints a line.
        is_terminal: whether `draw` can be used.
        draw: writes text without a newline.
        columns: returns the current width of the terminal.
    """
    return TransferBar(say, draw, columns) if is_terminal else Paced(say)


class TransferBar:
    """A sink that redraws `Transfer`s on one line. Not thread-safe."""

    def __init__(
        self, say: Callable[[str], None], draw: Callable[[str], None], columns: Callable[[], int]
    ) -> None:
        """Create the bar.

        Args:
            say: prints a line.
            draw: writes text without a newline.
            columns: returns the current width of the terminal.
        """
        self._say = say
        self._draw = draw
        self._columns = columns
        self._is_drawn = False

    def __call__(self, line: str) -> None:
        """Show a line."""
        if isinstance(line, Transfer):
            # The last column stays free: some terminals would go on to the next line.
            self._draw(f"\r{line.bar(self._columns() - 1)}{_CLEAR}")
            self._is_drawn = True
        if self._is_drawn and not (isinstance(line, Transfer) and line.done < line.total):
            self._draw("\n")
            self._is_drawn = False
        if not isinstance(line, Transfer):
            self._say(line)


def columns_of(fd: int) -> int:
    """Return how many columns the terminal of a file descriptor has."""
    try:
        return os.get_terminal_size(fd).columns or _USUAL_COLUMNS
    except OSError:
        return _USUAL_COLUMNS
