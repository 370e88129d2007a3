"""Redirects all output of the process until it ends."""

from __future__ import annotations

import faulthandler
import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from types import TracebackType

from engine.logs import hooks, records
from engine.logs.levels import set_levels
from engine.logs.lines import LineReader, open_pipe
from engine.logs.queue import LogQueue
from service.logs.bar import columns_of
from service.logs.form import Console, Form, form
from service.logs.limits import LogLimits

_STDERR = 2
_FLUSH_S = 1.0
"""How long the process waits at exit for stderr to accept the remaining output."""
_LAST_WORDS_S = 0.2


class Output:
    """The output of the process: `say`, and from `__enter__` to `__exit__` the root logger,
    sys.stderr and file descriptor 2. None of these raises or blocks.

    Attributes:
        began: when the object was created, in monotonic seconds. Start-up times are measured from
            it.
    """

    def __init__(self, log_format: str, level: str, level_of: Sequence[str] = ()) -> None:
        """Prepare the output without redirecting anything yet.

        Args:
            log_format: one of LOG_FORMATS.
            level: debug, info, warning or error.
            level_of: levels of modules, see `engine.logs.levels`.
        """
        self.began = time.monotonic()
        self._form = form(log_format)
        self._level = level.upper()
        self._level_of = level_of
        # File descriptor 2 is replaced below; this one reaches stderr itself.
        self._stderr = os.dup(_STDERR)
        self._queue = LogQueue(
            self._stderr, lambda count: self._form.record(records.dropped(count), 0)
        )
        self._undo = ExitStack()

    def say(self, text: str) -> None:
        """Print a message for the user who started the process: one line, or several that belong
        together.
        """
        self._queue.put(self._form.said(text))

    def draw(self, text: str) -> None:
        """Write to a terminal without a newline. `text` must be the server's own."""
        self._queue.put(text, end="")

    @property
    def is_terminal(self) -> bool:
        """Whether the output is a terminal, where lines can be redrawn."""
        return isinstance(self._form, Console) and os.isatty(self._stderr)

    @property
    def columns(self) -> int:
        """Return how many columns the terminal has."""
        return columns_of(self._stderr)

    def __enter__(self) -> Output:
        """Start redirecting output."""
        root = logging.getLogger()
        handler = _Handler(self._queue, self._form)
        self._undo.callback(root.setLevel, root.level)
        self._undo.callback(root.removeHandler, handler)
        root.addHandler(handler)
        root.setLevel(self._level)
        for name, before in set_levels(self._level_of).items():
            self._undo.callback(logging.getLogger(name).setLevel, before)
        self._capture()
        self._undo.push(hooks.install(_log_foreign))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop redirecting output."""
        self.close()

    def close(self) -> None:
        """Finish within about a second. Later output is still written if the process keeps
        running.
        """
        self._undo.close()
        self._queue.flush(_FLUSH_S)

    def _capture(self) -> None:
        """Replace stderr, to which native code writes, by our own pipe. Native code then never
        blocks, and its output is limited like all other output.
        """
        reading, writing = open_pipe()
        os.dup2(writing, _STDERR)
        os.close(writing)
        reader = LineReader(reading, _log_foreign)

        def restore() -> None:
            os.dup2(self._stderr, _STDERR)
            reader.join(_LAST_WORDS_S)

        self._undo.callback(restore)
        # Nobody would read the pipe after a crash, so crash output goes to the file directly,
        # through a separate descriptor that does not block either; sockets, and files of other
        # users, have none.
        with suppress(OSError):
            if faulthandler.is_enabled():  # somebody wants it elsewhere
                return
            path = f"/proc/self/fd/{self._stderr}"
            crash = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
            faulthandler.enable(crash)
            self._undo.callback(os.close, crash)
            self._undo.callback(faulthandler.disable)


class _Handler(logging.Handler):
    """Puts log records in the queue, within the limits."""

    def __init__(self, queue: LogQueue, used: Form) -> None:
        super().__init__()
        self._queue = queue
        self._form = used
        self._limits = LogLimits()

    def emit(self, record: logging.LogRecord) -> None:
        """Put one record in the queue."""
        try:
            skipped = self._limits.admit(record)
            if skipped is not None:
                self._queue.put(self._form.record(record, skipped))
        except Exception:
            self._queue.put(self._form.said(f"a log record of {record.name} cannot be formatted"))


def _log_foreign(line: str) -> None:
    """Log a line that did not come through logging."""
    record = records.foreign(line, "MainProcess")
    logging.getLogger(record.name).handle(record)


def open_standard_files() -> None:
    """Open any of the files 0, 1 and 2 that are closed when the process starts. Otherwise the next
    opened file, such as a caller's connection, would be used as stderr.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)
