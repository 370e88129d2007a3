"""Streams that stay open for as long as their client likes: how many there may be of a kind.

    take ──▶ (refused, or a place) ──▶ the call … ──▶ its done callback gives the place back

A session, a health Watch or a WatchStatistics costs some 30 KiB and nothing else while nothing
happens on it: a place is taken before any of that is made. Requests have places of their own
(`service.admission`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from service.accounts import Account, account_at
from service.admission import Level, LimitReachedError
from service.callers import ANONYMOUS


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of streams.

    Attributes:
        name: what they are called, in the plural.
        reason: of a refusal, for machines.
        option, limit: how many there may be, and the option that says so.
        option_of_identity, limit_of_identity: the same of each identity; None: as many as of all.
    """

    name: str
    reason: str
    option: str
    limit: int
    option_of_identity: str = ""
    limit_of_identity: int | None = None


class Places:
    """The places of one kind of streams. All methods run on one event loop."""

    def __init__(
        self,
        kind: Kind,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`clock`, `jitter`: as of AdmissionControl."""
        self._kind = kind
        self._clock = clock
        self._jitter = jitter
        self._all = Level(kind.limit, clock, jitter)
        self._of: dict[str, Level] = {}  # identities that have some

    @property
    def taken(self) -> int:
        """How many are open now."""
        return self._all.present

    def take(self, context: Any, account: Account | None = None) -> None:
        """Take a place for a call, until it is done.

        Args:
            context: of the call.
            account: for whom it counts; None: where it comes from, which is all that is known.

        Raises:
            LimitReachedError: there is none.
        """
        kind = self._kind
        if account is None:
            account = account_at(ANONYMOUS, context.peer())
        identity = account.identity
        own = self._of.get(identity)
        if own is not None and own.missing(1) > 0:
            self._refuse(own, kind.option_of_identity, " of this caller", "_OF_IDENTITY")
        if self._all.missing(1) > 0:
            self._refuse(self._all, kind.option, "", "")
        if own is None:
            own = self._of[identity] = Level(kind.limit_of_identity, self._clock, self._jitter)
        self._all.add(1)
        own.add(1)
        context.add_done_callback(lambda _: self._leave(identity))

    def _leave(self, identity: str) -> None:
        self._all.remove(1, served=True)
        own = self._of[identity]
        own.remove(1, served=True)
        if not own.present:
            del self._of[identity]

    def _refuse(self, full: Level, option: str, whose: str, suffix: str) -> None:
        raise LimitReachedError(
            self._kind.reason + suffix,
            f"{full.present} {self._kind.name}{whose} are open; there may be {full.limit} "
            f"({option}): end one",
            option=option,
            limit=full.limit or 0,
            present=full.present,
            retry_after_s=full.advise(1),
        )
