"""A queue of lines for a file that may be slow or block.

Adding a line neither waits nor fails. If the queue is full or the file cannot be written, the line
is dropped. Dropped lines are counted, and the count is written in their place as soon as writing
works again.
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
    """A line, and the number of lines dropped before it."""

    data: bytes
    dropped: int


class LogQueue:
    """A queue of lines to be written to a file. Its thread lives as long as the process."""

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
            fd: the file, blocking or not. The caller keeps ownership.
            notice: returns the line that says how many lines were dropped.
            max_lines: the maximum number of entries in the queue.
            max_bytes: the maximum number of bytes in the queue.
        """
        self._fd = fd
        self._notice = notice
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        # SimpleQueue.put is reentrant, as signal handlers need; so is an RLock.
        self._entries: SimpleQueue[_Entry | threading.Event] = SimpleQueue()
        self._lock = threading.RLock()
        self._lines = self._bytes = self._dropped = 0
        threading.Thread(target=self._run, name="log-writer", daemon=True).start()

    def put(self, line: str, end: str = "\n") -> None:
        """Add a line to be written or dropped, followed by `end`.

        It may consist of several lines that belong together. May be called from any thread, from
        signal handlers and from finalizers.
        """
        data = _encode(line, end)
        with self._lock:
            if self._lines >= self._max_lines or self._bytes + len(data) > self._max_bytes:
                self._dropped += 1
                return
            self._lines += 1
            self._bytes += len(data)
            entry, self._dropped = _Entry(data, self._dropped), 0
            self._entries.put(entry)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything in the queue has been written or dropped.

        Returns False if the time ran out first.
        """
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
                # The next line may come hours later, so the number of missing lines is written at
                # once. Only if writing works; otherwise this would loop for ever.
                tells = not lost and not self._lines and self._dropped
                if tells:
                    lost, self._dropped = self._dropped, 0
            if tells:
                lost = self._write(b"", lost) and lost

    def _write(self, data: bytes, lost: int) -> int:
        """Write the notice of earlier losses, then the data. Returns how many lines are lost
        now.
        """
        if lost:
            data = _encode(self._notice(lost)) + data
        try:
            _write_all(self._fd, data)
        except OSError:
            return lost + 1
        return 0


def _encode(line: str, end: str = "\n") -> bytes:
    return (line + end).encode("utf-8", "backslashreplace")


def _write_all(fd: int, data: bytes) -> None:
    """Write all data to a file, however long it takes.

    Raises:
        OSError: writing failed; some of the data may have been written.
    """
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
            # Another process that shares the file made it non-blocking.
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()
