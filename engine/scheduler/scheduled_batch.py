"""One step, as chosen by the scheduler and computed by the runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.contract.request import Request
from engine.kv_cache.copies import NO_COPIES, StepCopies
from engine.kv_cache.kv_cache_manager import BlockTable


class ScheduledRequest(NamedTuple):
    """One request's share of a step. Filled by the scheduler, read by the runner and the core. A
    tuple, because one is created for every token.

    Attributes:
        request: the request; its token_ids[start : start + num_tokens] are computed.
        start: the position of the first of these tokens, which is the request's
            num_computed_tokens.
        num_tokens: the number of tokens.
        tables: the request's block tables, one per layer group, covering start + num_tokens
            positions.
        samples: whether the step computes the request's last token, so that the next one is
            sampled.
    """

    request: Request
    start: int
    num_tokens: int
    tables: tuple[BlockTable, ...]
    samples: bool


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step.

    Attributes:
        requests: the requests with one token first, then the others; both sorted by position. May
            be empty if there are copies to make.
        num_tokens: the sum over all requests.
        copies: block copies to make before anything is computed.
    """

    requests: tuple[ScheduledRequest, ...]
    num_tokens: int
    copies: StepCopies = NO_COPIES

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.requests and self.copies.is_empty
