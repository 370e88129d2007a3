"""All timers of delivery. Each handles one kind of wait, and an owner has at most one wait of each
kind.

| kind | of | runs while | then |
|---|---|---|---|
| lease | a request | it is LEASED | it is cancelled |
| retention | a request | it is KEPT | its results are no longer kept |
| hold | a request | its stream takes nothing of it (`flow`) | it ends, or goes on without credit |
| unread | a stream | ended requests wait on it | they are dropped, if it took nothing meanwhile |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)


class Timer(Generic[Owner]):
    """One kind of wait, for many owners, on one event loop."""

    def __init__(self, then: Callable[[Owner], None]) -> None:
        """`then`: called with an owner whose time is over."""
        self._then = then
        self._handles: dict[Owner, asyncio.TimerHandle] = {}

    def start(self, owner: Owner, delay_s: float) -> None:
        """Start an owner's wait now, or restart it."""
        self.stop(owner)
        loop = asyncio.get_running_loop()
        self._handles[owner] = loop.call_later(delay_s, self._fire, owner)

    def stop(self, owner: Owner) -> None:
        """Stop an owner's wait. Has no effect if there is none."""
        handle = self._handles.pop(owner, None)
        if handle is not None:
            handle.cancel()

    def is_running(self, owner: Owner) -> bool:
        """Return whether this owner waits."""
        return owner in self._handles

    def _fire(self, owner: Owner) -> None:
        del self._handles[owner]
        self._then(owner)
