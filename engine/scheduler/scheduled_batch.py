"""One step, as chosen by the scheduler and computed by the runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.contract.request import Request
from engine.contract.types import TokenId
from engine.drafts.row_costs import DecodeRows
from engine.kv_cache.copies import NO_COPIES, StepCopies
from engine.kv_cache.kv_cache_manager import BlockTable


class ScheduledRequest(NamedTuple):
    """One request's share of a step: a row for each token to compute. Filled by the scheduler, read
    by the runner and the core. A tuple, because one is created for every token.

        rows        token_ids[start : start + num_tokens], then the drafts
        sampled     the last num_sampled rows: none if more of the prompt is left; the last token's;
                    or that and one for each draft

    A sampled token stands if it is the first, or if the draft before it equals the sampled token
    before it.

    Attributes:
        request: the request.
        start: the position of the first row, which is the request's num_computed_tokens.
        num_tokens: the number of the request's tokens that are computed.
        tables: the request's block tables, one per layer group, covering start + num_rows
            positions.
        num_sampled: the number of rows from which a token is sampled.
        drafts: guesses at the tokens that follow. Only if the step computes the request's last
            token and no other.
    """

    request: Request
    start: int
    num_tokens: int
    tables: tuple[BlockTable, ...]
    num_sampled: int
    drafts: tuple[TokenId, ...] = ()

    @property
    def num_rows(self) -> int:
        """The number of rows, those of drafts included."""
        return self.num_tokens + len(self.drafts)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step.

    Attributes:
        requests: the requests with one token first, then the others; both sorted by position. May
            be empty if there are copies to make.
        num_tokens: the number of rows of all requests.
        copies: block copies to make before anything is computed.
    """

    requests: tuple[ScheduledRequest, ...]
    num_tokens: int
    copies: StepCopies = NO_COPIES

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.requests and self.copies.is_empty


def decode_rows(batch: ScheduledBatch) -> DecodeRows | None:
    """Return the rows of a step in which all requests decode; None for any other step."""
    parts = batch.requests
    if not parts or parts[-1].num_tokens > 1:
        return None
    context = draft_context = 0
    for part in parts:
        context += part.start + 1
        draft_context += len(part.drafts) * (part.start + 1)
    return DecodeRows(len(parts), batch.num_tokens - len(parts), context, draft_context)
