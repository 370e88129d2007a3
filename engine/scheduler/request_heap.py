"""Keeps the waiting requests in a policy's own order, O(log n) for each change."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from engine.contract.request import Request
from engine.contract.types import RequestKey


class RequestHeap:
    """A heap over the queue with lazy deletion: entries of requests that have left the queue are
    dropped when they reach the top, or once they are the majority.

    A request may have several entries, such as an old one from before it was preempted. That does
    no harm. Either the rank of a request never changes, or it is a time at which to check the
    request, and an early check has no effect.
    """

    def __init__(self, waiting: Mapping[RequestKey, Request]) -> None:
        """`waiting`: the queue, which is modified elsewhere."""
        self._waiting = waiting
        self._entries: list[tuple[tuple[float, ...], RequestKey, Request]] = []

    def __len__(self) -> int:
        """The number of entries, including those of requests that no longer wait."""
        return len(self._entries)

    def push(self, rank: tuple[float, ...], request: Request) -> None:
        """Add a waiting request; the lowest rank comes first, then the lowest key."""
        heapq.heappush(self._entries, (rank, request.key, request))

    def peek(self) -> tuple[tuple[float, ...], Request] | None:
        """Return the first rank and its request, or None if no request waits. O(log n),
        amortised.
        """
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
        """Drop the entries of requests that no longer wait, if they are the majority. O(1),
        amortised over the requests that leave the queue.
        """
        if len(self._entries) > 2 * len(self._waiting) + 64:
            firsts: dict[RequestKey, tuple[tuple[float, ...], RequestKey, Request]] = {}
            for entry in self._entries:
                key = entry[1]
                if key in self._waiting and (key not in firsts or entry < firsts[key]):
                    firsts[key] = entry
            self._entries = list(firsts.values())
            heapq.heapify(self._entries)
