"""A step under construction by a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.contract.request import Request
from engine.contract.types import RequestKey
from engine.scheduler.pace import ChunkLimit, StepPace
from engine.scheduler.scheduled_batch import ScheduledRequest


class StepPendingError(Exception):
    """There are not enough blocks now, but a step that is still running may free some. Raised by
    the methods that a policy calls and caught by `Scheduler.schedule`; policies do not catch it.
    """


class StepPlan:
    """A step under construction by a policy.

    Attributes:
        budget: how many more tokens the step may take.
        parts: what the step contains.
        preempted: the requests that were preempted for the step.
    """

    __slots__ = (
        "_cut",
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
        cut: Callable[[Request, int, int], int] | None = None,
    ) -> None:
        """Begin a step.

        Args:
            budget: how many tokens the step may take.
            pace: keeps steps in which requests decode to a target time; None if there is no target.
            runnable: returns the running requests that could be in the step.
            cut: returns how many of a request's tokens the step takes at most, given the position
                of the first and their number; None if only budget and time limit them.
        """
        self.budget = self._size = budget
        self.parts: dict[RequestKey, ScheduledRequest] = {}
        self.preempted: set[RequestKey] = set()
        self._pace = pace
        self._runnable = runnable
        self._cut = cut
        self._limit: ChunkLimit | None = None
        self._knows_limit = False

    def put(self, part: ScheduledRequest) -> None:
        """Add a request's tokens to the step."""
        self.parts[part.request.key] = part
        self.budget -= part.num_rows
        if self._limit is not None:
            self._limit.put(part)

    def take_out(self, key: RequestKey) -> None:
        """Remove a request that no longer runs from the step, if it is in it."""
        part = self.parts.pop(key, None)
        if part is not None:
            self.budget += part.num_rows
        if self._limit is not None:
            self._limit.take_out(key, part)

    def chunk(self, request: Request, start: int) -> int:
        """Return how many of a request's tokens from `start` on the step may take now, or 0 if
        none.
        """
        wanted = len(request.token_ids) - start
        limit = self._find_limit() if wanted > 1 else None
        if limit is None:
            taken = min(wanted, self.budget)
        else:
            taken = limit.chunk(start, wanted, self.budget, self._size - self.budget)
        return taken if self._cut is None or taken < 2 else self._cut(request, start, taken)

    def has_time_for(self, requests: Iterable[Request]) -> bool:
        """Whether the empty step takes everything that these requests have to compute."""
        if self._cut is not None:
            return False
        limit = self._find_limit()
        return limit is None or limit.has_time_for(
            (one.num_computed_tokens, one.num_tokens_to_compute) for one in requests
        )

    def _find_limit(self) -> ChunkLimit | None:
        """Return how much prompts may take, or None if only the budget limits them. Computed when
        the first prompt is considered.
        """
        if self._pace is not None and not self._knows_limit:
            self._knows_limit = True
            self._limit = self._pace.limit(one for one in self._runnable() if _decodes(one))
            if self._limit is not None:
                self._limit.decoding.difference_update(self.parts)  # no prompt is in it yet
        return self._limit


def _decodes(request: Request) -> bool:
    return request.num_tokens_to_compute == 1 and request.num_output_tokens > 0
