"""A limit on something that many callers use, and each caller's share of it.

    ask ──▶ it fits, or a refusal with advice when to come again (and the want is noted)
    add ──▶ … ──▶ remove

A caller may use whatever nobody else wants: a single caller has the whole limit. If several want
it, each is due a share, by weight, among those that hold something or were recently refused. Beyond
the limit L there is a reserve R of an eighth of L (at least 1). The rules are:

- Never more than L + R is in use.
- A caller that holds more than its share, or would with this request, finds room up to L, less what
  others are owed. Refused callers within their shares are owed what they wanted until they come
  back as advised (at most a second later, and MAX_WANT_S in all).
- A caller that stays within its share finds room up to L + R/2, and one that holds nothing yet up
  to L + R. A new caller that wants at most R therefore finds room, however much a single other
  caller holds: that caller is above a share of one half, and cannot have taken any of the reserve.

Callers may form a group, which has one weight and divides its share equally among them. If a group
is above its share, its new callers may use a quarter of the reserve. This is enough to keep one of
its callers from shutting out the others, but not all of the reserve, so a group gains nothing by
having many callers.

A refused amount is counted until its advised time, so that the next refused caller is given a later
time (`engine.fairness.drain_rate`). However, a caller waits for no more of another's amount than
the other is due before it. While half of the limit or more is in use, an amount that comes back as
advised goes before new amounts of the same caller, if it is identified by a ticket
(`engine.fairness.retry_tickets`).

Each call takes O(log n) for n callers that hold or want something. Nothing is kept about others.
Used by one thread at a time.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from engine.fairness.drain_rate import MARGIN, MIN_DELAY_S, DrainRate
from engine.fairness.retry_tickets import RetryTickets

RESERVE_PART = 8
"""The reserve is the limit divided by this."""
MAX_WANT_S = 10.0
"""The maximum time, in seconds, for which a refused amount is owed."""
GRACE_S = 1.0
"""How many seconds after the advised time a refused amount is still owed to a caller."""
MAX_WANTING = 4096
"""The maximum number of callers that are owed something at a time."""
_WEIGHT_UNITS = 1_000_000
"""The number of integer units that a weight of 1 is stored as, so that sums are exact."""


class Sharer(Protocol):
    """A caller, as seen by Shares.

    Attributes:
        key: identifies the caller.
        group: the caller's group; the callers of one group share one weight.
        weight: the group's weight, above zero.
    """

    @property
    def key(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def weight(self) -> float: ...


Who = TypeVar("Who", bound=Sharer, contravariant=True)


class Level:
    """How much of a limited resource is in use, and the rate at which it is released.

    The rate is measured from the time when half of the limit is in use until less than a quarter
    is. With less in use, less is released, which says nothing about the rate at the limit.

    Attributes:
        limit: the maximum that may be in use; None: no limit.
        present: how much is in use now.
        rate: how fast it is released, and how much was told to come back.
    """

    __slots__ = ("_is_much", "limit", "present", "rate")

    def __init__(
        self, limit: int | None, clock: Callable[[], float], jitter: Callable[[], float]
    ) -> None:
        """`clock`, `jitter`: see DrainRate."""
        self.limit = limit
        self.present = 0
        self.rate = DrainRate(clock, jitter)
        self._is_much = False

    def missing(self, amount: int) -> int:
        """Return how much must be released before `amount` fits. 0 or less means that it fits
        now.
        """
        return 0 if self.limit is None else self.present + amount - self.limit

    def advise(self, amount: int) -> float:
        """Return after how many seconds to ask again for an amount that is refused now (see
        DrainRate).
        """
        return self.rate.advise(self.missing(amount), amount)

    def add(self, amount: int) -> None:
        """Add an amount to what is in use."""
        self.present += amount
        if not self._is_much and self.limit is not None and 2 * self.present >= self.limit:
            self._is_much = True
            self.rate.begin()

    def remove(self, amount: int, *, served: bool) -> None:
        """Release an amount. `served` means it was released in the normal way, so it counts for the
        rate.
        """
        self.present -= amount
        if not self._is_much:
            return
        if served:
            self.rate.left(amount)
        self._is_much = self.limit is not None and 4 * self.present >= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Reports that an amount does not fit now.

    Attributes:
        limit, present: the limit, and how much all callers use now.
        held: how much the caller uses.
        share: how much the caller is due now.
        is_above_share: whether the caller holds more than its share, or would with this amount,
            while others want their shares.
        retry_after_s: when to try again, in seconds.
        kept: how much is reserved for the caller's due tickets, which go before this amount.
    """

    limit: int
    present: int
    held: int
    share: int
    is_above_share: bool
    retry_after_s: float
    kept: int = 0


@dataclass(frozen=True, slots=True)
class _Due:
    """What a caller that asks is due.

    Attributes:
        part, share: the caller's fraction of the sum of weights, and its share of the limit.
        is_new: whether the caller holds nothing else.
        is_within: whether the caller would stay within its share with the amount.
        is_of_due_group: whether the group would stay within its share with the amount, or holds
            nothing else.
    """

    part: float
    share: int
    is_new: bool
    is_within: bool
    is_of_due_group: bool


@dataclass(slots=True, eq=False)
class _Group:
    name: str
    weight: int
    held: int = 0
    members: int = 0


@dataclass(slots=True, eq=False)
class _Caller:
    """A caller that holds or wants something.

    Attributes:
        owed, owed_until: the amount owed to the caller, and until when.
        is_due: whether its group was within its share when the amount became owed.
        is_listed: whether the heap has an entry for the end of the debt.
        told: the amount that the caller was told to come back for, spread evenly from `told_since`
            to `told_until`.
    """

    key: str
    group: _Group
    held: int = 0
    owed: int = 0
    owed_until: float = 0.0
    is_due: bool = False
    is_listed: bool = False
    told: float = 0.0
    told_since: float = 0.0
    told_until: float = 0.0


class Shares(Generic[Who]):
    """Shares a limit among callers. `Who` is the user's type for callers.

    Attributes:
        level: how much is in use.
        reserve: how much may be used beyond the limit.
        tickets: the retry tickets of refused amounts.
    """

    def __init__(
        self,
        limit: int | None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        *,
        rate: DrainRate | None = None,
    ) -> None:
        """Start with nothing in use.

        Args:
            limit: the maximum that may be in use, without the reserve; None: no limit.
            clock, jitter: see DrainRate.
            rate: the rate of release, if it is measured elsewhere. If None, it is measured here.
        """
        self.level = Level(limit, clock, jitter)
        self._rate = rate or self.level.rate
        self._clock = clock
        self.reserve = _reserve(limit)
        self._callers: dict[str, _Caller] = {}
        self._groups: dict[str, _Group] = {}
        self._weights = 0  # of all groups
        self._owed = 0  # to all
        self._owed_due = 0  # to those whose groups are within their shares
        self._ends: list[tuple[float, str]] = []  # heap: when what is owed may be forgotten
        self.tickets = RetryTickets()

    @property
    def limit(self) -> int | None:
        """The limit without the reserve, or None if there is none."""
        return self.level.limit

    def set_limit(self, limit: int | None) -> None:
        """Change the limit.

        Amounts in use beyond a lower limit remain in use. Nothing more fits until they are
        released.
        """
        self.level.limit = limit
        self.reserve = _reserve(limit)

    @property
    def present(self) -> int:
        """How much is in use now."""
        return self.level.present

    @property
    def callers(self) -> int:
        """How many callers hold or want something."""
        return len(self._callers)

    def held_by(self, who: Who) -> int:
        """How much one caller holds."""
        caller = self._callers.get(who.key)
        return 0 if caller is None else caller.held

    def is_above_share(self, who: Who) -> tuple[bool, int]:
        """Whether one caller holds more than its share, and how much its share is."""
        limit = self.level.limit
        if limit is None:
            return False, 0
        due = self._due(who, self._callers.get(who.key), 0, limit, 0)
        return not (due.is_within and due.is_of_due_group), due.share

    def part_of(self, who: Who) -> float:
        """Return one caller's fraction of its group's weight, as if the caller held something."""
        group = self._groups.get(who.group)
        members = 0 if group is None else group.members
        return 1 / (members + (who.key not in self._callers))

    # ---- asking --------------------------------------------------------------------------------

    def ask(
        self,
        who: Who,
        amount: int,
        *,
        has: int = 0,
        present: int | None = None,
        ticket: str = "",
    ) -> Refusal | None:
        """Check whether an amount fits for one caller. Nothing is taken.

        Returns None if the amount fits.

        Args:
            who: the caller.
            amount: the amount, at most the limit.
            has: how much was already taken for the same thing, if it is taken in several steps.
            present: how much is in use now, if another module knows it better.
            ticket: identifies this amount when the caller comes back with it; empty: it is not
                recognized. See `got_in`.
        """
        limit = self.level.limit
        if limit is None:
            return None
        now = self._clock()
        self._forget_owed(now)
        present = self.level.present if present is None else present
        caller = self._callers.get(who.key)
        due = self._due(who, caller, amount, limit, has)
        tickets = self.tickets
        kept = tickets.kept(who.key, now) if tickets.places else 0
        is_due = kept > 0 and tickets.is_kept(who.key, ticket)
        ahead = kept if 2 * present >= limit and not is_due else 0
        missing = present + ahead + amount - (limit + self._room_beyond(caller, due))
        if missing <= 0:
            return None
        if caller is None:
            caller = self._enter(who)
        if early_s := tickets.due_in(who.key, ticket, now):
            retry_after_s = max(early_s, MIN_DELAY_S)
        else:
            behind = kept if is_due else None  # it is in front, with the others that are due
            # A place that is kept will not be taken by somebody else who comes a little earlier.
            margin = 0.0 if ticket else MARGIN
            retry_after_s = self._advise(caller, missing, amount, due.part, now, behind, margin)
            if ticket:
                tickets.put(who.key, ticket, amount, now, retry_after_s)
        if due.is_new or due.is_within:
            until = now + min(retry_after_s, MAX_WANT_S) + GRACE_S
            self._owe(caller, amount, max(amount, due.share - caller.held), due, until)
        refusal = Refusal(
            limit=limit,
            present=present,
            held=caller.held,
            share=due.share,
            is_above_share=due.part < 1 and not (due.is_within and due.is_of_due_group),
            retry_after_s=retry_after_s,
            kept=ahead,
        )
        self._tidy(caller)
        return refusal

    def got_in(self, who: Who, ticket: str) -> None:
        """Release the place reserved for this ticket."""
        self.tickets.drop(who.key, ticket)

    def _due(self, who: Who, caller: _Caller | None, amount: int, limit: int, has: int) -> _Due:
        group = self._groups.get(who.group)
        held = 0 if caller is None else caller.held
        weight = _units(who.weight)
        weights, parts, of_group = self._weights + weight, 1, 0
        if group is not None:
            weights -= group.weight
            parts = group.members + (caller is None)
            of_group = group.held
        # A share is limit * weight / weights / parts; multiplied out to be exact.
        return _Due(
            part=weight / weights / parts,
            share=limit * weight // (weights * parts),
            is_new=held <= has,
            is_within=(held + amount) * weights * parts <= limit * weight,
            is_of_due_group=of_group <= has or (of_group + amount) * weights <= limit * weight,
        )

    def _room_beyond(self, caller: _Caller | None, due: _Due) -> int:
        """Return how far beyond the limit a caller finds room. A negative value means that it must
        stay below the limit.
        """
        if due.part == 1:  # alone
            return 0
        if due.is_of_due_group and due.is_new:
            return self.reserve
        if due.is_of_due_group and due.is_within:
            return self.reserve // 2
        own = 0 if caller is None else caller.owed
        if due.is_new:  # callers in the same situation do not wait for each other
            return self.reserve // 4 - self._owed_due + (own if caller and caller.is_due else 0)
        return own - self._owed

    def _advise(
        self,
        caller: _Caller,
        missing: int,
        amount: int,
        part: float,
        now: float,
        behind: int | None,
        margin: float,
    ) -> float:
        """Return the advised delay in seconds.

        Args:
            behind: the maximum amount that goes before this one; None if unknown.
            margin: see DrainRate.
        """
        own = 0.0
        if now < caller.told_until:
            passed = (now - caller.told_since) / (caller.told_until - caller.told_since)
            own = caller.told * (1 - passed)
        # If callers take turns, this many of the others come before the last of this caller's own.
        before = (own + amount) / part - amount if part < 1 else None
        if behind is not None:
            before = behind if before is None else min(before, behind)
        delay = self._rate.advise(missing, amount, before, margin)
        caller.told = own + amount
        caller.told_since = now
        caller.told_until = max(caller.told_until, now + delay)
        return delay

    # ---- what is owed --------------------------------------------------------------------------

    def _owe(self, caller: _Caller, amount: int, most: int, due: _Due, until: float) -> None:
        if not caller.is_listed:
            if len(self._ends) >= MAX_WANTING:
                return
            caller.is_listed = True
            heapq.heappush(self._ends, (until, caller.key))
        caller.owed_until = until
        self._set_owed(caller, min(caller.owed + amount, most), is_due=due.is_of_due_group)

    def _set_owed(self, caller: _Caller, owed: int, *, is_due: bool) -> None:
        self._owed += owed - caller.owed
        self._owed_due += (owed if is_due else 0) - (caller.owed if caller.is_due else 0)
        caller.owed, caller.is_due = owed, is_due

    def _forget_owed(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, key = heapq.heappop(self._ends)
            caller = self._callers[key]
            if caller.owed and caller.owed_until > now:  # refused again meanwhile
                heapq.heappush(self._ends, (caller.owed_until, key))
                continue
            caller.is_listed = False
            self._set_owed(caller, 0, is_due=False)
            self._tidy(caller)

    # ---- counting ------------------------------------------------------------------------------

    def add(self, who: Who, amount: int) -> None:
        """Add an amount to what one caller holds, whether or not it fitted."""
        if not amount:
            return
        self.level.add(amount)
        caller = self._callers.get(who.key) or self._enter(who)
        self._weigh(caller.group, who)
        caller.held += amount
        caller.group.held += amount
        if caller.owed:
            self._set_owed(caller, max(caller.owed - amount, 0), is_due=caller.is_due)

    def remove(self, who: Who, amount: int, *, served: bool) -> None:
        """Release an amount that one caller holds. `served` means it was released in the normal
        way, so it counts for the rate.
        """
        if not amount:
            return
        self.level.remove(amount, served=served)
        caller = self._callers[who.key]
        caller.held -= amount
        caller.group.held -= amount
        self._tidy(caller)

    def _enter(self, who: Who) -> _Caller:
        group = self._groups.get(who.group)
        if group is None:
            group = self._groups[who.group] = _Group(who.group, 0)
        self._weigh(group, who)
        group.members += 1
        caller = self._callers[who.key] = _Caller(who.key, group)
        return caller

    def _weigh(self, group: _Group, who: Who) -> None:
        """Set a group's weight to the one most recently given by any of its callers."""
        weight = _units(who.weight)
        self._weights += weight - group.weight
        group.weight = weight

    def _tidy(self, caller: _Caller) -> None:
        if caller.held or caller.is_listed:
            return
        del self._callers[caller.key]
        group = caller.group
        group.members -= 1
        if not group.members:
            self._weights -= group.weight
            del self._groups[group.name]


def _reserve(limit: int | None) -> int:
    return 0 if limit is None else max(1, limit // RESERVE_PART)


def _units(weight: float) -> int:
    return max(1, round(weight * _WEIGHT_UNITS))
