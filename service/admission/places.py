"""Limits how many streams of one kind are open. Clients may keep these streams open indefinitely.

    take ──▶ (refused, or a place) ──▶ the call … ──▶ its done callback gives the place back

An idle session, health Watch or WatchStatistics costs only about 30 KiB. It takes a place before
that memory is allocated. Each caller has a share of the places (`engine.fairness.shares`). Requests
have separate places (`service.admission.admission_control`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from service.admission.accounts import ANONYMOUS, Account, account_at
from service.admission.bounds import Kind, bound_of


class Places:
    """The places for one kind of stream. All methods run on one event loop."""

    def __init__(
        self,
        kind: Kind,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`clock`, `jitter`: see AdmissionControl."""
        self._bound = bound_of(kind, clock, jitter)

    def change(self, kind: Kind) -> None:
        """Replace the limits. Streams that are open stay open."""
        self._bound.change(kind)

    @property
    def taken(self) -> int:
        """The number of streams that are open now."""
        return self._bound.present

    @property
    def is_empty(self) -> bool:
        """Whether no place is taken."""
        return self._bound.is_empty

    def take(self, context: Any, account: Account | None = None) -> None:
        """Take a place for a call, until it is done.

        Args:
            context: the call's context.
            account: the account that is charged. None charges the host that the call comes from,
                because the caller is not known.

        Raises:
            LimitReachedError: no place is free.
        """
        bound = self._bound
        counted = account_at(ANONYMOUS, context.peer()) if account is None else account
        if (refusal := bound.ask(counted, 1)) is not None:
            raise bound.error(refusal, 1)
        bound.add(counted, 1)
        context.add_done_callback(lambda _: bound.remove(counted, 1, served=True))
