"""Splits the output to a pipe or to Python's sys.stderr into lines."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable

MAX_LINE_BYTES = 256 * 1024
"""Longer lines are split. The line of a record is always shorter."""

_CHUNK = 64 * 1024

Take = Callable[[str], None]


class LineReader:
    """Passes on the lines of a pipe, in a separate thread, until the pipe has no writer."""

    def __init__(self, fd: int, take: Take) -> None:
        """Start the thread.

        Args:
            fd: the pipe's read end, closed when the pipe has no writer.
            take: called with each line, without the line break. It must not raise.
        """
        self._fd = fd
        self._take = take
        self._thread = threading.Thread(target=self._run, name="log-reader", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until the pipe has no writer and all lines have been passed on."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        rest = b""
        with open(self._fd, "rb", buffering=0) as stream:
            while chunk := stream.read(_CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._hand_on(line)
                if len(rest) > MAX_LINE_BYTES:
                    self._hand_on(rest)
                    rest = b""
        self._hand_on(rest)

    def _hand_on(self, line: bytes) -> None:
        for start in range(0, len(line), MAX_LINE_BYTES):
            piece = line[start : start + MAX_LINE_BYTES]
            self._take(piece.decode("utf-8", "backslashreplace"))


class LineWriter(io.TextIOBase):
    """Replaces sys.stderr, and passes its output on line by line."""

    def __init__(self, take: Take) -> None:
        """Create a writer.

        Args:
            take: called with each line, without the line break. It must neither wait nor raise.
        """
        self._take = take
        self._rest = ""
        self._own = threading.RLock()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a property here
        """The encoding, as text files report it."""
        return "utf-8"

    def writable(self) -> bool:
        """Return True, as for any output stream."""
        return True

    def write(self, text: str) -> int:
        """Write text, and pass on its complete lines."""
        with self._own:
            *lines, rest = (self._rest + text).split("\n")
            if len(rest) > MAX_LINE_BYTES:
                lines, rest = [*lines, rest], ""
            self._rest = rest
        for line in lines:
            if line:
                self._take(line)
        return len(text)


def open_pipe() -> tuple[int, int]:
    """Create a pipe for `LineReader`, and return its two ends.

    Writers never wait, even if nothing reads from the pipe. Data that does not fit is lost.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writing, False)
    return reading, writing
