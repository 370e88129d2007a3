"""The ended requests whose results are kept, within a bound of their number and one of their bytes.

Beyond a bound the oldest request goes of the group of accounts (`service.accounts`) that has the
most: the most requests where there are too many, the most bytes where those are too many. So a
group that keeps much pushes out its own results, and nobody's who keeps less. With one group, the
oldest goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.delivery.log import RequestLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What is kept, and how much of it.

    Attributes:
        retention_s: how long results are kept after a request's end.
        max_results, max_bytes: the most ended requests that are kept, and about how many bytes of
            events in them.
    """

    retention_s: float
    max_results: int
    max_bytes: int


class _Share:
    """What is kept of one group: requests with their sizes, oldest first."""

    __slots__ = ("logs", "size")

    def __init__(self) -> None:
        self.logs: dict[RequestLog, int] = {}
        self.size = 0


class KeptResults:
    """See the module. O(1) for a request, and O(groups) for one that must go.

    Attributes:
        count, size: how many requests are kept, and about how many bytes of events.
    """

    def __init__(self, max_results: int, max_bytes: int) -> None:
        self._max_results = max_results
        self._max_bytes = max_bytes
        self._shares: dict[str, _Share] = {}  # of groups that have some
        self.count = 0
        self.size = 0

    def __contains__(self, log: RequestLog) -> bool:
        share = self._shares.get(log.account.group)
        return share is not None and log in share.logs

    def add(self, log: RequestLog, size: int) -> None:
        """Keep a request that is not kept yet; then see `surplus`. `size`: about how many bytes."""
        share = self._shares.setdefault(log.account.group, _Share())
        share.logs[log] = size
        share.size += size
        self.count += 1
        self.size += size

    def discard(self, log: RequestLog) -> None:
        """Keep a request no more. Harmless if it is not kept."""
        share = self._shares.get(log.account.group)
        if share is None or log not in share.logs:
            return
        size = share.logs.pop(log)
        share.size -= size
        self.count -= 1
        self.size -= size
        if not share.logs:
            del self._shares[log.account.group]

    def surplus(self) -> RequestLog | None:
        """The request that must go next; None: all may stay."""
        if self.count > self._max_results:
            return self._oldest_of_most(lambda share: len(share.logs))
        if self.size > self._max_bytes:
            return self._oldest_of_most(lambda share: share.size)
        return None

    def _oldest_of_most(self, amount: Callable[[_Share], int]) -> RequestLog:
        return next(iter(max(self._shares.values(), key=amount).logs))
