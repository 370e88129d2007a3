"""What a log record belongs to: set by whoever begins a call or a request, in its task; read when a
record of that task is formatted.
"""

from __future__ import annotations

from contextvars import ContextVar

current_trace: ContextVar[tuple[str, str]] = ContextVar("trace", default=("", ""))
"""The ids of the trace and of the span, in hexadecimal; empty: there is none."""
current_request: ContextVar[str] = ContextVar("request", default="")
"""The id of the request that is being started; empty: none is."""
