"""Which waiting requests cannot be done within their time limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.kv_cache.manager import KVCacheManager
from engine.request import Request
from engine.scheduler.request_heap import RequestHeap
from engine.scheduler.step_times import StepTimes
from engine.types import RequestKey

_CHECKS_PER_STEP = 16
"""Waiting requests whose time limits are looked at after one step."""


class TimeLimits:
    """The time limits of the requests in a policy's queue.

    One cannot be met if even the steps of the request's prefill, with the whole token budget for
    itself, would take longer than is left, at the pace of the fastest steps among the last 64 (see
    StepTimes). Before anything was measured, only a limit that has passed counts.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        waiting: Mapping[RequestKey, Request],
        max_batch_tokens: int,
    ) -> None:
        """`waiting`: the queue; it changes by itself."""
        self._kv_cache = kv_cache
        self._waiting = waiting
        self._limits = RequestHeap(waiting)  # by when a time limit is to be looked at
        self._hopeless: list[Request] = []
        self._times = StepTimes(max_batch_tokens)

    def __len__(self) -> int:
        """How many are kept, of requests that wait and of others."""
        return len(self._limits)

    def queued(self, request: Request) -> None:
        """A request has entered the queue."""
        self._limits.tidy()
        if request.spec.time_limit_s is not None:
            needed = self._times.at_least(request.num_tokens)
            self._limits.push((_deadline(request) - needed,), request)

    def tidy(self) -> None:
        """A request has left the queue."""
        self._limits.tidy()

    def measured(self, num_tokens: int, seconds: float) -> None:
        """Remember how long a step took."""
        self._times.add(num_tokens, seconds)

    def is_hopeless(self, request: Request, now: float) -> bool:
        """Whether a waiting request cannot be done in time; then `take` gives it out."""
        if self._slack(request, now) >= 0:
            return False
        self._hopeless.append(request)
        return True

    def take(self, now: float) -> Iterable[Request]:
        """Those that `is_hopeless` came across, and those deeper in the queue whose last moment has
        come, a few at a time.
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
        # One may be in both, or have ended since `is_hopeless` came across it.
        return {one.key: one for one in hopeless if one.key in self._waiting}.values()

    def _slack(self, request: Request, now: float) -> float:
        """Seconds by which a request that is started now can reach its next token before its time
        limit; below zero: it cannot.
        """
        left = _deadline(request) - now
        slack = left - self._times.at_least(request.num_tokens)
        if slack < 0 <= left:
            # Looked up only where it matters: what is found need not be computed.
            found = self._kv_cache.find_prefix(request)
            slack = left - self._times.at_least(request.num_tokens - found)
        return slack


def _deadline(request: Request) -> float:
    """Monotonic seconds; infinite without a time limit."""
    limit = request.spec.time_limit_s
    return float("inf") if limit is None else request.arrival + limit
