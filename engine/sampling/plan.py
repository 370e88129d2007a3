"""What each row of a batch needs done, and what is kept from step to step to do it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.request import Request
from engine.sampling import ops
from engine.sampling.filters import TOPK_LIMIT
from engine.sampling.history import NgramIndex, TokenCounts
from engine.sampling_params import SamplingParams


class Steps(NamedTuple):
    """The steps that a row needs; rows that need the same are computed together.

    Attributes:
        edits: bias, penalties, n-grams or min_tokens: single entries are changed.
        masks: allowed or banned ids, or a grammar: all entries may be.
        draws: the row is not greedy.
        filters: top_k or top_p.
        sorts: the filters must see the whole row in order.
        min_p, typical: the other filters.
    """

    edits: bool = False
    masks: bool = False
    draws: bool = False
    filters: bool = False
    sorts: bool = False
    min_p: bool = False
    typical: bool = False


ARGMAX = Steps()
"""Greedy, and nothing else."""


def holds_back_endings(request: Request) -> bool:
    """Whether min_tokens keeps ending tokens out of the next choice."""
    return request.num_output_tokens < request.spec.stop.min_tokens and bool(
        request.ending_token_ids
    )


def has_lists(request: Request) -> bool:
    """Whether a request names tokens that alone are, or are not, allowed."""
    params = request.spec.sampling
    return bool(params.allowed_token_ids) or bool(params.banned_token_ids)


def steps_of(request: Request, vocab_size: int) -> Steps:
    """What a request's next token needs. Filters that keep everything are not needed."""
    params = request.spec.sampling
    edits = bool(params.logit_bias) or params.needs_history or holds_back_endings(request)
    masks = request.matcher is not None or has_lists(request)
    if params.is_greedy:
        return Steps(edits, masks) if edits or masks else ARGMAX
    top_k = 0 < params.top_k < vocab_size
    filters = top_k or params.top_p < 1.0
    return Steps(
        edits=edits,
        masks=masks,
        draws=True,
        filters=filters,
        sorts=filters and not (top_k and params.top_k <= TOPK_LIMIT),
        min_p=params.min_p > 0.0,
        typical=params.typical_p < 1.0,
    )


class ChoiceState:
    """What is kept for one live choice: nothing but what its parameters need.

    Attributes:
        counts: for penalties. ngrams: for no_repeat_ngram_size.
        mask: the ids that are allowed and not banned, see `ops.pack`; None: all are.
    """

    __slots__ = ("counts", "mask", "ngrams")

    def __init__(self, request: Request, vocab_size: int) -> None:
        params = request.spec.sampling
        self.counts = TokenCounts(request.spec.prompt) if params.has_penalties else None
        size = params.no_repeat_ngram_size
        self.ngrams = NgramIndex(size) if size else None
        self.mask = _listed(params, vocab_size)


def _listed(params: SamplingParams, vocab_size: int) -> npt.NDArray[np.int32] | None:
    allowed, banned = params.allowed_token_ids, params.banned_token_ids
    if not allowed and not banned:
        return None
    flags = np.full(vocab_size, not allowed)
    flags[np.array(allowed, dtype=np.int64)] = True
    flags[np.array(banned, dtype=np.int64)] = False
    return ops.pack(flags)
