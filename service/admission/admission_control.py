"""Decides which requests the front end refuses at a limit, and advises when to try again.

    Holding: enter ──▶ (it is converted) ──▶ admit ──▶ … ──▶ release, at its end
             its message     the converted request, a place, tokens  the place: once it is read

A request takes a place while it runs or has results that its stream has not read. While it runs it
also reserves tokens for its prompt and the longest output of each of its choices. This is the most
that it can need and is known in advance, so an accepted request is never refused later.

The size of unread results is not known in advance. It is charged as results arrive and released as
they are read (`service.delivery`). While unread results take too much memory, new requests are
refused, and running requests are held or ended. Callers share this limit too: up to the limit any
caller may use it. Beyond it is a reserve of an eighth, which only callers within their shares may
use.

The memory that a request itself takes in both processes (`service.admission.footprint`) counts from
the arrival of its message, through tokenization and the compilation of its grammar, to its end.

Each limit applies to all callers together, who have shares of it (`engine.fairness.shares`), and
optionally to each identity (`service.admission.bounds`). The advice when to try again follows from
the recent rate of release, and from the other callers that were told to try again earlier
(`engine.fairness.drain_rate`).

The engine bounds its queue itself (`engine.fairness.queue_room`). All methods run on one event
loop.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from engine.fairness.shares import Refusal
from service.admission.accounts import Account
from service.admission.bounds import Kind, bound_of
from service.admission.footprint import Footprint
from service.errors.call_errors import LimitReachedError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionBounds:
    """The limits on what may exist at the same time.

    Attributes:
        max_open: requests that run, or have results that their stream has not read.
        max_open_of_identity: the same for each identity, or None for no limit.
        max_tokens: tokens that running requests reserve, or None for no limit.
        max_tokens_of_identity: the same for each identity, or None for no limit.
        max_undelivered_bytes: approximate bytes of unread results, or None for no limit. Results
        kept after they have been read, or after their request has ended, do not count.
        max_live_bytes: approximate bytes that live requests take, or None for no limit.
    """

    max_open: int
    max_open_of_identity: int | None = None
    max_tokens: int | None = None
    max_tokens_of_identity: int | None = None
    max_undelivered_bytes: int | None = None
    max_live_bytes: int | None = None


class Charge(NamedTuple):
    """An amount for each limit: places, live bytes, and reserved tokens."""

    places: int = 0
    size: int = 0
    tokens: int = 0


NOTHING = Charge()
PLACE = Charge(places=1)


class Holding:
    """What one request takes from the limits.

    A context manager around the work for a request before it is live. On exit everything is
    released, unless the request's new owner has taken the holding over.

    Attributes:
        account: the account that is charged.
        taken: the amounts taken so far.
        is_taken_over: whether another owner releases it. Set by that owner.
        ticket: identifies the request if it is retried after a refusal. Empty if it cannot be
            recognized.
        weight: the account's weight, valid after `enter`: the group's weight, divided equally among
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

    def enter(self, message: Footprint) -> None:
        """Check that there is room for a request before any work is done for it, and charge its
        message. `message`: the message's footprint.

        Raises:
            LimitReachedError: no place is free, or too many bytes are unread or in use.
            FieldError: the message is too large even if no other request used memory.
        """
        control, charge = self._control, Charge(size=message.size)
        control.check_unread(self.account)
        self.take(charge, message.field, room_for=charge._replace(places=1))
        self.weight = self.account.weight * control.places.part_of(self.account)

    def admit(self, converted: Footprint, tokens: int) -> None:
        """Take a place and charge the converted request. `tokens`: how many tokens it reserves.

        Raises:
            LimitReachedError, FieldError: as in `enter`, or too many tokens are reserved. Nothing
                is taken.
        """
        self._control.check_unread(self.account)
        self.take(Charge(1, converted.size, tokens), converted.field)
        if self.ticket:
            for bound in self._control.bounds:
                if bound.tickets.places:
                    bound.got_in(self.account, self.ticket)

    def take(self, charge: Charge, field: str = "", *, room_for: Charge | None = None) -> None:
        """Take more for this request; see `AdmissionControl.take`."""
        before = self.taken
        self._control.take(
            self.account, charge, has=before, field=field, room_for=room_for, ticket=self.ticket
        )
        self.taken = Charge(*map(sum, zip(before, charge, strict=True)))

    def drop(self, footprint: Footprint) -> None:
        """Release some of the bytes early. Has no effect after `release`."""
        if self.taken.size:
            self._control.remove(self.account, Charge(size=footprint.size), served=False)
            self.taken = self.taken._replace(size=self.taken.size - footprint.size)

    def release(self, *, served: bool, keeps_place: bool = False) -> None:
        """Release everything that the request holds, except its place if `keeps_place`. May be
        called again. `served`: see `AdmissionControl.remove`.
        """
        kept = Charge(places=self.taken.places) if keeps_place else NOTHING
        gone = self.taken._replace(places=self.taken.places - kept.places)
        self._control.remove(self.account, gone, served=served)
        self.taken = kept

    def take_place(self) -> None:
        """Take a place again for an ended request that is being read again."""
        self._control.add(self.account, PLACE)
        self.taken = self.taken._replace(places=1)

    def __enter__(self) -> Holding:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_taken_over:
            self.release(served=False)


class AdmissionControl:
    """Counts what requests take, and refuses them at the limits; see the module.

    Attributes:
        freed: called with the number of bytes of results that were freed.
        places: the places for requests.
        bounds: all limits, in the order of Charge.
    """

    def __init__(
        self,
        limits: AdmissionBounds,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        freed: Callable[[int], None] = lambda size: None,
    ) -> None:
        """`clock`: returns monotonic seconds. `jitter`: returns numbers from 0 to 1, which spread
        the advised times. `freed`: called with the number of bytes of results that were freed.
        """
        self.freed = freed
        self.bounds = [bound_of(kind, clock, jitter) for kind in _kinds(limits)]
        self.places, self._bytes, self._tokens = self.bounds
        self._unread = bound_of(_unread(limits), clock, jitter)
        self._unread_level = self._unread.level
        self._leaving = 0  # of them
        self._beyond = 0  # of them

    def change(self, limits: AdmissionBounds) -> None:
        """Replace the limits. Requests that were already admitted stay."""
        for bound, kind in zip(self.bounds, _kinds(limits), strict=True):
            bound.change(kind)

    @property
    def open_requests(self) -> int:
        """The number of requests that have a place."""
        return self.places.present

    @property
    def reserved_tokens(self) -> int:
        """The number of tokens that all running requests reserve."""
        return self._tokens.present

    @property
    def live_bytes(self) -> int:
        """The approximate number of bytes that all live requests take."""
        return self._bytes.present

    @property
    def unread_bytes(self) -> int:
        """The approximate number of bytes that unread results take."""
        return self._unread.present

    @property
    def is_empty(self) -> bool:
        """Whether nothing is taken."""
        return not any(bound.present for bound in (*self.bounds, self._unread))

    # Refusing

    def has_room(self, account: Account) -> bool:
        """Whether an account's unread results may grow."""
        unread, level = self._unread, self._unread_level
        limit = level.limit
        if limit is None:
            return True
        present = level.present - self._beyond
        if present - min(self._leaving, unread.reserve) <= limit:
            return True
        return present <= limit + unread.reserve and not unread.is_above_share(account)[0]

    def exceed(self, amount: int) -> None:
        """Record that `amount` unread bytes arrived without room, before the request could be held.
        They count as live bytes (`service.admission.footprint`), and take no room from others.
        """
        self._beyond += amount

    def leave(self, amount: int) -> None:
        """Record that `amount` unread bytes will leave soon: they are being sent, or belong to a
        request that was ended for lack of room. The reserve disregards them, so that no other
        request is ended on their account.
        """
        self._leaving += amount

    def check_unread(self, account: Account) -> None:
        """Refuse a call that would produce more results, if too many are unread and its caller has
        more than its share of them. Other callers are always admitted: a step that produced much
        output must not shut out callers that read their results.

        Raises:
            LimitReachedError: the caller has too many unread results.
        """
        level = self._unread_level
        is_full = level.limit is not None and level.present > level.limit
        if is_full and self._unread.is_above_share(account)[0]:
            raise self.no_room(account)

    def no_room(self, account: Account) -> LimitReachedError:
        """Return the error to raise when `has_room` is false."""
        unread = self._unread
        is_above, share = unread.is_above_share(account)
        held, present = unread.held_by(account), unread.present
        return unread.error(
            Refusal(
                limit=unread.limit or 0,
                present=present,
                held=held,
                share=share,
                is_above_share=is_above and held < present,
                retry_after_s=unread.level.advise(0),  # how much it will take is not known
            ),
            0,
        )

    def check(
        self,
        account: Account,
        charge: Charge,
        *,
        has: Charge = NOTHING,
        field: str = "",
        ticket: str = "",
    ) -> None:
        """Refuse a charge that does not fit. Cheap; call it before any work is done.

        Args:
            account: the account that is charged.
            charge: the amounts that it would take.
            has: the amounts that the same request has already taken.
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
        """Take all of a charge or nothing; see `check`. `room_for`: the amounts that must fit, if
        they differ from the charge.

        Raises:
            LimitReachedError, FieldError: as in `check`.
        """
        wanted = charge if room_for is None else room_for
        self.check(account, wanted, has=has, field=field, ticket=ticket)
        for bound, amount in zip(self.bounds, charge, strict=True):
            bound.add(account, amount)

    def add(self, account: Account, charge: Charge) -> None:
        """Take a charge, even if it does not fit."""
        for bound, amount in zip(self.bounds, charge, strict=True):
            bound.add(account, amount)

    def remove(self, account: Account, charge: Charge, *, served: bool = True) -> None:
        """Release a charge. `served`: False if the charge was undone, and must not count toward the
        release rate.
        """
        for bound, amount in zip(self.bounds, charge, strict=True):
            bound.remove(account, amount, served=served)

    def charge_unread(self, account: Account, amount: int, *, leaves: bool = False) -> None:
        """Count bytes of results that arrived, or (if negative) that were read or dropped.
        `leaves`: whether the bytes are among those that leave soon; see `leave`.
        """
        if leaves:
            self.leave(amount)
        if amount > 0:
            self._unread.add(account, amount)
        else:
            self._unread.remove(account, -amount, served=True)
            self.freed(-amount)

    def holding(self, account: Account, ticket: str = "") -> Holding:
        """Create an empty holding for a new request. `ticket`: see `Holding`."""
        return Holding(self, account, ticket)


def _kinds(limits: AdmissionBounds) -> tuple[Kind, Kind, Kind]:
    """Return the kinds of limits, in the order of Charge."""
    return _places(limits), _bytes(limits), _tokens(limits)


def _places(limits: AdmissionBounds) -> Kind:
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


def _bytes(limits: AdmissionBounds) -> Kind:
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


def _unread(limits: AdmissionBounds) -> Kind:
    return Kind(
        what="results of about {present} bytes were not read yet, of all callers together",
        remedy="read results as they come",
        reason="TOO_MANY_UNDELIVERED_BYTES",
        option="max_undelivered_bytes",
        limit=limits.max_undelivered_bytes,
    )


def _tokens(limits: AdmissionBounds) -> Kind:
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
