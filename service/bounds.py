"""A limit of the service: what all callers may have together, in shares (`engine.shares`), and what
each identity may have where the operator says so.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import HeadraceError
from engine.shares import Level, Refusal, Shares
from service.accounts import Account


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


def no_room(
    reason: str, what: str, remedy: str, *, option: str, refusal: Refusal
) -> LimitReachedError:
    """The error for a refusal. `what`: what there is; `remedy`: what the caller can do."""
    is_above = refusal.is_above_share
    others = ""
    if is_above:
        others = (
            f"; others want theirs, and this caller has {refusal.held}, where its share is now "
            f"{refusal.share}"
        )
    return LimitReachedError(
        reason,
        f"{what}; there may be {refusal.limit} ({option}){others}: {remedy}",
        option=option,
        limit=refusal.limit,
        present=refusal.present,
        retry_after_s=refusal.retry_after_s,
        held=refusal.held if is_above else None,
        share=refusal.share if is_above else None,
    )


class Bound:
    """One limit, and what counts towards it. All methods run on one event loop."""

    def __init__(
        self,
        limit: int | None,
        clock: Callable[[], float],
        jitter: Callable[[], float],
        *,
        limit_of_identity: int | None = None,
    ) -> None:
        """None: no limit. `clock`, `jitter`: see DrainRate."""
        self.shares = Shares(limit, clock, jitter)
        self.limit_of_identity = limit_of_identity
        self._clock = clock
        self._jitter = jitter
        self._of: dict[str, Level] = {}  # identities that have some

    @property
    def limit(self) -> int | None:
        """The most, of all; None: any."""
        return self.shares.limit

    @property
    def present(self) -> int:
        """What there is now, of all."""
        return self.shares.present

    @property
    def is_empty(self) -> bool:
        """Whether nobody has anything."""
        return not self._of

    def full_of_identity(self, account: Account, amount: int) -> Level | None:
        """What the account's identity has, where so much more would be too much."""
        own = self._of.get(account.identity)
        return own if own is not None and own.missing(amount) > 0 else None

    def ask(self, account: Account, amount: int, *, has: int = 0) -> Refusal | None:
        """Whether so much more fits, as far as all callers' limit goes; see `Shares.ask`."""
        return self.shares.ask(account, amount, has=has)

    def add(self, account: Account, amount: int) -> None:
        """So much has come."""
        if not amount:
            return
        self.shares.add(account, amount)
        own = self._of.get(account.identity)
        if own is None:
            own = self._of[account.identity] = Level(
                self.limit_of_identity, self._clock, self._jitter
            )
        own.add(amount)

    def remove(self, account: Account, amount: int, *, served: bool) -> None:
        """So much is there no more. `served`: it left as others will."""
        if not amount:
            return
        self.shares.remove(account, amount, served=served)
        own = self._of[account.identity]
        own.remove(amount, served=served)
        if not own.present:
            del self._of[account.identity]
