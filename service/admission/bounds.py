"""A limit of the service: how much all callers together may have, divided into shares
(`engine.fairness.shares`), and optionally how much each identity may have. A `Bound` decides and
counts, and its `error` describes a refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engine.contract.errors import kept_places
from engine.fairness.shares import Level, Refusal, Shares
from service.admission.accounts import Account
from service.errors.call_errors import FieldError, LimitReachedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a limit applies to, and the wording of its refusals.

    Attributes:
        what: a description of what is in use, with the fields {present}, {amount} (the amount asked
            for) and {of} (" of this caller" if the identity's limit refuses).
        remedy: what the caller can do.
        reason, option, limit: the machine-readable reason, the option that sets the limit, and its
            value, or None for no limit.
        reason_of_identity, option_of_identity, limit_of_identity: the same for each identity, with
            None for no limit per identity.
        field: the field at fault if one request alone exceeds the limit; empty if it varies.
        alone: the message for that case, with the fields {amount}, {most} and {option}.
    """

    what: str
    remedy: str
    reason: str
    option: str
    limit: int | None
    reason_of_identity: str = ""
    option_of_identity: str = ""
    limit_of_identity: int | None = None
    field: str = ""
    alone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalOfIdentity(Refusal):
    """The identity's own limit is reached."""


class Bound(Shares[Account]):
    """One limit, and how much of it is used. All methods run on one event loop. Created by
    `bound_of`.

    Attributes:
        kind: what the limit applies to.
        most: the most that one request can have, or None for no limit.
    """

    def __init__(self, kind: Kind, clock: Callable[[], float], jitter: Callable[[], float]) -> None:
        """`clock`, `jitter`: see DrainRate."""
        super().__init__(kind.limit, clock, jitter)
        self.change(kind)

    def change(self, kind: Kind) -> None:
        """Replace the limits. Amounts already held beyond the new limits stay held."""
        limits = [most for most in (kind.limit, kind.limit_of_identity) if most is not None]
        self.kind = kind
        self.most = min(limits, default=None)
        self.set_limit(kind.limit)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in use."""
        return not self.present

    def error(self, refusal: Refusal, amount: int) -> LimitReachedError:
        """Return the error for the refusal of an amount."""
        kind = self.kind
        of_identity = isinstance(refusal, RefusalOfIdentity)
        option = kind.option_of_identity if of_identity else kind.option
        what = kind.what.format(
            present=refusal.present, amount=amount, of=" of this caller" if of_identity else ""
        )
        is_above = refusal.is_above_share
        others = ""
        if is_above:
            others = (
                f"; others want theirs, and this caller has {refusal.held}, where its share is now "
                f"{refusal.share}"
            )
        return LimitReachedError(
            kind.reason_of_identity if of_identity else kind.reason,
            f"{what}{kept_places(refusal.kept)}; there may be {refusal.limit} ({option}){others}: "
            f"{kind.remedy}",
            option=option,
            limit=refusal.limit,
            present=refusal.present,
            retry_after_s=refusal.retry_after_s,
            held=refusal.held if is_above else None,
            share=refusal.share if is_above else None,
        )

    def error_alone(self, amount: int, field: str) -> FieldError:
        """Return the error for a request that alone exceeds the limit. `field`: the field at fault,
        if the kind does not name it.
        """
        kind = self.kind
        most, option = kind.limit_of_identity, kind.option_of_identity
        if most is None or amount <= most:
            most, option = kind.limit, kind.option
        told = kind.alone.format(amount=amount, most=most, option=option)
        return FieldError(kind.field or field, told)


class _BoundOfIdentities(Bound):
    """A bound that also limits each identity."""

    def __init__(self, kind: Kind, clock: Callable[[], float], jitter: Callable[[], float]) -> None:
        self._of: dict[str, Level] = {}  # identities that have some
        super().__init__(kind, clock, jitter)
        self._make_level = partial(Level, clock=clock, jitter=jitter)

    def change(self, kind: Kind) -> None:
        """Replace the limits. Amounts already held beyond the new limits stay held."""
        super().change(kind)
        for own in self._of.values():
            own.limit = kind.limit_of_identity

    def ask(
        self,
        who: Account,
        amount: int,
        *,
        has: int = 0,
        present: int | None = None,
        ticket: str = "",
    ) -> Refusal | None:
        """See `Shares.ask`. The identity's limit is checked first, and ignores tickets."""
        own = self._of.get(who.identity)
        if own is None or own.missing(amount) <= 0:
            return super().ask(who, amount, has=has, present=present, ticket=ticket)
        return RefusalOfIdentity(
            limit=own.limit or 0,
            present=own.present,
            held=own.present,
            share=0,
            is_above_share=False,
            retry_after_s=own.advise(amount),
        )

    def add(self, who: Account, amount: int) -> None:
        """Add an amount to what a caller holds."""
        super().add(who, amount)
        if amount:
            own = self._of.get(who.identity)
            if own is None:
                own = self._of[who.identity] = self._make_level(self.kind.limit_of_identity)
            own.add(amount)

    def remove(self, who: Account, amount: int, *, served: bool) -> None:
        """Release an amount that a caller holds. `served`: whether it was released in the normal
        way, and so counts toward the release rate.
        """
        super().remove(who, amount, served=served)
        if amount:
            own = self._of[who.identity]
            own.remove(amount, served=served)
            if not own.present:
                del self._of[who.identity]


def bound_of(kind: Kind, clock: Callable[[], float], jitter: Callable[[], float]) -> Bound:
    """Create the bound for a kind. `clock`, `jitter`: see DrainRate."""
    made = Bound if kind.limit_of_identity is None else _BoundOfIdentities
    return made(kind, clock, jitter)
