"""Takes over what the process says, until its end."""

from __future__ import annotations

import faulthandler
import logging
import os
from contextlib import ExitStack, suppress
from types import TracebackType

from engine.logs import hooks, records
from engine.logs.lines import LineReader, open_pipe
from engine.logs.queue import LogQueue
from service.logs.form import Form, form
from service.logs.limits import Limits

_STDERR = 2
_FLUSH_S = 1.0
"""How long the end of the process waits for stderr to take what is left."""
_LAST_WORDS_S = 0.2


class Output:
    """What the process says: `say` and, from `__enter__` to `__exit__`, the root logger, sys.stderr
    and the file descriptor 2. Nothing of it raises, or waits.
    """

    def __init__(self, log_format: str, level: str) -> None:
        """Prepare.

        Args:
            log_format: one of LOG_FORMATS.
            level: debug, info, warning or error.
        """
        self._form = form(log_format)
        self._level = level.upper()
        # What stands at 2 is exchanged below: whatever wants to reach stderr itself goes here.
        self._stderr = os.dup(_STDERR)
        self._queue = LogQueue(
            self._stderr, lambda count: self._form.record(records.dropped(count), 0)
        )
        self._undo = ExitStack()

    def say(self, text: str) -> None:
        """Say something to whoever started the process: a line, or several that belong together."""
        self._queue.put(self._form.said(text))

    def __enter__(self) -> Output:
        """Begin."""
        root = logging.getLogger()
        handler = _Handler(self._queue, self._form)
        self._undo.callback(root.setLevel, root.level)
        self._undo.callback(root.removeHandler, handler)
        root.addHandler(handler)
        root.setLevel(self._level)
        self._capture()
        self._undo.push(hooks.install(_log_foreign))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End."""
        self.close()

    def close(self) -> None:
        """End, within about a second. What is said later is written if the process lives on."""
        self._undo.close()
        self._queue.flush(_FLUSH_S)

    def _capture(self) -> None:
        """Put a pipe of our own in the place of stderr, which native code writes to. It never waits
        there, and what it says is bounded like everything else.
        """
        reading, writing = open_pipe()
        os.dup2(writing, _STDERR)
        os.close(writing)
        reader = LineReader(reading, _log_foreign)

        def restore() -> None:
            os.dup2(self._stderr, _STDERR)
            reader.join(_LAST_WORDS_S)

        self._undo.callback(restore)
        # Nobody would read the pipe after a crash. This way of its own into the file does not wait
        # either; sockets, and files of other users, have none.
        with suppress(OSError):
            if faulthandler.is_enabled():  # somebody wants it elsewhere
                return
            path = f"/proc/self/fd/{self._stderr}"
            crash = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
            faulthandler.enable(crash)
            self._undo.callback(os.close, crash)
            self._undo.callback(faulthandler.disable)


class _Handler(logging.Handler):
    """Puts log records in the queue, as far as they may be."""

    def __init__(self, queue: LogQueue, used: Form) -> None:
        super().__init__()
        self._queue = queue
        self._form = used
        self._limits = Limits()

    def emit(self, record: logging.LogRecord) -> None:
        """Put one in."""
        try:
            skipped = self._limits.admit(record)
            if skipped is not None:
                self._queue.put(self._form.record(record, skipped))
        except Exception:
            self._queue.put(self._form.said(f"a log record of {record.name} cannot be formatted"))


def _log_foreign(line: str) -> None:
    """Log what was written past logging."""
    record = records.foreign(line, "MainProcess")
    logging.getLogger(record.name).handle(record)


def open_standard_files() -> None:
    """Open those of the files 0, 1 and 2 that the process was started without: the next file that
    is opened would be taken for one of them, a caller's connection for stderr.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)
