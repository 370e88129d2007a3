"""Makes lines of what is written to a stream: to a pipe, or to Python's sys.stderr."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable

MAX_LINE_BYTES = 256 * 1024
"""A longer line is cut in pieces; a record's line is never as long."""

_CHUNK = 64 * 1024

Take = Callable[[str], None]


class LineReader:
    """Hands on the lines of a pipe, in a thread of its own, until nobody can write to it."""

    def __init__(self, fd: int, take: Take) -> None:
        """Start the thread.

        Args:
            fd: the pipe's end for reading; closed at its end.
            take: called with each line, without its end; raises nothing.
        """
        self._fd = fd
        self._take = take
        self._thread = threading.Thread(target=self._run, name="log-reader", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end."""
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
    """Stands in for sys.stderr: what is written there is handed on by lines."""

    def __init__(self, take: Take) -> None:
        """`take`: called with each line, without its end; neither waits nor raises."""
        self._take = take
        self._rest = ""
        self._own = threading.RLock()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a property here
        """As a file would say it."""
        return "utf-8"

    def writable(self) -> bool:
        """It is there to be written to."""
        return True

    def write(self, text: str) -> int:
        """Take text."""
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
    """A pipe for `LineReader`: its two ends. Who writes to it never waits, even where nothing that
    could read it runs: what a full pipe cannot take is lost.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writing, False)
    return reading, writing
