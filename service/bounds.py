"""A limit of the service: what all callers may have together, in shares (`engine.shares`), and what
each identity may have where the operator says so. A `Bound` is asked and counts; `error` puts its
refusal into words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engine.errors import HeadraceError
from engine.shares import Level, Refusal, Shares
from service.accounts import Account
from service.call_errors import FieldError


class LimitReachedError(HeadraceError):
    """There is as much as may be, of all callers, of an identity, or beyond a caller's share.

    Attributes:
        reason: for machines.
        option, limit: the limit and its name.
        present: what there is now.
        retry_after_s: when to try again.
        held, share: what the caller has, and is due while others want theirs; None: that is not why
            it is refused.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        option: str,
        limit: int,
        present: int,
        retry_after_s: float,
        held: int | None = None,
        share: int | None = None,
    ) -> None:
        super().__init__(f"{message}, or try again in {retry_after_s:.1f} s")
        self.reason = reason
        self.option = option
        self.limit = limit
        self.present = present
        self.retry_after_s = retry_after_s
        self.held = held
        self.share = share


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a limit is of, and how its refusals are worded.

    Attributes:
        what: what there is, with {present}, {amount} (what was asked for) and {of}: " of this
            caller" where the identity's limit refuses.
        remedy: what the caller can do.
        reason, option, limit: for machines, the option that says how much there may be, and that;
            None: any.
        reason_of_identity, option_of_identity, limit_of_identity: the same of each identity; None:
            as much as of all.
        field: what is wrong with a request that alone is above the limit; empty: it depends.
        alone: how that is told, with {amount}, {most} and {option}.
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
    """There is as much as the identity's own limit allows."""


class Bound(Shares[Account]):
    """One limit, and what counts towards it. All methods run on one event loop. `bound_of` makes
    it.

    Attributes:
        kind: what it is of.
        most: what one request can have at most; None: any.
    """

    def __init__(self, kind: Kind, clock: Callable[[], float], jitter: Callable[[], float]) -> None:
        """`clock`, `jitter`: see DrainRate."""
        super().__init__(kind.limit, clock, jitter)
        limits = [most for most in (kind.limit, kind.limit_of_identity) if most is not None]
        self.kind = kind
        self.most = min(limits, default=None)

    @property
    def is_empty(self) -> bool:
        """Whether nobody has anything."""
        return not self.present

    def error(self, refusal: Refusal, amount: int) -> LimitReachedError:
        """The error for a refusal of so much."""
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
            f"{what}; there may be {refusal.limit} ({option}){others}: {kind.remedy}",
            option=option,
            limit=refusal.limit,
            present=refusal.present,
            retry_after_s=refusal.retry_after_s,
            held=refusal.held if is_above else None,
            share=refusal.share if is_above else None,
        )

    def error_alone(self, amount: int, field: str) -> FieldError:
        """The error for a request that alone is above the limit. `field`: what is wrong with it,
        where the kind does not say.
        """
        kind = self.kind
        most, option = kind.limit_of_identity, kind.option_of_identity
        if most is None or amount <= most:
            most, option = kind.limit, kind.option
        told = kind.alone.format(amount=amount, most=most, option=option)
        return FieldError(kind.field or field, told)


class _BoundOfIdentities(Bound):
    """One that each identity has a limit of its own in."""

    def __init__(self, kind: Kind, clock: Callable[[], float], jitter: Callable[[], float]) -> None:
        super().__init__(kind, clock, jitter)
        self._make_level = partial(Level, kind.limit_of_identity, clock, jitter)
        self._of: dict[str, Level] = {}  # identities that have some

    def ask(
        self, who: Account, amount: int, *, has: int = 0, present: int | None = None
    ) -> Refusal | None:
        """See `Shares.ask`; the identity's limit comes first."""
        own = self._of.get(who.identity)
        if own is None or own.missing(amount) <= 0:
            return super().ask(who, amount, has=has, present=present)
        return RefusalOfIdentity(
            limit=own.limit or 0,
            present=own.present,
            held=own.present,
            share=0,
            is_above_share=False,
            retry_after_s=own.advise(amount),
        )

    def add(self, who: Account, amount: int) -> None:
        """So much has come."""
        super().add(who, amount)
        if amount:
            own = self._of.get(who.identity)
            if own is None:
                own = self._of[who.identity] = self._make_level()
            own.add(amount)

    def remove(self, who: Account, amount: int, *, served: bool) -> None:
        """So much is there no more. `served`: it left as others will."""
        super().remove(who, amount, served=served)
        if amount:
            own = self._of[who.identity]
            own.remove(amount, served=served)
            if not own.present:
                del self._of[who.identity]


def bound_of(kind: Kind, clock: Callable[[], float], jitter: Callable[[], float]) -> Bound:
    """The bound of a kind. `clock`, `jitter`: see DrainRate."""
    made = Bound if kind.limit_of_identity is None else _BoundOfIdentities
    return made(kind, clock, jitter)
