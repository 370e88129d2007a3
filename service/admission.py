"""What the front end refuses because there is too much already, and when to come again.

    check_place, check_bytes ──▶ (it is converted) ──▶ reserve ─────▶ … ends ──▶ free
                                                       take_place ──▶ … is read ──▶ leave_place
    Holding ──▶ add: its message ─▶ add: what was made of it ─▶ drop: its message … ends ──▶ release

A request takes a place while it runs or has results that its stream has not read. While it runs it
also reserves tokens: its prompt, and the longest output that each of its choices may have. That is
what it may come to hold, known before it begins, so nothing that was accepted is refused later.
What results take that nobody has read is not known before; where it is too much, nothing new is
taken in until somebody reads. It is measured when a request asks, not counted with every token.

What a request itself holds, in both processes (`service.footprint`), counts from the moment its
message is there, also while it is tokenized and its form is compiled, to its end.

There is one account of all requests and one of each identity that has some; a limit is compared
with its own account, and the advice when to come again is from the rate at which that account's
requests (or tokens) left lately, and from how many others were told to come before
(`engine.drain_rate`). The engine bounds its queue itself. All
methods run on one event loop.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.drain_rate import DrainRate
from engine.errors import HeadraceError, InvalidRequestError
from service.accounts import Account
from service.footprint import Footprint

MEASURE_S = 0.1
"""How long a measured figure stands for what there is, in seconds."""
MEASURE_PART = 50
"""Of how many parts of the time measuring may take one."""


class LimitReachedError(HeadraceError):
    """There is as much as may be.

    Attributes:
        reason: for machines.
        option, limit: the limit and its name.
        present: what there is now.
        retry_after_s: when to try again.
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
    ) -> None:
        super().__init__(f"{message}, or try again in {retry_after_s:.1f} s")
        self.reason = reason
        self.option = option
        self.limit = limit
        self.present = present
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much there may be at the same time.

    Attributes:
        max_open: requests that run, or have results that their stream has not read.
        max_open_of_identity: the same of each identity; None: no more than of all.
        max_tokens: tokens that running requests reserve; None: any number.
        max_tokens_of_identity: the same of each identity; None: no more than of all.
        max_undelivered_bytes: about how many bytes of results that were not read, but for those of
            ended requests that are kept; None: any number.
        max_live_bytes: about how many bytes live requests hold; None: any number.
    """

    max_open: int
    max_open_of_identity: int | None = None
    max_tokens: int | None = None
    max_tokens_of_identity: int | None = None
    max_undelivered_bytes: int | None = None
    max_live_bytes: int | None = None


class Level:
    """How much there is of something that has a limit, and how fast it leaves where there is much
    of it: from half of the limit on, until there is less than a quarter. Where there is little,
    little leaves, and that says nothing of a full house.

    Attributes:
        limit: the most; None: any.
        present: what there is now.
    """

    __slots__ = ("_is_much", "_rate", "limit", "present")

    def __init__(
        self, limit: int | None, clock: Callable[[], float], jitter: Callable[[], float]
    ) -> None:
        """`clock`, `jitter`: see DrainRate."""
        self.limit = limit
        self.present = 0
        self._is_much = False
        self._rate = DrainRate(clock, jitter)

    def missing(self, amount: int) -> int:
        """How much must leave before so much more can come; none of it: 0 or less."""
        return 0 if self.limit is None else self.present + amount - self.limit

    def advise(self, amount: int) -> float:
        """When to come again with so much that is refused now; see DrainRate."""
        return self._rate.advise(self.missing(amount), amount)

    def add(self, amount: int) -> None:
        """So much has come."""
        self.present += amount
        if not self._is_much and self.limit is not None and 2 * self.present >= self.limit:
            self._is_much = True
            self._rate.begin()

    def remove(self, amount: int, *, served: bool) -> None:
        """So much is there no more. `served`: it left as others will."""
        self.present -= amount
        if not self._is_much:
            return
        if served:
            self._rate.left(amount)
        self._is_much = self.limit is not None and 4 * self.present >= self.limit


class _Account:
    """What all requests, or those of one identity, have now."""

    __slots__ = ("bytes", "places", "tokens")

    def __init__(
        self,
        max_open: int | None,
        max_tokens: int | None,
        max_bytes: int | None,
        clock: Callable[[], float],
        jitter: Callable[[], float],
    ) -> None:
        self.places = Level(max_open, clock, jitter)
        self.tokens = Level(max_tokens, clock, jitter)
        self.bytes = Level(max_bytes, clock, jitter)

    @property
    def is_empty(self) -> bool:
        return not (self.places.present or self.tokens.present or self.bytes.present)


class Holding:
    """The bytes that one request holds, as admission counts them.

    A context manager, around what is done for a request before it is live: they are released at the
    end of it, unless whoever has the request then took them over.
    """

    __slots__ = ("_account", "_control", "_is_taken_over", "size")

    def __init__(self, control: AdmissionControl, account: Account) -> None:
        self._control = control
        self._account = account
        self._is_taken_over = False
        self.size = 0

    def add(self, footprint: Footprint) -> None:
        """Hold so many bytes more.

        Raises:
            LimitReachedError: all live requests would hold too many. Nothing is added.
            InvalidRequestError: this one alone would.
        """
        self._control.hold(self._account, self.size, footprint)
        self.size += footprint.size

    def drop(self, footprint: Footprint) -> None:
        """A part of them is free before the others. Harmless after `release`."""
        if self.size:
            self._control.release(self._account, footprint.size, served=False)
            self.size -= footprint.size

    def take_over(self) -> None:
        """The caller releases them."""
        self._is_taken_over = True

    def release(self, *, served: bool) -> None:
        """The request holds nothing any more. Harmless when repeated. `served`: see
        `AdmissionControl.leave_place`.
        """
        self._control.release(self._account, self.size, served=served)
        self.size = 0

    def __enter__(self) -> Holding:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_taken_over:
            self.release(served=False)


class AdmissionControl:
    """See the module."""

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`clock`: monotonic seconds. `jitter`: numbers from 0 to 1, that spread the advice."""
        self._limits = limits
        self._clock = clock
        self._jitter = jitter
        self._all = _Account(
            limits.max_open, limits.max_tokens, limits.max_live_bytes, clock, jitter
        )
        self._of: dict[str, _Account] = {}  # identities that have something
        self._undelivered = 0
        self._measure_at = 0.0
        self._byte_rate = DrainRate(clock, jitter)

    @property
    def reserved_tokens(self) -> int:
        """Tokens that all running requests reserve."""
        return self._all.tokens.present

    @property
    def live_bytes(self) -> int:
        """About how many bytes all live requests hold."""
        return self._all.bytes.present

    # Refusing

    def check_place(self, account: Account) -> None:
        """Refuse a request for which there is no place. Costs nothing: to be called before any
        work is done for a request.

        Raises:
            LimitReachedError: too many requests of this identity, or of all, are open.
        """
        own, everyone = self._of.get(account.identity), self._all.places
        if own is not None and own.places.missing(1) > 0:
            places = own.places
            raise LimitReachedError(
                "TOO_MANY_REQUESTS_OF_IDENTITY",
                f"{places.present} requests of this caller are running or have results that were "
                f"not read yet; each caller may have {places.limit} (max_requests_per_identity): "
                "read the results",
                option="max_requests_per_identity",
                limit=places.limit or 0,
                present=places.present,
                retry_after_s=places.advise(1),
            )
        if everyone.missing(1) > 0:
            most = self._limits.max_open
            raise LimitReachedError(
                "TOO_MANY_OPEN_REQUESTS",
                f"{everyone.present} requests are running or have results that were not read yet; "
                f"there may be {most} (max_open_requests): read the results",
                option="max_open_requests",
                limit=most,
                present=everyone.present,
                retry_after_s=everyone.advise(1),
            )

    def check_bytes(self, measure: Callable[[], int]) -> None:
        """Refuse any request where too many bytes of results were not read.

        Args:
            measure: tells how many there are. Asked ten times a second at most, and less often if
                it takes long: one part in MEASURE_PART of the time.

        Raises:
            LimitReachedError: there are too many.
        """
        most = self._limits.max_undelivered_bytes
        if most is None:
            return
        began = self._clock()
        if began >= self._measure_at:
            measured = measure()
            if measured and not self._undelivered:
                self._byte_rate.begin()  # all had been read
            self._undelivered = measured
            now = self._clock()
            self._measure_at = now + max(MEASURE_S, MEASURE_PART * (now - began))
        present = self._undelivered
        if present > most:
            raise LimitReachedError(
                "TOO_MANY_UNDELIVERED_BYTES",
                f"results of about {present} bytes were not read yet, of all callers together; "
                f"there may be {most} (max_undelivered_bytes): read results as they come",
                option="max_undelivered_bytes",
                limit=most,
                present=present,
                # How much it will take is not known: it claims nothing.
                retry_after_s=self._byte_rate.advise(present - most, 0),
            )

    def _check_live_bytes(self, size: int, more: Footprint) -> None:
        most = self._limits.max_live_bytes
        if most is None:
            return
        if size > most:
            raise InvalidRequestError(
                more.field,
                f"takes most of the {size} bytes that this request would hold in the server; at "
                f"most {most} can be accepted here (max_live_bytes): make it smaller",
            )
        level = self._all.bytes
        if level.missing(more.size) > 0:
            raise LimitReachedError(
                "TOO_MANY_LIVE_BYTES",
                f"requests that wait or run hold about {level.present} bytes, and this one needs "
                f"{more.size} more; there may be {most} (max_live_bytes): send smaller ones",
                option="max_live_bytes",
                limit=most,
                present=level.present,
                retry_after_s=level.advise(more.size),
            )

    def delivered(self, num_bytes: int) -> None:
        """So much was read."""
        self._byte_rate.left(num_bytes)

    def _check_tokens(self, account: Account, tokens: int) -> None:
        own = self._of.get(account.identity)
        checks = (
            (
                self._limits.max_tokens_of_identity,
                own,
                "max_reserved_tokens_per_identity",
                "TOO_MANY_TOKENS_OF_IDENTITY",
                "of this caller ",
            ),
            (self._limits.max_tokens, self._all, "max_reserved_tokens", "TOO_MANY_TOKENS", ""),
        )
        for most, _, option, _, _ in checks:
            if most is not None and tokens > most:
                raise InvalidRequestError(
                    "stop.max_tokens",
                    f"makes a request of {tokens} tokens (its prompt, and max_tokens for each of "
                    f"its n choices); at most {most} can be accepted here ({option}): ask for "
                    "fewer tokens or choices, or shorten the prompt",
                )
        for most, counted, option, reason, whose in checks:
            if most is None or counted is None or counted.tokens.missing(tokens) <= 0:
                continue
            raise LimitReachedError(
                reason,
                f"running requests {whose}reserve {counted.tokens.present} tokens, and this one "
                f"needs {tokens} (its prompt, and max_tokens for each of its n choices); there may "
                f"be {most} ({option}): ask for fewer",
                option=option,
                limit=most,
                present=counted.tokens.present,
                retry_after_s=counted.tokens.advise(tokens),
            )

    # Counting

    def take_place(self, account: Account) -> None:
        """A request begins, or one that had ended has a reader again."""
        if not self._all.places.present:
            self._byte_rate.begin()  # without requests there was nothing to be read
        self._all.places.add(1)
        self._own(account).places.add(1)

    def leave_place(self, account: Account, *, served: bool = True) -> None:
        """A request has ended, and no stream has anything left to read of it. `served`: not for one
        that was taken back: it says nothing of the rate.
        """
        self._all.places.remove(1, served=served)
        own = self._of[account.identity]
        own.places.remove(1, served=served)
        self._tidy(account, own)

    def reserve(self, account: Account, tokens: int) -> None:
        """Reserve a request's tokens.

        Raises:
            LimitReachedError: too many are reserved by this identity, or by all.
            InvalidRequestError: there could never be so many.
        """
        self._check_tokens(account, tokens)
        self._all.tokens.add(tokens)
        self._own(account).tokens.add(tokens)

    def free(self, account: Account, tokens: int, *, served: bool = True) -> None:
        """A request with these tokens does not run any more. `served`: see `leave_place`."""
        self._all.tokens.remove(tokens, served=served)
        own = self._of[account.identity]
        own.tokens.remove(tokens, served=served)
        self._tidy(account, own)

    def holding(self, account: Account) -> Holding:
        """For what a new request will hold."""
        return Holding(self, account)

    def hold(self, account: Account, held: int, more: Footprint) -> None:
        """See `Holding`. `held`: what the request holds without it."""
        self._check_live_bytes(held + more.size, more)
        if more.size:
            self._all.bytes.add(more.size)
            self._own(account).bytes.add(more.size)

    def release(self, account: Account, size: int, *, served: bool) -> None:
        """See `Holding`."""
        if not size:
            return
        own = self._of[account.identity]
        for counted in (self._all, own):
            counted.bytes.remove(size, served=served)
        self._tidy(account, own)

    def _own(self, account: Account) -> _Account:
        own = self._of.get(account.identity)
        if own is None:
            limits = self._limits
            own = self._of[account.identity] = _Account(
                limits.max_open_of_identity,
                limits.max_tokens_of_identity,
                None,
                self._clock,
                self._jitter,
            )
        return own

    def _tidy(self, account: Account, own: _Account) -> None:
        """Identities without requests take no room."""
        if own.is_empty:
            del self._of[account.identity]
