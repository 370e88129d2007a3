"""Decides what the front end refuses because a limit is reached, and advises when to try again.

    Holding: enter ──▶ (it is converted) ──▶ admit ──▶ … ──▶ release, at its end
             its message     what was made of it, a place, tokens    the place: once it is read

A request takes a place while it runs or has results that its stream has not read. While it runs it
also reserves tokens: its prompt, and the longest output of each of its choices. This is the most
that it can need and is known in advance, so an accepted request is never refused later. The size of
unread results is not known in advance; if they are too large, new requests are refused until
results are read. It is measured when a request asks, not counted with every token.

The memory that a request itself holds in both processes (`service.footprint`) counts from the
arrival of its message, through tokenizing and the compilation of its grammar, to its end.

Each limit applies to all callers together, who have shares of it (`engine.shares`), and optionally
to each identity (`service.bounds`). The advice when to try again follows from the recent rate of
release, and from the others that were told to try again earlier (`engine.drain_rate`). Unread bytes
are shared too: if there are too many, only callers with more than their share are refused.

The engine bounds its queue itself (`engine.queue_room`). All methods run on one event loop.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from engine.drain_rate import DrainRate
from engine.shares import Shares
from engine.types import CallerKey
from service.accounts import Account
from service.bounds import Kind, LimitReachedError, bound_of
from service.footprint import Footprint

MEASURE_S = 0.1
"""How long a measured size is used, in seconds."""
MEASURE_PART = 50
"""Measuring may take at most one in this many parts of the time."""


Measure = Callable[[], Mapping[CallerKey, tuple[Account, int]]]
"""Returns how many bytes of unread results each account has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits on what may exist at the same time.

    Attributes:
        max_open: requests that run, or have results that their stream has not read.
        max_open_of_identity: the same for each identity; None: no limit of its own.
        max_tokens: tokens that running requests reserve; None: any number.
        max_tokens_of_identity: the same for each identity; None: no limit of its own.
        max_undelivered_bytes: about how many bytes of unread results, without kept results of ended
            requests; None: any number.
        max_live_bytes: about how many bytes live requests hold; None: any number.
    """

    max_open: int
    max_open_of_identity: int | None = None
    max_tokens: int | None = None
    max_tokens_of_identity: int | None = None
    max_undelivered_bytes: int | None = None
    max_live_bytes: int | None = None


class Charge(NamedTuple):
    """How much something takes of each limit: places, live bytes, and reserved tokens."""

    places: int = 0
    size: int = 0
    tokens: int = 0


NOTHING = Charge()
PLACE = Charge(places=1)


class Holding:
    """What one request takes from the limits.

    A context manager around the work for a request before it is live. At its end everything is
    released, unless the request's new owner has taken the holding over.

    Attributes:
        account: whom it is charged to.
        taken: what it has taken so far.
        is_taken_over: whether another owner releases it. Set by that owner.
        ticket: what the request is known by if it comes again after a refusal; empty: it is not.
        weight: its account's weight, once it has entered: the group's weight, divided equally among
            the accounts of the group that have requests.
    """

    __slots__ = ("_control", "account", "is_taken_over", "taken", "ticket", "weight")

    def __init__(self, control: AdmissionControl, account: Account, ticket: str) -> None:
        self._control = control
        self.is_taken_over = False
        self.account = account
        self.ticket = ticket
        self.taken = NOTHING
        self.weight = account.weight

    def enter(self, message: Footprint, measure: Measure) -> None:
        """Check that there is room for a request before any work is done for it, and charge its
        message.

        Args:
            message: the footprint of its message.
            measure: see `AdmissionControl.check_bytes`.

        Raises:
            LimitReachedError: there is no place, or too many bytes are unread or held.
            FieldError: it is too large, even if nobody else held anything.
        """
        control, charge = self._control, Charge(size=message.size)
        control.check_bytes(self.account, measure)
        self.take(charge, message.field, room_for=charge._replace(places=1))
        self.weight = self.account.weight * control.places.part_of(self.account)

    def admit(self, converted: Footprint, tokens: int, measure: Measure) -> None:
        """Take a place, and charge the converted request. `tokens`: how many it reserves.

        Raises:
            LimitReachedError, FieldError: as `enter`, or there are too many tokens. Nothing is
                taken.
        """
        self._control.check_bytes(self.account, measure)
        self.take(Charge(1, converted.size, tokens), converted.field)
        if self.ticket:
            for bound in self._control.bounds:
                if bound.line.places:
                    bound.got_in(self.account, self.ticket)

    def take(self, charge: Charge, field: str = "", *, room_for: Charge | None = None) -> None:
        """Take more; see `AdmissionControl.take`."""
        before = self.taken
        self._control.take(
            self.account, charge, has=before, field=field, room_for=room_for, ticket=self.ticket
        )
        self.taken = Charge(*map(sum, zip(before, charge, strict=True)))

    def drop(self, footprint: Footprint) -> None:
        """Release a part of the bytes early. Harmless after `release`."""
        if self.taken.size:
            self._control.remove(self.account, Charge(size=footprint.size), served=False)
            self.taken = self.taken._replace(size=self.taken.size - footprint.size)

    def release(self, *, served: bool, keeps_place: bool = False) -> None:
        """Release everything that the request holds, except its place if `keeps_place`. Harmless if
        repeated. `served`: see `AdmissionControl.remove`.
        """
        kept = Charge(places=self.taken.places) if keeps_place else NOTHING
        gone = self.taken._replace(places=self.taken.places - kept.places)
        self._control.remove(self.account, gone, served=served)
        self.taken = kept

    def take_place(self) -> None:
        """Take a place again for an ended request that has a reader again."""
        self._control.add(self.account, PLACE)
        self.taken = self.taken._replace(places=1)

    def __enter__(self) -> Holding:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_taken_over:
            self.release(served=False)


class AdmissionControl:
    """See the module.

    Attributes:
        places: the places for requests.
        bounds: all limits, in the order of Charge.
    """

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`clock`: monotonic seconds. `jitter`: returns numbers from 0 to 1, which spread the
        advised times.
        """
        self._clock = clock
        self.places = bound_of(_places(limits), clock, jitter)
        self._bytes = bound_of(_bytes(limits), clock, jitter)
        self._tokens = bound_of(_tokens(limits), clock, jitter)
        self.bounds = self.places, self._bytes, self._tokens  # in the order of Charge
        self._max_unread = limits.max_undelivered_bytes
        self._unread: Shares[Account] = Shares(limits.max_undelivered_bytes, clock, jitter)
        self._unread_of: dict[CallerKey, tuple[Account, int]] = {}
        self._measure_at = 0.0
        self._byte_rate = DrainRate(clock, jitter)

    @property
    def open_requests(self) -> int:
        """How many requests have a place."""
        return self.places.present

    @property
    def reserved_tokens(self) -> int:
        """How many tokens all running requests reserve."""
        return self._tokens.present

    @property
    def live_bytes(self) -> int:
        """About how many bytes all live requests hold."""
        return self._bytes.present

    @property
    def is_empty(self) -> bool:
        """Whether nothing is taken."""
        return self.places.is_empty and self._tokens.is_empty and self._bytes.is_empty

    # Refusing

    def check_bytes(self, account: Account, measure: Measure) -> None:
        """Refuse a request if too many bytes of results are unread, and its caller has more than
        its share of them.

        Args:
            account: the caller's.
            measure: returns how many each account has. Called at most ten times a second, and less
                often if it is slow: it may take one part in MEASURE_PART of the time.

        Raises:
            LimitReachedError: too many bytes are unread.
        """
        unread = self._unread
        most = self._max_unread
        if most is None:
            return
        began = self._clock()
        if began >= self._measure_at:
            before = unread.level.present
            self._set_unread(measure())
            if unread.level.present and not before:
                self._byte_rate.begin()  # everything had been read
            now = self._clock()
            self._measure_at = now + max(MEASURE_S, MEASURE_PART * (now - began))
        present = unread.level.present
        if present <= most:
            return
        is_above, share = unread.is_above_share(account)
        if is_above:
            held = unread.held_by(account)
            has_others = held < present
            others = f"; this caller has {held}, where its share is now {share}"
            raise LimitReachedError(
                "TOO_MANY_UNDELIVERED_BYTES",
                f"results of about {present} bytes were not read yet, of all callers together; "
                f"there may be {most} (max_undelivered_bytes){others if has_others else ''}: read "
                "results as they come",
                option="max_undelivered_bytes",
                limit=most,
                present=present,
                # How much the request will take is not known, so it claims nothing.
                retry_after_s=self._byte_rate.advise(present - most, 0),
                held=held if has_others else None,
                share=share if has_others else None,
            )

    def _set_unread(self, measured: Mapping[CallerKey, tuple[Account, int]]) -> None:
        before, self._unread_of = self._unread_of, dict(measured)
        for key, (account, size) in before.items():
            if key not in measured:
                self._unread.remove(account, size, served=False)
        for key, (account, size) in measured.items():
            self._unread.add(account, size)
            if key in before:
                self._unread.remove(account, before[key][1], served=False)

    def check(
        self,
        account: Account,
        charge: Charge,
        *,
        has: Charge = NOTHING,
        field: str = "",
        ticket: str = "",
    ) -> None:
        """Refuse a charge for which there is no room. Cheap; call it before any work is done.

        Args:
            account: whom it is charged to.
            charge: what it would take.
            has: what the same request has already taken.
            field: the field that takes the most bytes.
            ticket: see `Holding`.

        Raises:
            LimitReachedError: a limit is reached, for this identity or for all callers.
            FieldError: the charge is larger than the limit itself.
        """
        for bound, amount, held in zip(self.bounds, charge, has, strict=True):
            if not amount:
                continue
            if bound.most is not None and held + amount > bound.most:
                raise bound.error_alone(held + amount, field)
            if (refusal := bound.ask(account, amount, has=held, ticket=ticket)) is not None:
                raise bound.error(refusal, amount)

    # Counting

    def take(
        self,
        account: Account,
        charge: Charge,
        *,
        has: Charge = NOTHING,
        field: str = "",
        room_for: Charge | None = None,
        ticket: str = "",
    ) -> None:
        """Take all of a charge, or nothing; see `check`. `room_for`: what must fit, if that is
        more.

        Raises:
            LimitReachedError, FieldError: as `check`.
        """
        wanted = charge if room_for is None else room_for
        self.check(account, wanted, has=has, field=field, ticket=ticket)
        for bound, amount in zip(self.bounds, charge, strict=True):
            bound.add(account, amount)

    def add(self, account: Account, charge: Charge) -> None:
        """Take a charge, whether it fits or not."""
        for bound, amount in zip(self.bounds, charge, strict=True):
            bound.add(account, amount)

    def remove(self, account: Account, charge: Charge, *, served: bool = True) -> None:
        """Release a charge. `served`: False for a charge that was undone, which must not count for
        the rate.
        """
        for bound, amount in zip(self.bounds, charge, strict=True):
            bound.remove(account, amount, served=served)
        if charge.places and not self.places.present:
            self._set_unread({})  # without requests there are no results to read

    def delivered(self, num_bytes: int) -> None:
        """Count bytes that were read."""
        self._byte_rate.left(num_bytes)

    def holding(self, account: Account, ticket: str = "") -> Holding:
        """Make an empty holding for a new request. `ticket`: see `Holding`."""
        return Holding(self, account, ticket)


def _places(limits: Limits) -> Kind:
    return Kind(
        what="{present} requests{of} are running or have results that were not read yet",
        remedy="read the results",
        reason="TOO_MANY_OPEN_REQUESTS",
        option="max_open_requests",
        limit=limits.max_open,
        reason_of_identity="TOO_MANY_REQUESTS_OF_IDENTITY",
        option_of_identity="max_requests_per_identity",
        limit_of_identity=limits.max_open_of_identity,
    )


def _bytes(limits: Limits) -> Kind:
    return Kind(
        what="requests that wait or run hold about {present} bytes, and this one needs {amount} "
        "more",
        remedy="send smaller ones",
        reason="TOO_MANY_LIVE_BYTES",
        option="max_live_bytes",
        limit=limits.max_live_bytes,
        alone="takes most of the {amount} bytes that this request would hold in the server; at "
        "most {most} can be accepted here ({option}): make it smaller",
    )


def _tokens(limits: Limits) -> Kind:
    return Kind(
        what="running requests{of} reserve {present} tokens, and this one needs {amount} (its "
        "prompt, and max_tokens for each of its n choices)",
        remedy="ask for fewer",
        reason="TOO_MANY_TOKENS",
        option="max_reserved_tokens",
        limit=limits.max_tokens,
        reason_of_identity="TOO_MANY_TOKENS_OF_IDENTITY",
        option_of_identity="max_reserved_tokens_per_identity",
        limit_of_identity=limits.max_tokens_of_identity,
        field="stop.max_tokens",
        alone="makes a request of {amount} tokens (its prompt, and max_tokens for each of its n "
        "choices); at most {most} can be accepted here ({option}): ask for fewer tokens or "
        "choices, or shorten the prompt",
    )
