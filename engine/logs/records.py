"""Encodes log records of the engine's process for the server's process, which reads its stderr.

Each record is a line that begins with a record separator, as in a JSON text sequence (RFC 7464).
Any other line did not come through logging, but from native code or from a program that died.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from engine.logs.queue import LogQueue

MAX_MESSAGE = 4096
MAX_TRACEBACK = 16 * 1024
"""The maximum length of a traceback, in characters. The middle of a longer one is cut out."""

STDERR_LOGGER = "stderr"
"""The logger name for lines that did not come through logging."""

_MARK = "\x1e"
_formatter = logging.Formatter()


class _Wire(msgspec.Struct, array_like=True):
    created: float
    level: int
    name: str
    line: int
    message: str
    traceback: str  # empty: none


class RecordHandler(logging.Handler):
    """Puts records in a queue, as lines for the process that reads them."""

    FLUSH_S = 1.0
    """How many seconds the process waits for the file when it ends."""

    def __init__(self, queue: LogQueue) -> None:
        super().__init__()
        self._queue = queue

    def emit(self, record: logging.LogRecord) -> None:
        """Put a record in the queue."""
        try:
            self._queue.put(encode(record))
        except Exception:
            self._queue.put(f"a log record of {record.name} cannot be formatted")

    def flush(self) -> None:
        """Wait until everything is written, but no longer than FLUSH_S."""
        self._queue.flush(self.FLUSH_S)


def encode(record: logging.LogRecord) -> str:
    """Encode a record as one line."""
    text = ""
    if record.exc_info:
        text = cut(_formatter.formatException(record.exc_info), MAX_TRACEBACK)
    wire = _Wire(
        record.created,
        record.levelno,
        record.name,
        record.lineno,
        _sendable(cut(record.getMessage(), MAX_MESSAGE)),
        _sendable(text),
    )
    return _MARK + msgspec.json.encode(wire).decode()


def decode(line: str, process: str) -> logging.LogRecord:
    """Decode the record in a line; for any other line, make a record of it.

    Args:
        line: a line that the process wrote.
        process: its name, for the log.
    """
    wire = None
    if line.startswith(_MARK):
        try:
            wire = msgspec.json.decode(line[1:], type=_Wire)
        except (msgspec.DecodeError, UnicodeError):
            line = line[1:]
    if wire is None:
        return foreign(line, process)
    record = logging.LogRecord(wire.name, wire.level, "", wire.line, "%s", (wire.message,), None)
    record.created = wire.created
    record.exc_text = wire.traceback or None
    record.processName = process
    return record


def dropped(count: int) -> logging.LogRecord:
    """Create a record that says how many lines are missing at this point."""
    message = "%d lines were dropped: stderr did not take them"
    return logging.LogRecord(__name__, logging.WARNING, "", 0, message, (count,), None)


def foreign(line: str, process: str) -> logging.LogRecord:
    """Create a record of a line that did not come through logging."""
    record = logging.LogRecord(
        STDERR_LOGGER, logging.WARNING, "", 0, "%s", (cut(line, MAX_MESSAGE),), None
    )
    record.processName = process
    return record


def _sendable(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()


def cut(text: str, length: int) -> str:
    """Cut the middle out of a text that is too long."""
    if len(text) <= length:
        return text
    head = length // 4
    tail = length - head
    return f"{text[:head]} … ({len(text) - length} characters) … {text[-tail:]}"
