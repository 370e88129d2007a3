"""A step that is being put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.batch import ScheduledRequest
from engine.request import Request
from engine.scheduler.pace import ChunkLimit, StepPace
from engine.types import RequestKey


class StepPendingError(Exception):
    """There are not enough blocks, and a step is still running whose end may free some: nothing is
    decided now. Raised by what a policy calls, caught by `Scheduler.schedule`; policies let it
    pass.
    """


class StepPlan:
    """A step that is being put together.

    Attributes:
        budget: how many tokens it may still take.
        parts: what is in it.
        preempted: the requests that were preempted for it.
    """

    __slots__ = (
        "_knows_limit",
        "_limit",
        "_pace",
        "_runnable",
        "_size",
        "budget",
        "parts",
        "preempted",
    )

    def __init__(
        self,
        budget: int,
        pace: StepPace | None = None,
        runnable: Callable[[], Iterable[Request]] = tuple,
    ) -> None:
        """Begin a step.

        Args:
            budget: how many tokens it may take.
            pace: keeps steps in which requests decode to a time; None: there is no such time.
            runnable: the requests that could be in it, of those that run.
        """
        self.budget = self._size = budget
        self.parts: dict[RequestKey, ScheduledRequest] = {}
        self.preempted: set[RequestKey] = set()
        self._pace = pace
        self._runnable = runnable
        self._limit: ChunkLimit | None = None
        self._knows_limit = False

    def put(self, part: ScheduledRequest) -> None:
        """Put a part in."""
        self.parts[part.request.key] = part
        self.budget -= part.num_tokens
        if self._limit is not None:
            self._limit.put(part)

    def take_out(self, key: RequestKey) -> None:
        """A request runs no more: take its part out, if it has one."""
        part = self.parts.pop(key, None)
        if part is not None:
            self.budget += part.num_tokens
        if self._limit is not None:
            self._limit.take_out(key, part)

    def chunk(self, request: Request, start: int) -> int:
        """How many of a request's tokens from `start` on it may take now; 0: none."""
        wanted = len(request.token_ids) - start
        limit = self._find_limit() if wanted > 1 else None
        if limit is None:
            return min(wanted, self.budget)
        return limit.chunk(start, wanted, self.budget, self._size - self.budget)

    def has_time_for(self, requests: Iterable[Request]) -> bool:
        """Whether it has time, while it is empty, for all that these have to compute."""
        limit = self._find_limit()
        return limit is None or limit.has_time_for(
            (one.num_computed_tokens, one.num_tokens_to_compute) for one in requests
        )

    def _find_limit(self) -> ChunkLimit | None:
        """What prompts may take, found out when the first one is looked at; None: there is no limit
        but the budget.
        """
        if self._pace is not None and not self._knows_limit:
            self._knows_limit = True
            self._limit = self._pace.limit(one for one in self._runnable() if _decodes(one))
            if self._limit is not None:
                self._limit.decoding.difference_update(self.parts)  # no prompt is in it yet
        return self._limit


def _decodes(request: Request) -> bool:
    """Whether somebody who has had a token waits for the next one."""
    return request.num_tokens_to_compute == 1 and request.num_output_tokens > 0
