"""Limits how many results are kept, in number and in bytes. They are the results of ended requests,
and output of live requests that was read, which a stream that attaches may request again.

Beyond a limit, something is dropped from the group of accounts (`service.admission.accounts`) with
the most requests or bytes, depending on the limit, and in that group from the caller with the most.
So a group or caller that keeps much displaces its own results, never those of others that keep
less. That caller's results are dropped in this order, oldest first:

1. the read output of a live request, if more than LONG bytes of it are kept: down to half of that,
   because the last of it may still be on its way to the client;
2. the result of an ended request;
3. the read output of live requests, halved, one request after the other.

For the limit in number, only the second applies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from engine.contract.types import CallerKey
from service.admission.accounts import Account

LONG = 1 << 20
"""Above this many bytes, the read output of a live request is dropped first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The limits on kept results.

    Attributes:
        retention_s: how long results are kept after a request's end.
        max_results: the most ended requests that are kept.
        max_bytes: the approximate number of bytes of events that are kept, of ended requests and of
            live ones.
    """

    retention_s: float
    max_results: int
    max_bytes: int


class Charged(Protocol):
    """Something that is charged to an account."""

    @property
    def account(self) -> Account: ...


Request = TypeVar("Request", bound=Charged)


class _Share(Generic[Request]):
    """The results kept for one caller, as bytes by request, oldest first: requests that have
    `ended`, and live requests of which `much` or `little` is kept.
    """

    __slots__ = ("ended", "little", "much", "size")

    def __init__(self) -> None:
        self.much: dict[Request, int] = {}
        self.ended: dict[Request, int] = {}
        self.little: dict[Request, int] = {}
        self.size = 0

    @property
    def count(self) -> int:
        return len(self.ended)


class _Group(Generic[Request]):
    """The results kept for the callers of one group."""

    __slots__ = ("callers", "count", "size")

    def __init__(self) -> None:
        self.callers: dict[CallerKey, _Share[Request]] = {}
        self.count = 0
        self.size = 0


class KeptResults(Generic[Request]):
    """Counts kept results and chooses which to drop; see the module. Counting takes O(1), and
    choosing takes O(groups + callers of one group).

    Attributes:
        count: the number of ended requests that are kept.
        size: the approximate number of bytes of events, including those of live requests.
        groups: the kept results of each group that has any.
    """

    def __init__(self, max_results: int, max_bytes: int) -> None:
        self._max_results = max_results
        self._max_bytes = max_bytes
        self.groups: dict[str, _Group[Request]] = {}
        self.count = 0
        self.size = 0

    def __contains__(self, request: Request) -> bool:
        """Whether an ended request is kept."""
        group = self.groups.get(request.account.group)
        share = None if group is None else group.callers.get(request.account.key)
        return share is not None and request in share.ended

    def add(self, request: Request, size: int) -> None:
        """Keep an ended request. Call `surplus` afterwards. `size`: its approximate number of
        bytes.
        """
        self.discard(request)
        share = self._share(request)
        share.ended[request] = size
        self._count(request, share, 1, size)

    def add_read(self, request: Request, size: int) -> None:
        """Record how many bytes of a live request's read output are now kept. Call `surplus`
        afterwards.
        """
        if not size:
            self.discard(request)
            return
        share = self._share(request)
        before = share.little.get(request) or share.much.get(request, 0)
        there, other = (share.much, share.little) if size > LONG else (share.little, share.much)
        other.pop(request, None)
        there[request] = size
        self._count(request, share, 0, size - before)

    def discard(self, request: Request) -> None:
        """Stop keeping anything of a request. Has no effect if nothing is kept."""
        account = request.account
        group = self.groups.get(account.group)
        share = None if group is None else group.callers.get(account.key)
        if group is None or share is None:
            return
        number = int(request in share.ended)
        for place in (share.ended, share.little, share.much):
            if (size := place.pop(request, None)) is not None:
                self._count(request, share, -number, -size)
        if not (share.ended or share.little or share.much):
            del group.callers[account.key]
            if not group.callers:
                del self.groups[account.group]

    def _share(self, request: Request) -> _Share[Request]:
        account = request.account
        group = self.groups.setdefault(account.group, _Group())
        return group.callers.setdefault(account.key, _Share())

    def _count(self, request: Request, share: _Share[Request], number: int, size: int) -> None:
        group = self.groups[request.account.group]
        share.size += size
        group.count += number
        group.size += size
        self.count += number
        self.size += size

    def surplus(self) -> Request | None:
        """Return the next request to drop something from, or None if everything fits."""
        if self.count > self._max_results:
            return next(iter(self._with_most(attrgetter("count")).ended))
        if self.size > self._max_bytes:
            share = self._with_most(attrgetter("size"))
            return next(iter(share.much or share.ended or share.little))
        return None

    def _with_most(
        self, amount: Callable[[_Group[Request] | _Share[Request]], int]
    ) -> _Share[Request]:
        group = max(self.groups.values(), key=amount)
        return max(group.callers.values(), key=amount)
