"""Streams that stay open for as long as their client likes: how many there may be of a kind.

    take ──▶ (refused, or a place) ──▶ the call … ──▶ its done callback gives the place back

A session, a health Watch or a WatchStatistics costs some 30 KiB and nothing else while nothing
happens on it: a place is taken before any of that is made. Requests have places of their own
(`service.admission`). Each caller has a share of them (`engine.shares`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from service.accounts import Account, account_at
from service.bounds import Bound, LimitReachedError, no_room
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
        self._bound = Bound(kind.limit, clock, jitter, limit_of_identity=kind.limit_of_identity)

    @property
    def taken(self) -> int:
        """How many are open now."""
        return self._bound.present

    @property
    def is_empty(self) -> bool:
        """Whether nobody has any."""
        return self._bound.is_empty

    def take(self, context: Any, account: Account | None = None) -> None:
        """Take a place for a call, until it is done.

        Args:
            context: of the call.
            account: for whom it counts; None: where it comes from, which is all that is known.

        Raises:
            LimitReachedError: there is none.
        """
        kind, bound = self._kind, self._bound
        counted = account_at(ANONYMOUS, context.peer()) if account is None else account
        if (own := bound.full_of_identity(counted, 1)) is not None:
            raise LimitReachedError(
                kind.reason + "_OF_IDENTITY",
                f"{own.present} {kind.name} of this caller are open; there may be {own.limit} "
                f"({kind.option_of_identity}): end one",
                option=kind.option_of_identity,
                limit=own.limit or 0,
                present=own.present,
                retry_after_s=own.advise(1),
            )
        if (refusal := bound.ask(counted, 1)) is not None:
            raise no_room(
                kind.reason,
                f"{refusal.present} {kind.name} are open",
                "end one",
                option=kind.option,
                refusal=refusal,
            )
        bound.add(counted, 1)
        context.add_done_callback(lambda _: bound.remove(counted, 1, served=True))
