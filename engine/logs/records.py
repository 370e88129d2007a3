"""How a log record of the engine's process travels to the server's, which has its stderr: as a
line that begins with a record separator, as in a JSON text sequence (RFC 7464). Any other line
there was written past logging, by native code or by a program that died.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from engine.logs.queue import LogQueue

MAX_MESSAGE = 4096
MAX_TRACEBACK = 16 * 1024
"""Characters of a record's parts; the rest is left out."""

STDERR_LOGGER = "stderr"
"""Under this name goes what was written past logging."""

_MARK = "\x1e"
_formatter = logging.Formatter()


class _Wire(msgspec.Struct, array_like=True):
    created: float
    level: int
    name: str
    line: int
    message: str
    traceback: str  # empty: there is none


class RecordHandler(logging.Handler):
    """Puts records in a queue, as lines for the process that reads them."""

    FLUSH_S = 1.0
    """How long the end of the process waits for the file."""

    def __init__(self, queue: LogQueue) -> None:
        super().__init__()
        self._queue = queue

    def emit(self, record: logging.LogRecord) -> None:
        """Put one in."""
        try:
            self._queue.put(encode(record))
        except Exception:
            self._queue.put(f"a log record of {record.name} cannot be formatted")

    def flush(self) -> None:
        """Wait for a moment until all is written."""
        self._queue.flush(self.FLUSH_S)


def encode(record: logging.LogRecord) -> str:
    """A record as one line."""
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
    """The record that a line holds, or one that says it.

    Args:
        line: what the process wrote.
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
    """A record that says how many lines are missing where it stands."""
    message = "%d lines were dropped: stderr did not take them"
    return logging.LogRecord(__name__, logging.WARNING, "", 0, message, (count,), None)


def foreign(line: str, process: str) -> logging.LogRecord:
    """A record of a line that was written past logging."""
    record = logging.LogRecord(
        STDERR_LOGGER, logging.WARNING, "", 0, "%s", (cut(line, MAX_MESSAGE),), None
    )
    record.processName = process
    return record


def _sendable(text: str) -> str:
    """The text without halves of characters, which UTF-8 does not have."""
    return text.encode("utf-8", "backslashreplace").decode()


def cut(text: str, length: int) -> str:
    """The beginning and the end of a text that is too long."""
    if len(text) <= length:
        return text
    head = length // 4
    tail = length - head
    return f"{text[:head]} … ({len(text) - length} characters) … {text[-tail:]}"
