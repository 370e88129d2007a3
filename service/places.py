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
from typing import Any

from service.accounts import Account, account_at
from service.bounds import Kind, bound_of
from service.callers import ANONYMOUS


class Places:
    """The places of one kind of streams. All methods run on one event loop."""

    def __init__(
        self,
        kind: Kind,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`clock`, `jitter`: as of AdmissionControl."""
        self._bound = bound_of(kind, clock, jitter)

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
        bound = self._bound
        counted = account_at(ANONYMOUS, context.peer()) if account is None else account
        if (refusal := bound.ask(counted, 1)) is not None:
            raise bound.error(refusal, 1)
        bound.add(counted, 1)
        context.add_done_callback(lambda _: bound.remove(counted, 1, served=True))
