"""Limits the prompt tokens of a step with decoding requests, so that it meets the target step time.

    steps measured ──▶ StepCost ──▶ a step that must not take long: ChunkLimit ──▶ chunks

A limit is made for each step. It starts with the target time, minus a tenth for estimation errors,
minus what the step would cost without prompts if all requests that can decode did. So there are
time and tokens for both, whether the policy puts prompts or decodes in first. Each chunk then takes
some of the remaining time. A chunk that is cut ends at a block boundary. If steps are padded to
certain sizes (captured on CUDA), it ends where the step has such a size.

The first prompt of a step gets at least the rest of a block, however little time there is. So a
prompt of n tokens takes at most n / block_size + 1 steps in which it is the first. Until a step
with prompts has been measured, it gets no more than that. After that, a step has at most twice as
many prompt tokens as recent steps, so that the estimate is not used far beyond what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.contract.request import Request
from engine.contract.types import RequestKey
from engine.scheduler.scheduled_batch import ScheduledBatch, ScheduledRequest
from engine.scheduler.step_cost import StepCost, StepCosts, StepShape, pairs

_AIM = 0.9
"""The fraction of the target time that steps aim for."""
_GROWTH = 2
"""The most prompt tokens of a step, as a multiple of the most in recent steps."""


class ChunkLimit:
    """How much of one step prompts may take. Made by `StepPace.limit`.

    Attributes:
        decoding: the decoding requests that are not in the step yet.
    """

    __slots__ = (
        "_block_size",
        "_costs",
        "_fit_tokens",
        "_num_prompt_tokens",
        "_seconds",
        "_tokens",
        "decoding",
    )

    def __init__(
        self,
        costs: StepCosts | None,
        *,
        seconds: float,
        tokens: int,
        decoding: set[RequestKey],
        block_size: int,
        fit_tokens: Callable[[int], int] | None,
    ) -> None:
        """`seconds`, `tokens`: how much prompts may take. For the other arguments, see StepPace."""
        self.decoding = decoding
        self._costs = costs
        self._seconds = seconds
        self._tokens = tokens
        self._block_size = block_size
        self._fit_tokens = fit_tokens
        self._num_prompt_tokens = 0

    def chunk(self, start: int, wanted: int, budget: int, num_taken: int) -> int:
        """Return how many of a prompt's next tokens the step may take, or 0 if none.

        Args:
            start: the position of the first of these tokens.
            wanted: the number of tokens available.
            budget: how many tokens of any kind the step may still take.
            num_taken: how many tokens the step already has.
        """
        # Keep room in the step for the decoding requests.
        free = budget - len(self.decoding)
        most = min(wanted, free if free > 0 else budget)
        if self._costs is None:
            allowed = 0
        else:
            affordable = self._costs.most_tokens(start, self._seconds)
            allowed = int(min(most, self._tokens, affordable))
        if allowed < wanted:
            allowed = self._cut(start, allowed, num_taken)
        if allowed < 1 and not self._num_prompt_tokens:
            return min(most, self._block_size - start % self._block_size)
        return allowed

    def has_time_for(self, parts: Iterable[tuple[int, int]]) -> bool:
        """Whether an empty step has time for all these chunks, given as (start, number of
        tokens).
        """
        seconds, tokens = self._seconds, self._tokens
        for start, num_tokens in parts:
            if num_tokens > 1:
                if self._costs is None:
                    return False
                seconds -= self._costs.of_chunk(start, num_tokens)
                tokens -= num_tokens
        return seconds >= 0 and tokens >= 0

    def put(self, part: ScheduledRequest) -> None:
        """Record that a request's tokens were put into the step."""
        self.decoding.discard(part.request.key)
        self._count(part, 1)

    def take_out(self, key: RequestKey, part: ScheduledRequest | None) -> None:
        """Record that a request left the step, with its tokens if it had any."""
        self.decoding.discard(key)
        if part is not None:
            self._count(part, -1)

    def _count(self, part: ScheduledRequest, times: int) -> None:
        if part.num_tokens > 1:
            self._num_prompt_tokens += times * part.num_tokens
            self._tokens -= times * part.num_tokens
            if self._costs is not None:
                self._seconds -= times * self._costs.of_chunk(part.start, part.num_tokens)

    def _cut(self, start: int, allowed: int, num_taken: int) -> int:
        """Return the best size of a chunk of at most `allowed` tokens, so that it ends at a
        boundary.
        """
        if self._fit_tokens is not None:
            others = num_taken + len(self.decoding)
            fitting = self._fit_tokens(others + allowed) - others
            if fitting > 0:
                return fitting
        return max(0, (start + allowed) // self._block_size * self._block_size - start)


class StepPace:
    """Keeps steps in which requests decode to a target time.

    Attributes:
        target_s: the target in seconds; above 0.
        cost: the estimate of what steps cost.
        num_over_target: how many steps with decoding requests took longer, since the start.
    """

    def __init__(
        self, target_s: float, block_size: int, fit_tokens: Callable[[int], int] | None = None
    ) -> None:
        """Set a target.

        Args:
            target_s: the target in seconds.
            block_size: the number of tokens in a block.
            fit_tokens: returns, for a number of tokens, the largest number up to it that a step
                computes without padding, or 0. None if steps are not padded.
        """
        self.target_s = target_s
        self.cost = StepCost()
        self.num_over_target = 0
        self._block_size = block_size
        self._fit_tokens = fit_tokens

    def measured(self, batch: ScheduledBatch, seconds: float, *, is_decode: bool) -> None:
        """Record a step. `is_decode`: whether any request decoded in it."""
        self.num_over_target += is_decode and seconds > self.target_s
        if batch.requests:
            self.cost.add(shape_of(batch), seconds)

    def limit(self, decoding: Iterable[Request]) -> ChunkLimit | None:
        """Return how much of a step prompts may take if these requests decode in it. None if none
        of them decodes, because then there is no limit.
        """
        keys: set[RequestKey] = set()
        context = 0
        for request in decoding:
            keys.add(request.key)
            context += request.num_tokens
        if not keys:
            return None
        costs, seconds = self.cost.costs(), 0.0
        if costs is not None:
            others = costs.of_step(StepShape(0, 0, len(keys), context)) + costs.prefill
            seconds = _AIM * self.target_s - others
        return ChunkLimit(
            costs,
            seconds=seconds,
            tokens=_GROWTH * self.cost.most_measured,
            decoding=keys,
            block_size=self._block_size,
            fit_tokens=self._fit_tokens,
        )


def shape_of(batch: ScheduledBatch) -> StepShape:
    num_prompt_tokens = num_pairs = num_decodes = context = 0
    for part in batch.requests:
        if part.num_tokens == 1:
            num_decodes += part.num_rows
            context += pairs(part.start, part.num_rows)
        else:
            num_prompt_tokens += part.num_tokens
            num_pairs += pairs(part.start, part.num_tokens)
    return StepShape(num_prompt_tokens, num_pairs, num_decodes, context)
