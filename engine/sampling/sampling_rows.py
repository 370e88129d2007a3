"""Which sampling operations each row of a batch needs, and the state that these operations keep
between steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.contract.request import Request
from engine.contract.sampling_params import SamplingParams, SamplingSteps
from engine.sampling import ops
from engine.sampling.filters import TOPK_LIMIT
from engine.sampling.history import NgramIndex
from engine.sampling.random import uniform

ARGMAX = SamplingSteps()
"""Greedy, without any other operation."""
DRAW = SamplingSteps(draws=True)
"""A draw at a temperature, without any other operation."""
_LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)


class Row(NamedTuple):
    """One row of a step's logits.

    Attributes:
        request: the request whose next token is chosen from the row.
        length: how many tokens come before that one, prompt and output.
    """

    request: Request
    length: int


def holds_back_endings(request: Request, length: int) -> bool:
    """Whether min_tokens forbids ending tokens right after the first `length` tokens."""
    num_output_tokens = length - request.num_prompt_tokens
    return num_output_tokens < request.spec.stop.min_tokens and bool(request.ending_token_ids)


def has_lists(request: Request) -> bool:
    """Whether a request has a list of allowed or banned tokens."""
    params = request.spec.sampling
    return bool(params.allowed_token_ids) or bool(params.banned_token_ids)


def steps_of(request: Request, length: int, vocab_size: int) -> SamplingSteps:
    """Return the operations needed to choose the token after a request's first `length`. Filters
    that keep everything are left out. What never changes is computed once and stored in the
    request.
    """
    if request.status.is_terminal:
        return ARGMAX  # it has ended since its step was launched: nobody wants the token
    steps = request.sampling_steps
    if steps is None:
        steps = request.sampling_steps = _lasting_steps(request, vocab_size)
    if request.spec.stop.min_tokens and not steps.edits and holds_back_endings(request, length):
        return steps._replace(edits=True)
    return steps


def _lasting_steps(request: Request, vocab_size: int) -> SamplingSteps:
    params = request.spec.sampling
    edits = bool(params.logit_bias) or params.needs_history
    masks = request.matcher is not None or has_lists(request)
    if params.is_greedy:
        return SamplingSteps(edits, masks) if edits or masks else ARGMAX
    top_k = 0 < params.top_k < vocab_size
    filters = top_k or params.top_p < 1.0
    return SamplingSteps(
        edits=edits,
        masks=masks,
        draws=True,
        filters=filters,
        whole=filters and not (top_k and params.top_k <= TOPK_LIMIT),
        min_p=params.min_p > 0.0,
        typical=params.typical_p < 1.0,
    )


def chance(row: Row) -> tuple[float, float]:
    """Return the uniform number and the temperature of a row's draw."""
    request, length = row
    params = request.spec.sampling
    number = uniform(params.seed, request.choice, length - request.num_prompt_tokens)
    return number, max(params.temperature, _LEAST_TEMPERATURE)


class ChoiceState:
    """The state of one live choice, as far as its parameters need it.

    Attributes:
        ngrams: for no_repeat_ngram_size.
        mask: the allowed ids without the banned ones (see `ops.pack`); None if all ids are allowed.
    """

    __slots__ = ("mask", "ngrams")

    def __init__(self, request: Request, vocab_size: int) -> None:
        params = request.spec.sampling
        size = params.no_repeat_ngram_size
        self.ngrams = NgramIndex(size) if size else None
        self.mask = _listed(params, vocab_size)


def _listed(params: SamplingParams, vocab_size: int) -> npt.NDArray[np.int32] | None:
    allowed, banned = params.allowed_token_ids, params.banned_token_ids
    if not allowed and not banned:
        return None
    flags = np.full(vocab_size, not allowed)
    flags[allowed.array] = True
    flags[banned.array] = False
    return ops.pack(flags)
