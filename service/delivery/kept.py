"""The ended requests whose results are kept, within a bound of their number and one of their bytes.

Beyond a bound the oldest request goes of the group of accounts (`service.accounts`) that has the
most: the most requests where there are too many, the most bytes where those are too many. So a
group that keeps much pushes out its own results, and nobody's who keeps less; and so does each
caller of a group. With one caller, the oldest goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.types import CallerKey
    from service.delivery.request import ServedRequest


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
    """What is kept of one caller: requests with their sizes, oldest first."""

    __slots__ = ("requests", "size")

    def __init__(self) -> None:
        self.requests: dict[ServedRequest, int] = {}
        self.size = 0

    @property
    def count(self) -> int:
        return len(self.requests)


class _Group:
    """What is kept of the callers of one group."""

    __slots__ = ("callers", "count", "size")

    def __init__(self) -> None:
        self.callers: dict[CallerKey, _Share] = {}
        self.count = 0
        self.size = 0


class KeptResults:
    """See the module. O(1) for a request, and O(groups, and callers of one) for one that must go.

    Attributes:
        count, size: how many requests are kept, and about how many bytes of events.
        groups: what is kept of those groups that have some.
    """

    def __init__(self, max_results: int, max_bytes: int) -> None:
        self._max_results = max_results
        self._max_bytes = max_bytes
        self.groups: dict[str, _Group] = {}
        self.count = 0
        self.size = 0

    def __contains__(self, request: ServedRequest) -> bool:
        group = self.groups.get(request.account.group)
        share = None if group is None else group.callers.get(request.account.key)
        return share is not None and request in share.requests

    def add(self, request: ServedRequest, size: int) -> None:
        """Keep a request that is not kept yet; then see `surplus`. `size`: about how many bytes."""
        group = self.groups.setdefault(request.account.group, _Group())
        share = group.callers.setdefault(request.account.key, _Share())
        share.requests[request] = size
        share.size += size
        self._count(group, 1, size)

    def discard(self, request: ServedRequest) -> None:
        """Keep a request no more. Harmless if it is not kept."""
        if request not in self:
            return
        account = request.account
        group = self.groups[account.group]
        share = group.callers[account.key]
        size = share.requests.pop(request)
        share.size -= size
        self._count(group, -1, -size)
        if not share.requests:
            del group.callers[account.key]
        if not group.callers:
            del self.groups[account.group]

    def _count(self, group: _Group, number: int, size: int) -> None:
        group.count += number
        group.size += size
        self.count += number
        self.size += size

    def surplus(self) -> ServedRequest | None:
        """The request that must go next; None: all may stay."""
        if self.count > self._max_results:
            return self._oldest_of_most(attrgetter("count"))
        if self.size > self._max_bytes:
            return self._oldest_of_most(attrgetter("size"))
        return None

    def _oldest_of_most(self, amount: Callable[[_Group | _Share], int]) -> ServedRequest:
        group = max(self.groups.values(), key=amount)
        return next(iter(max(group.callers.values(), key=amount).requests))
