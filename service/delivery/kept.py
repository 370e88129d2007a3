"""What is kept of results, limited in number and in bytes: those of ended requests, and what was
read of live ones, which a stream that attaches may ask for again.

Beyond a limit, something is dropped: from the group of accounts (`service.admission.accounts`) with
the most requests or bytes, whichever limit it is; in that group, from the caller with the most. So
a group or caller that keeps much pushes out its own results, never those of others that keep less.
Of that caller's results go, in this order, each time the oldest:

1. what a live request's reader has had, if more than LONG bytes of it are kept: down to half of
   that, because the last of it may still be on its way to the client;
2. an ended request's result;
3. what a live request's reader has had, by halves, of one after the other.

For the limit in number, 2 alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from engine.contract.types import CallerKey
from service.admission.accounts import Account

LONG = 1 << 20
"""Above this many bytes, what a live request's reader has had is dropped first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The limits on kept results.

    Attributes:
        retention_s: how long results are kept after a request's end.
        max_results, max_bytes: the most ended requests that are kept, and about how many bytes of
            events in them and in what is kept of live ones.
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
    """What is kept for one caller: bytes by request, oldest first; those of `ended` requests, and
    of live ones of which `much` or `little` is kept.
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
    """What is kept for the callers of one group."""

    __slots__ = ("callers", "count", "size")

    def __init__(self) -> None:
        self.callers: dict[CallerKey, _Share[Request]] = {}
        self.count = 0
        self.size = 0


class KeptResults(Generic[Request]):
    """See the module. O(1) to count what a request keeps, and O(groups + callers of one group) to
    drop something.

    Attributes:
        count: how many ended requests are kept.
        size: about how many bytes of events, those of live requests too.
        groups: what is kept for each group that has some.
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
        """Keep an ended request; call `surplus` afterwards. `size`: about how many bytes."""
        self.discard(request)
        share = self._share(request)
        share.ended[request] = size
        self._count(request, share, 1, size)

    def add_read(self, request: Request, size: int) -> None:
        """Note how many bytes are kept now of what a live request's reader has had; call `surplus`
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
        """Keep nothing of a request. Harmless if nothing is kept."""
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
        """The request of which something is to be dropped next; None: all may stay."""
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
