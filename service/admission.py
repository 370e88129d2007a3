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

Each limit is one of all callers, in which everybody has a share (`engine.shares`), and perhaps one
of each identity (`service.bounds`). The advice when to come again is from the rate at which what
the limit counts left lately, and from how many others were told to come before
(`engine.drain_rate`).
Unread bytes are shared too: where there are too many, those who have more than their share of them
are refused, and nobody else.

The engine bounds its queue itself (`engine.queue_room`). All methods run on one event loop.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.drain_rate import DrainRate
from engine.errors import InvalidRequestError
from engine.shares import Shares
from engine.types import CallerKey
from service.accounts import Account
from service.bounds import Bound, LimitReachedError, no_room
from service.footprint import Footprint

MEASURE_S = 0.1
"""How long a measured figure stands for what there is, in seconds."""
MEASURE_PART = 50
"""Of how many parts of the time measuring may take one."""


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
    """See the module. `places`: those that requests take."""

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`clock`: monotonic seconds. `jitter`: numbers from 0 to 1, that spread the advice."""
        self._limits = limits
        self._clock = clock
        self.places = Bound(
            limits.max_open, clock, jitter, limit_of_identity=limits.max_open_of_identity
        )
        self._tokens = Bound(
            limits.max_tokens, clock, jitter, limit_of_identity=limits.max_tokens_of_identity
        )
        self._bytes = Bound(limits.max_live_bytes, clock, jitter)
        self._unread = Shares(limits.max_undelivered_bytes, clock, jitter)
        self._unread_of: dict[CallerKey, tuple[Account, int]] = {}
        self._measure_at = 0.0
        self._byte_rate = DrainRate(clock, jitter)

    @property
    def open_requests(self) -> int:
        """Requests that have a place."""
        return self.places.present

    @property
    def reserved_tokens(self) -> int:
        """Tokens that all running requests reserve."""
        return self._tokens.present

    @property
    def live_bytes(self) -> int:
        """About how many bytes all live requests hold."""
        return self._bytes.present

    @property
    def is_empty(self) -> bool:
        """Whether nobody has anything."""
        return self.places.is_empty and self._tokens.is_empty and self._bytes.is_empty

    def weight_of(self, account: Account) -> float:
        """What an account weighs: its part of its group's weight, among the accounts of that group
        that have requests.
        """
        return account.weight * self.places.shares.part_of(account)

    # Refusing

    def check_place(self, account: Account) -> None:
        """Refuse a request for which there is no place. Costs nothing: to be called before any
        work is done for a request.

        Raises:
            LimitReachedError: too many requests of this identity, or of all, are open.
        """
        if (own := self.places.full_of_identity(account, 1)) is not None:
            raise LimitReachedError(
                "TOO_MANY_REQUESTS_OF_IDENTITY",
                f"{own.present} requests of this caller are running or have results that were "
                f"not read yet; each caller may have {own.limit} (max_requests_per_identity): "
                "read the results",
                option="max_requests_per_identity",
                limit=own.limit or 0,
                present=own.present,
                retry_after_s=own.advise(1),
            )
        if (refusal := self.places.ask(account, 1)) is not None:
            raise no_room(
                "TOO_MANY_OPEN_REQUESTS",
                f"{refusal.present} requests are running or have results that were not read yet",
                "read the results",
                option="max_open_requests",
                refusal=refusal,
            )

    def check_bytes(
        self, account: Account, measure: Callable[[], Mapping[CallerKey, tuple[Account, int]]]
    ) -> None:
        """Refuse a request where too many bytes of results were not read, and its caller has more
        than a share of them.

        Args:
            account: the caller's.
            measure: tells how many each has. Asked ten times a second at most, and less often if it
                takes long: one part in MEASURE_PART of the time.

        Raises:
            LimitReachedError: there are too many.
        """
        unread = self._unread
        most = unread.limit
        if most is None:
            return
        began = self._clock()
        if began >= self._measure_at:
            before = unread.present
            self._set_unread(measure())
            if unread.present and not before:
                self._byte_rate.begin()  # all had been read
            now = self._clock()
            self._measure_at = now + max(MEASURE_S, MEASURE_PART * (now - began))
        present = unread.present
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
                # How much it will take is not known: it claims nothing.
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

    def delivered(self, num_bytes: int) -> None:
        """So much was read."""
        self._byte_rate.left(num_bytes)

    def _check_live_bytes(self, account: Account, size: int, more: Footprint) -> None:
        most = self._limits.max_live_bytes
        if most is None:
            return
        if size > most:
            raise InvalidRequestError(
                more.field,
                f"takes most of the {size} bytes that this request would hold in the server; at "
                f"most {most} can be accepted here (max_live_bytes): make it smaller",
            )
        if (refusal := self._bytes.ask(account, more.size, has=size - more.size)) is not None:
            raise no_room(
                "TOO_MANY_LIVE_BYTES",
                f"requests that wait or run hold about {refusal.present} bytes, and this one needs "
                f"{more.size} more",
                "send smaller ones",
                option="max_live_bytes",
                refusal=refusal,
            )

    def _check_tokens(self, account: Account, tokens: int) -> None:
        bound = self._tokens
        for most, option in (
            (bound.limit_of_identity, "max_reserved_tokens_per_identity"),
            (bound.limit, "max_reserved_tokens"),
        ):
            if most is not None and tokens > most:
                raise InvalidRequestError(
                    "stop.max_tokens",
                    f"makes a request of {tokens} tokens (its prompt, and max_tokens for each of "
                    f"its n choices); at most {most} can be accepted here ({option}): ask for "
                    "fewer tokens or choices, or shorten the prompt",
                )
        needs = (
            f"tokens, and this one needs {tokens} (its prompt, and max_tokens for each of its n "
            "choices)"
        )
        if (own := bound.full_of_identity(account, tokens)) is not None:
            raise LimitReachedError(
                "TOO_MANY_TOKENS_OF_IDENTITY",
                f"running requests of this caller reserve {own.present} {needs}; there may be "
                f"{own.limit} (max_reserved_tokens_per_identity): ask for fewer",
                option="max_reserved_tokens_per_identity",
                limit=own.limit or 0,
                present=own.present,
                retry_after_s=own.advise(tokens),
            )
        if (refusal := bound.ask(account, tokens)) is not None:
            raise no_room(
                "TOO_MANY_TOKENS",
                f"running requests reserve {refusal.present} {needs}",
                "ask for fewer",
                option="max_reserved_tokens",
                refusal=refusal,
            )

    # Counting

    def take_place(self, account: Account) -> None:
        """A request begins, or one that had ended has a reader again."""
        if not self.places.present:
            self._byte_rate.begin()  # without requests there was nothing to be read
        self.places.add(account, 1)

    def leave_place(self, account: Account, *, served: bool = True) -> None:
        """A request has ended, and no stream has anything left to read of it. `served`: not for one
        that was taken back: it says nothing of the rate.
        """
        self.places.remove(account, 1, served=served)

    def reserve(self, account: Account, tokens: int) -> None:
        """Reserve a request's tokens.

        Raises:
            LimitReachedError: too many are reserved by this identity, or by all.
            InvalidRequestError: there could never be so many.
        """
        self._check_tokens(account, tokens)
        self._tokens.add(account, tokens)

    def free(self, account: Account, tokens: int, *, served: bool = True) -> None:
        """A request with these tokens does not run any more. `served`: see `leave_place`."""
        self._tokens.remove(account, tokens, served=served)

    def holding(self, account: Account) -> Holding:
        """For what a new request will hold."""
        return Holding(self, account)

    def hold(self, account: Account, held: int, more: Footprint) -> None:
        """See `Holding`. `held`: what the request holds without it."""
        self._check_live_bytes(account, held + more.size, more)
        if more.size:
            self._bytes.add(account, more.size)

    def release(self, account: Account, size: int, *, served: bool) -> None:
        """See `Holding`."""
        if size:
            self._bytes.remove(account, size, served=served)
