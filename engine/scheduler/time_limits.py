"""Finds waiting requests that cannot finish within their time limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.contract.request import Request
from engine.contract.types import RequestKey
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.scheduler.request_heap import RequestHeap
from engine.scheduler.step_times import StepTimes

_CHECKS_PER_STEP = 16
"""How many waiting requests are checked after each step."""


class TimeLimits:
    """The time limits of the requests in a policy's queue.

    A limit cannot be met if the request's prefill would take longer than the time left, even with
    the whole token budget and at the speed of the fastest of the last 64 steps (see StepTimes).
    Before anything was measured, only limits that have passed count.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        waiting: Mapping[RequestKey, Request],
        max_batch_tokens: int,
    ) -> None:
        """`waiting`: the queue, which is modified elsewhere."""
        self._kv_cache = kv_cache
        self._waiting = waiting
        self._limits = RequestHeap(waiting)  # by the time at which to check a time limit
        self._hopeless: list[Request] = []
        self._times = StepTimes(max_batch_tokens)

    def __len__(self) -> int:
        """The number of entries, including those of requests that no longer wait."""
        return len(self._limits)

    def queued(self, request: Request) -> None:
        """Record that a request has entered the queue."""
        self._limits.tidy()
        if request.spec.time_limit_s is not None:
            needed = self._times.at_least(request.num_tokens)
            self._limits.push((_deadline(request) - needed,), request)

    def tidy(self) -> None:
        """Drop entries of requests that have left the queue, if there are many."""
        self._limits.tidy()

    def measured(self, num_tokens: int, seconds: float) -> None:
        """Record how long a step took."""
        self._times.add(num_tokens, seconds)

    def is_hopeless(self, request: Request, now: float) -> bool:
        """Whether a waiting request cannot finish in time. If so, `take` returns it."""
        if self._slack(request, now) >= 0:
            return False
        self._hopeless.append(request)
        return True

    def take(self, now: float) -> Iterable[Request]:
        """Return the requests that `is_hopeless` found. Also check a few requests deeper in the
        queue, and return those that can no longer finish in time.
        """
        hopeless, self._hopeless = self._hopeless, []
        for _ in range(_CHECKS_PER_STEP):
            first = self._limits.peek()
            if first is None or first[0][0] > now:
                break
            request = first[1]
            self._limits.pop()
            slack = self._slack(request, now)
            if slack < 0:
                hopeless.append(request)
            else:
                self._limits.push((now + slack,), request)
        self._limits.tidy()
        # A request may be in both, or have ended since `is_hopeless` found it.
        return {one.key: one for one in hopeless if one.key in self._waiting}.values()

    def _slack(self, request: Request, now: float) -> float:
        """Return how many seconds before its time limit a request that is started now can reach its
        next token. Negative if it cannot.
        """
        left = _deadline(request) - now
        slack = left - self._times.at_least(request.num_tokens)
        if slack < 0 <= left:
            # Looked up only if it matters: tokens found in the prefix cache need not be computed.
            found = self._kv_cache.find_prefix(request)
            slack = left - self._times.at_least(request.num_tokens - found)
        return slack


def _deadline(request: Request) -> float:
    """When a request's time limit passes, in monotonic seconds; infinite if it has no limit."""
    limit = request.spec.time_limit_s
    return float("inf") if limit is None else request.arrival + limit
