"""A bound on something that many callers take from, and each caller's share of it.

    ask ──▶ it fits, or a refusal with advice when to come again (and the want is noted)
    add ──▶ … ──▶ remove

Everybody may take what nobody else wants: one caller alone has all of the bound. Where several want
it, each is due a share, by weight, among those who hold something or were refused lately. With a
bound of L, and a reserve R of an eighth of it (at least 1) that is there beyond it:

- there are never more than L + R;
- who holds more than a share, or would then, finds room up to L, less what others are owed: those
  who were refused though they are within their shares, until they come again as they were told (a
  second later at most, and MAX_WANT_S in all);
- who stays within a share finds room up to L + R/2, and who holds nothing yet up to L + R. So
  whoever comes new, with no more than R, finds room whatever one caller holds: that one is above
  the share of two, and cannot have taken any of the reserve.

Callers may be of one group, which has one weight, and shares what it is due in equal parts. A group
that is above its share leaves newcomers in it a quarter of the reserve, so that one of its callers
does not shut out the others, and not all of the reserve, so that being many does not help it.

What is refused is counted until it was told to come: whoever is refused next is told a later time
(`engine.drain_rate`), but nobody stands behind more of another's than is that other's turn.

O(log n) for each call, of the callers that hold or want something; nothing is kept of others. One
thread at a time.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from engine.drain_rate import DrainRate

RESERVE_PART = 8
"""The reserve is one in so many parts of the bound."""
MAX_WANT_S = 10.0
"""How long what somebody was refused is kept for them, at most."""
GRACE_S = 1.0
"""How much later than told they may come."""
MAX_WANTING = 4096
"""For how many callers at a time something is kept."""
_WEIGHT_UNITS = 1_000_000
"""Weights are counted in whole parts of 1, so that sums are exact."""


class Sharer(Protocol):
    """Who takes part.

    Attributes:
        key: the caller's.
        group: the callers of one group share one weight.
        weight: of the group, above zero.
    """

    @property
    def key(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def weight(self) -> float: ...


Who = TypeVar("Who", bound=Sharer, contravariant=True)


class Level:
    """How much there is of something that has a limit, and how fast it leaves where there is much
    of it: from half of the limit on, until there is less than a quarter. Where there is little,
    little leaves, and that says nothing of a full house.

    Attributes:
        limit: the most; None: any.
        present: what there is now.
        rate: how fast it leaves, and who was told to come.
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
        """How much must leave before so much more can come; none of it: 0 or less."""
        return 0 if self.limit is None else self.present + amount - self.limit

    def advise(self, amount: int) -> float:
        """When to come again with so much that is refused now; see DrainRate."""
        return self.rate.advise(self.missing(amount), amount)

    def add(self, amount: int) -> None:
        """So much has come."""
        self.present += amount
        if not self._is_much and self.limit is not None and 2 * self.present >= self.limit:
            self._is_much = True
            self.rate.begin()

    def remove(self, amount: int, *, served: bool) -> None:
        """So much is there no more. `served`: it left as others will."""
        self.present -= amount
        if not self._is_much:
            return
        if served:
            self.rate.left(amount)
        self._is_much = self.limit is not None and 4 * self.present >= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """So much does not fit now.

    Attributes:
        limit, present: the bound, and what there is now, of all.
        held: what the caller has of it.
        share: how much the caller is due now.
        is_above_share: whether the caller holds that already, or would then, while others want
            theirs.
        retry_after_s: when to come again.
    """

    limit: int
    present: int
    held: int
    share: int
    is_above_share: bool
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class _Due:
    """What a caller is due who asks.

    Attributes:
        part, share: of everything, and of the bound.
        is_new: whether they hold nothing else.
        is_within: whether what they ask for would leave them within their share.
        is_of_due_group: whether it would leave their group within its share, or that holds nothing
            else.
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
    """Somebody who holds or wants something.

    `owed` is kept for them until `owed_until`, and `is_due` tells whether their group was within
    its share; `is_listed`: an end of that is in the heap. `told` is what they were told to come for
    until `told_until`, evenly from `told_since` on.
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
    """See the module. `Who`: what its callers are given as."""

    def __init__(
        self,
        limit: int | None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        *,
        rate: DrainRate | None = None,
    ) -> None:
        """Nothing of it is taken.

        Args:
            limit: the most; None: any.
            clock, jitter: see DrainRate.
            rate: how fast it leaves, where somebody else knows that; None: as it is seen here.
        """
        self.level = Level(limit, clock, jitter)
        self._rate = rate or self.level.rate
        self._clock = clock
        self._reserve = 0 if limit is None else max(1, limit // RESERVE_PART)
        self._callers: dict[str, _Caller] = {}
        self._groups: dict[str, _Group] = {}
        self._weights = 0  # of all groups
        self._owed = 0  # to all
        self._owed_due = 0  # to those whose groups are within their shares
        self._ends: list[tuple[float, str]] = []  # heap: when what is owed may be forgotten

    @property
    def limit(self) -> int | None:
        """The most, but for the reserve; None: any."""
        return self.level.limit

    @property
    def present(self) -> int:
        """What there is now."""
        return self.level.present

    @property
    def callers(self) -> int:
        """How many hold or want something."""
        return len(self._callers)

    def held_by(self, who: Who) -> int:
        """What one caller holds."""
        caller = self._callers.get(who.key)
        return 0 if caller is None else caller.held

    def is_above_share(self, who: Who) -> tuple[bool, int]:
        """Whether one caller holds more than a share, and how much that is."""
        limit = self.level.limit
        if limit is None:
            return False, 0
        due = self._due(who, self._callers.get(who.key), 0, limit, 0)
        return not (due.is_within and due.is_of_due_group), due.share

    def part_of(self, who: Who) -> float:
        """Of its group's weight, the part of one caller, counted as one who takes part."""
        group = self._groups.get(who.group)
        members = 0 if group is None else group.members
        return 1 / (members + (who.key not in self._callers))

    # ---- asking --------------------------------------------------------------------------------

    def ask(
        self, who: Who, amount: int, *, has: int = 0, present: int | None = None
    ) -> Refusal | None:
        """Whether so much more of one caller's fits; None: it does. Nothing is taken.

        Args:
            who: the caller.
            amount: how much; no more than the limit.
            has: what was taken before for the same thing, which comes in parts.
            present: what there is now, where somebody else knows better.
        """
        limit = self.level.limit
        if limit is None:
            return None
        now = self._clock()
        self._forget_owed(now)
        present = self.level.present if present is None else present
        caller = self._callers.get(who.key)
        due = self._due(who, caller, amount, limit, has)
        missing = present + amount - (limit + self._room_beyond(caller, due))
        if missing <= 0:
            return None
        if caller is None:
            caller = self._enter(who)
        retry_after_s = self._advise(caller, missing, amount, due.part, now)
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
        )
        self._tidy(caller)
        return refusal

    def _due(self, who: Who, caller: _Caller | None, amount: int, limit: int, has: int) -> _Due:
        group = self._groups.get(who.group)
        held = 0 if caller is None else caller.held
        weight = _units(who.weight)
        weights, parts, of_group = self._weights + weight, 1, 0
        if group is not None:
            weights -= group.weight
            parts = group.members + (caller is None)
            of_group = group.held
        # A share is limit * weight / weights / parts; multiplied out, so that it is exact.
        return _Due(
            part=weight / weights / parts,
            share=limit * weight // (weights * parts),
            is_new=held <= has,
            is_within=(held + amount) * weights * parts <= limit * weight,
            is_of_due_group=of_group <= has or (of_group + amount) * weights <= limit * weight,
        )

    def _room_beyond(self, caller: _Caller | None, due: _Due) -> int:
        """How far beyond the limit a caller finds room; below zero: not even up to it."""
        if due.part == 1:  # alone
            return 0
        if due.is_of_due_group and due.is_new:
            return self._reserve
        if due.is_of_due_group and due.is_within:
            return self._reserve // 2
        own = 0 if caller is None else caller.owed
        if due.is_new:  # those who are in the same case do not wait for each other
            return self._reserve // 4 - self._owed_due + (own if caller and caller.is_due else 0)
        return own - self._owed

    def _advise(self, caller: _Caller, missing: int, amount: int, part: float, now: float) -> float:
        own = 0.0
        if now < caller.told_until:
            passed = (now - caller.told_since) / (caller.told_until - caller.told_since)
            own = caller.told * (1 - passed)
        # By turns, so many of the others' come before the last of one's own.
        before = (own + amount) / part - amount if part < 1 else None
        delay = self._rate.advise(missing, amount, before)
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
        """Nothing is owed any more to those who have not come in time."""
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
        """So much of one caller's has come, whether it fitted or not."""
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
        """So much of what one caller holds is there no more. `served`: it left as others will."""
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
        """The weight that is told last counts."""
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


def _units(weight: float) -> int:
    return max(1, round(weight * _WEIGHT_UNITS))
