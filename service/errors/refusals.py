"""Counts refusals by reason: calls that ended with an error, and commands of sessions.

The code that turns an error into an answer counts it here. The metrics and the log read the counts.
The number of keys is bounded: methods are those that the server has, and reasons are constants of
this code (`status_table`).
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from service.errors.status_table import NOT_REFUSALS, code_of, reason_of


class RefusalKind(NamedTuple):
    """What was refused and why.

    Attributes:
        method: the RPC, such as headrace.v1.GenerationService/Generate.
        reason: the reason in ErrorInfo.
        code: the name of the gRPC code.
    """

    method: str
    reason: str
    code: str


class Refusals:
    """Counts refusals; see the module. Counted on the event loop, read from any thread."""

    def __init__(self) -> None:
        self._counts: Counter[RefusalKind] = Counter()

    def add(self, method: str, error: BaseException) -> None:
        """Count an answer that was an error, unless the request had been accepted."""
        if not isinstance(error, NOT_REFUSALS):
            self._counts[RefusalKind(method, reason_of(error), code_of(error).name)] += 1

    def counts(self) -> dict[RefusalKind, int]:
        """Return the number of refusals of each kind since the start."""
        return self._counts.copy()

    @property
    def total(self) -> int:
        """Return the number of refusals since the start."""
        return sum(self._counts.copy().values())
