"""How a call ends, as reported to the code that counts, logs and traces calls."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import grpc

from service.errors.status_table import code_of_number

Handler = Any  # grpc.RpcMethodHandler: generic in its stubs, not at run time
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]
Unary = Callable[[Any, Any], Awaitable[Any]]

SERVER_FAULTS: Final = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""The codes that OpenTelemetry's conventions count as errors of a server."""


@dataclass(slots=True, eq=False)
class CallOutcome:
    """How a call ends. It has no reference to the call, so tasks that outlive the call can keep it.

    Attributes:
        began, deadline: monotonic seconds. `deadline` is None if the call has none.
        code: the code with which the handler ended the call, or None if it has not.
        kept: the handler's exception, if it was caught before `Recovery`, which treats it as if it
            had been raised there.
    """

    began: float
    deadline: float | None
    code: grpc.StatusCode | None = None
    kept: Exception | None = None

    def aborted(self, context: Any) -> None:
        """Record that the handler ended the call through its context, or found it ended."""
        code = context.code()
        self.code = code if isinstance(code, grpc.StatusCode) else code_of_number(code)

    def raise_kept(self) -> None:
        """Raise the kept exception, if there is one, and stop keeping it."""
        error, self.kept = self.kept, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # it would keep itself alive by this frame

    def code_at_end(self) -> grpc.StatusCode:
        """Return the code, once the call has ended."""
        if self.code is not None:
            return self.code
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return grpc.StatusCode.DEADLINE_EXCEEDED
        return grpc.StatusCode.CANCELLED

    def seconds(self) -> float:
        """Return how long the call has taken."""
        return time.monotonic() - self.began


current_call: ContextVar[CallOutcome] = ContextVar("call")
"""The current task's call."""

Watcher = Callable[[str, Any], Callable[[CallOutcome], None] | None]
"""Called in a new call's task with its method and context. Returns a function to call at the end of
the call, or None.
"""
