"""The output formats: plain text for people ("console"), or one JSON object per line.

Text from callers cannot imitate a separate line, control a terminal, or exceed the limits of
`engine.logs.records`. Records of gRPC and asyncio about a call may contain data that the caller
sent, including credentials. For these, only the kind of event and its source location are logged.
"""

from __future__ import annotations

import json
import logging
import re
import time
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Protocol

from engine.logs.records import MAX_MESSAGE, MAX_TRACEBACK, cut
from service.logs.context import current_adapter, current_request, current_trace

_TELL_VALUES = ("grpc", "asyncio")
"""Loggers whose records and exceptions may contain values of calls."""
_DIRECTIVE = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?[a-zA-Z]")
_TOKEN = re.compile(r"(?i)\b(bearer)(?:\s|%20|\\x20)+(?!<token>)[^\s'\",]+")

_STEERS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_STEERS |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\t"}
_STEERS |= {0x2028: "\\u2028", 0x2029: "\\u2029"}

MAX_ID = 128
_SHOWN = (("request", "request_id"), ("adapter", "adapter"), ("trace", "trace_id"))

LOG_FORMATS = ("console", "json")


class Form(Protocol):
    """Formats output as lines."""

    def said(self, text: str) -> str:
        """Format the server's own text, which may have several lines."""

    def record(self, record: logging.LogRecord, skipped: int) -> str:
        """Format a log record.

        Args:
            record: the record.
            skipped: how many similar records were left out before it.
        """


class Console:
    """`time LEVEL logger: message`, with the process before the logger if it is not the server's.
    If the record belongs to a request, ` [request=… adapter=… trace=…]` follows. A traceback comes
    last, indented.
    """

    def said(self, text: str) -> str:
        """Format the server's own text."""
        return "\n".join(line.translate(_STEERS) for line in text.split("\n"))

    def record(self, record: logging.LogRecord, skipped: int) -> str:
        """Format a log record."""
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        milliseconds = int(record.created % 1 * 1000)
        process = _process(record)
        lines = [
            f"{at},{milliseconds:03d} {record.levelname} {process + ' ' if process else ''}"
            f"{record.name}: {(_message(record, skipped) + _belongs(record)).translate(_STEERS)}"
        ]
        lines += [f"    {line.translate(_STEERS)}" for line in _traceback(record).splitlines()]
        return "\n".join(lines)


class Json:
    """One JSON object per line: time (UTC), level, process, logger and message, with the ids of the
    request, trace and span, the request's adapter, and a traceback if there are any.
    """

    def said(self, text: str) -> str:
        """Format the server's own text."""
        return _object(time.time(), "info", "server", "headrace-server", text)

    def record(self, record: logging.LogRecord, skipped: int) -> str:
        """Format a log record."""
        return _object(
            record.created,
            record.levelname.lower(),
            _process(record) or "server",
            record.name,
            _message(record, skipped),
            _traceback(record),
            _ids(record),
        )


def form(name: str) -> Form:
    """Return the format with this name, which is one of LOG_FORMATS."""
    return Json() if name == "json" else Console()


def _object(
    at: float,
    level: str,
    process: str,
    logger: str,
    message: str,
    trace: str = "",
    ids: Mapping[str, str] = MappingProxyType({}),
) -> str:
    moment = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    fields = {
        "time": moment.replace("+00:00", "Z"),
        "level": level,
        "process": process,
        "logger": logger,
        "message": message,
    }
    fields |= ids
    if trace:
        fields["traceback"] = trace
    return json.dumps(fields)  # in ASCII: no control characters, no line breaks


def _ids(record: logging.LogRecord) -> dict[str, str]:
    """Return the ids of what a record belongs to: its own `request_id` and `adapter` if it has
    these, otherwise the request of its task. Records of the engine's process have none.
    """
    if _process(record):
        return {}
    trace, span = current_trace.get()
    request, adapter = getattr(record, "request_id", ""), getattr(record, "adapter", "")
    if not request:
        request, adapter = current_request.get(), current_adapter.get()
    ids = {
        "request_id": cut(request, MAX_ID),
        "adapter": adapter,
        "trace_id": trace,
        "span_id": span,
    }
    return {name: value for name, value in ids.items() if value}


def _belongs(record: logging.LogRecord) -> str:
    ids = _ids(record)
    parts = [f"{name}={ids[key]}" for name, key in _SHOWN if key in ids]
    return f" [{' '.join(parts)}]" if parts else ""


def _process(record: logging.LogRecord) -> str:
    name = record.processName
    return "" if name in (None, "MainProcess") else str(name)


def _message(record: logging.LogRecord, skipped: int) -> str:
    text = _hide(cut(_fact(record) if _tells_values(record) else record.getMessage(), MAX_MESSAGE))
    return f"{text} (and {skipped} like it before, left out)" if skipped else text


def _traceback(record: logging.LogRecord) -> str:
    if record.exc_info and _tells_values(record):
        kind, _, frames = record.exc_info
        text = "".join(traceback.format_tb(frames)) + (kind.__name__ if kind else "")
    elif record.exc_info:
        text = "".join(traceback.format_exception(*record.exc_info))
    else:
        text = record.exc_text or ""
    return _hide(cut(text, MAX_TRACEBACK))


def _tells_values(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] in _TELL_VALUES


def _fact(record: logging.LogRecord) -> str:
    """Return a message without its values. These are the arguments or, in asyncio's messages, what
    follows the first newline, colon or bracket.
    """
    if record.args:
        return _DIRECTIVE.sub("…", str(record.msg))
    return re.split(r"[\n:(<\[]", str(record.msg), maxsplit=1)[0].strip()


def _hide(text: str) -> str:
    """A last line of defence: hide anything that looks like a bearer token."""
    return _TOKEN.sub(r"\1 …", text)
