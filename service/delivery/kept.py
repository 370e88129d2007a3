"""The ended requests whose results are kept, limited in number and in bytes.

Beyond a limit, a request is dropped: from the group of accounts (`service.accounts`) with the most
requests or bytes, whichever limit it is; in that group, from the caller with the most; and of that
caller's requests, the oldest. So a group or caller that keeps much pushes out its own results,
never those of others that keep less. With one caller, the oldest is dropped.
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
    """The limits on kept results.

    Attributes:
        retention_s: how long results are kept after a request's end.
        max_results, max_bytes: the most ended requests that are kept, and about how many bytes of
            events in them.
    """

    retention_s: float
    max_results: int
    max_bytes: int


class _Share:
    """What is kept for one caller: requests with their sizes, oldest first."""

    __slots__ = ("requests", "size")

    def __init__(self) -> None:
        self.requests: dict[ServedRequest, int] = {}
        self.size = 0

    @property
    def count(self) -> int:
        return len(self.requests)


class _Group:
    """What is kept for the callers of one group."""

    __slots__ = ("callers", "count", "size")

    def __init__(self) -> None:
        self.callers: dict[CallerKey, _Share] = {}
        self.count = 0
        self.size = 0


class KeptResults:
    """See the module. O(1) to add a request, and O(groups + callers of one group) to drop one.

    Attributes:
        count, size: how many requests are kept, and about how many bytes of events.
        groups: what is kept for each group that has some.
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
        """Keep a request that is not kept yet; call `surplus` afterwards. `size`: about how many
        bytes.
        """
        group = self.groups.setdefault(request.account.group, _Group())
        share = group.callers.setdefault(request.account.key, _Share())
        share.requests[request] = size
        share.size += size
        self._count(group, 1, size)

    def discard(self, request: ServedRequest) -> None:
        """Stop keeping a request. Harmless if it is not kept."""
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
        """The request to drop next; None: all may stay."""
        if self.count > self._max_results:
            return self._oldest_of_most(attrgetter("count"))
        if self.size > self._max_bytes:
            return self._oldest_of_most(attrgetter("size"))
        return None

    def _oldest_of_most(self, amount: Callable[[_Group | _Share], int]) -> ServedRequest:
        group = max(self.groups.values(), key=amount)
        return next(iter(max(group.callers.values(), key=amount).requests))
