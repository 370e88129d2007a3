"""A queue of lines before a file that may take them slowly, or not at all.

Whoever puts a line in neither waits nor fails: a full queue drops it, and so does a file that
cannot be written. What was dropped is counted, and said in its place as soon as something can be
written again.
"""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

MAX_LINES = 4096
MAX_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    """What was put in, and how many that were dropped stood before it."""

    data: bytes
    dropped: int


class LogQueue:
    """Lines on their way to a file. Its thread lives as long as the process."""

    def __init__(
        self,
        fd: int,
        notice: Callable[[int], str],
        *,
        max_lines: int = MAX_LINES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Start the thread.

        Args:
            fd: the file, which stays the caller's. It may be blocking or not.
            notice: makes the line that says how many were dropped.
            max_lines: how many entries may wait.
            max_bytes: how many bytes they may have together.
        """
        self._fd = fd
        self._notice = notice
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        # SimpleQueue.put may interrupt itself, as in a signal's handler; so may an RLock's holder.
        self._entries: SimpleQueue[_Entry | threading.Event] = SimpleQueue()
        self._lock = threading.RLock()
        self._lines = self._bytes = self._dropped = 0
        threading.Thread(target=self._run, name="log-writer", daemon=True).start()

    def put(self, line: str) -> None:
        """Have a line written, or dropped; it may consist of several that belong together. Callable
        from any thread, from signal handlers and from finalizers.
        """
        data = _encode(line)
        with self._lock:
            if self._lines >= self._max_lines or self._bytes + len(data) > self._max_bytes:
                self._dropped += 1
                return
            self._lines += 1
            self._bytes += len(data)
            entry, self._dropped = _Entry(data, self._dropped), 0
            self._entries.put(entry)

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was put in has been written, or dropped; False: it takes longer."""
        done = threading.Event()
        self._entries.put(done)
        return done.wait(timeout_s)

    def _run(self) -> None:
        lost = 0  # before what is written next
        while True:
            entry = self._entries.get()
            if isinstance(entry, threading.Event):
                entry.set()
                continue
            lost = self._write(entry.data, lost + entry.dropped)
            with self._lock:
                self._lines -= 1
                self._bytes -= len(entry.data)
                # Nobody may have anything to say for hours: what is missing is said at once. Only
                # where writing works, else this would go round for ever.
                tells = not lost and not self._lines and self._dropped
                if tells:
                    lost, self._dropped = self._dropped, 0
            if tells:
                lost = self._write(b"", lost) and lost

    def _write(self, data: bytes, lost: int) -> int:
        """Write something behind the notice of what was lost before; returns what is lost then."""
        if lost:
            data = _encode(self._notice(lost)) + data
        try:
            _write_all(self._fd, data)
        except OSError:
            return lost + 1
        return 0


def _encode(line: str) -> bytes:
    return line.encode("utf-8", "backslashreplace") + b"\n"


def _write_all(fd: int, data: bytes) -> None:
    """Write to a file, however long it takes.

    Raises:
        OSError: it cannot be written; a part may have been.
    """
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
            # Somebody who has it too made it non-blocking.
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()
