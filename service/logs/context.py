"""The call or request that a log record belongs to. The code that begins a call or a request sets
it in its task; it is read when a record of that task is formatted.
"""

from __future__ import annotations

from contextvars import ContextVar

current_trace: ContextVar[tuple[str, str]] = ContextVar("trace", default=("", ""))
"""The ids of the trace and the span, in hexadecimal; empty if there is no trace."""
current_request: ContextVar[str] = ContextVar("request", default="")
"""The id of the request that is being started; empty if there is none."""
current_adapter: ContextVar[str] = ContextVar("adapter", default="")
"""The adapter that this request names, once that is known to be one; empty: none."""
