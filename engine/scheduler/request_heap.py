"""The waiting requests in an order of one's own, at O(log n) a change whatever leaves the queue."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from engine.request import Request
from engine.types import RequestKey


class RequestHeap:
    """A heap over the queue with lazy deletion: an entry whose request is not in the queue any more
    is dropped when it comes up, or when such entries are the most.

    A request may have several entries, such as an old one from before it was preempted. They are
    harmless where the rank is the request's own, as are early ones where the rank is a time at
    which something is to be looked at.
    """

    def __init__(self, waiting: Mapping[RequestKey, Request]) -> None:
        """`waiting`: the queue; it changes by itself."""
        self._waiting = waiting
        self._entries: list[tuple[tuple[float, ...], RequestKey, Request]] = []

    def __len__(self) -> int:
        """How many entries there are, of requests that wait and of others."""
        return len(self._entries)

    def push(self, rank: tuple[float, ...], request: Request) -> None:
        """Enter a request that waits; the lowest rank comes up first, then the lowest key."""
        heapq.heappush(self._entries, (rank, request.key, request))

    def peek(self) -> tuple[tuple[float, ...], Request] | None:
        """The first rank and its request; None: nothing waits. O(log n), amortised."""
        while self._entries:
            rank, key, request = self._entries[0]
            if key in self._waiting:
                return rank, request
            heapq.heappop(self._entries)
        return None

    def pop(self) -> None:
        """Drop the first entry."""
        heapq.heappop(self._entries)

    def tidy(self) -> None:
        """Drop what does not wait any more, if that is the most. O(1), amortised over the requests
        that leave the queue.
        """
        if len(self._entries) > 2 * len(self._waiting) + 64:
            firsts: dict[RequestKey, tuple[tuple[float, ...], RequestKey, Request]] = {}
            for entry in self._entries:
                key = entry[1]
                if key in self._waiting and (key not in firsts or entry < firsts[key]):
                    firsts[key] = entry
            self._entries = list(firsts.values())
            heapq.heapify(self._entries)
