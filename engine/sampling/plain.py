"""Chooses tokens by parameters held in tensors, so that the choice can be captured with a step.

    greedy                                       ─▶ the most likely token
    drawn      temperature                       ─┐
    filtered   temperature, top_k, top_p, min_p  ─┴▶ numbers [R, 5] ─▶ a token by one uniform number

    choose_most_likely(logits), choose_draws(logits) ─▶ Triton's kernels, on a CUDA device
                                                     └▶ torch's operations, where there is no Triton

Only the kind determines which operations run and their shapes. All rows of a step use the kind of
the row that needs the most: a greedy row keeps the token that `greedy` gave it, and filters that a
row does not have keep everything. The operations are the sampler's, so in float32 the tokens are
the same. If any row needs more than this (edits, masks, typical_p, log-probabilities), the sampler
handles the whole step.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch

from engine.contract.request import Request
from engine.sampling import ops
from engine.sampling.filters import TOPK_LIMIT, Filters, choose_bound, filtered_weights
from engine.sampling.greedy import valid
from engine.sampling.sampling_rows import Row, chance, steps_of
from engine.sampling.selection import LeastBound

COLUMNS = 5
"""The number of parameters per row: uniform number, temperature, top_k, top_p, min_p."""
GREEDY_ROW = (-1.0, 1.0, 1.0, 1.0, 0.0)
"""The parameters of a row that draws nothing, because it is greedy or belongs to no request. The
negative uniform number marks it.
"""
_NO_TOP_P = 1.5
"""A share above 1, so that not even rounding of a row's sum can cut anything."""
DRAWN_AT_ONCE = 1 << 23
"""How many logits torch's operations draw from at a time. Captured work keeps its memory, so this
limits it.
"""
_DRAWN_BYTES = 45
"""The memory per logit of these, for the intermediate results of the filters."""
_KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The types of logits that the kernels read."""
_KERNEL_BYTES = 112 << 10
"""The kernels' memory for each row: bins and a list; see `engine.sampling.drawing_kernels`."""


class PlainKind(enum.IntEnum):
    """What a step's rows need, from least to most."""

    GREEDY = 0
    DRAWN = 1
    FILTERED = 2


@dataclass(frozen=True, slots=True)
class PlainChoice:
    """How a step's tokens are chosen.

    Attributes:
        kind: what the step's rows need.
        numbers: float64 [R, COLUMNS]; no rows if all are greedy.
    """

    kind: PlainKind
    numbers: npt.NDArray[np.float64]


MostLikely = Callable[[torch.Tensor, torch.Tensor], None]
"""Writes the index of each row's largest entry, the first one in a tie. Takes

    logits  [R, V]; not changed
    tokens  int64 [R], the output; see `engine.sampling.greedy.Greedy`
"""

Draws = Callable[[PlainKind, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Draws a token for each row that is not greedy. Takes

    kind     what the rows need: DRAWN or FILTERED
    logits   [R, V]; not changed
    numbers  float64 [R, COLUMNS]
    tokens   int64 [R], from a MostLikely; overwritten where a token is drawn
"""


def _has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in _KERNEL_TYPES and find_spec("triton") is not None


def choose_most_likely(logits: torch.Tensor) -> MostLikely:
    """Return the implementation for logits like these: [R, V], with R the most rows of any step."""
    if _has_kernels(logits.device, logits.dtype):
        from engine.sampling.triton_drawing import TritonMostLikely

        return TritonMostLikely(logits)
    return write_most_likely


def choose_draws(logits: torch.Tensor) -> Draws:
    """Return the implementation for logits like these; see `choose_most_likely`."""
    if _has_kernels(logits.device, logits.dtype):
        from engine.sampling.triton_drawing import TritonDraws

        draws = TritonDraws(logits)
        return lambda kind, *tensors: draws(kind is PlainKind.FILTERED, *tensors)
    return partial(draw_tokens, choose_bound(logits.device))


def draw_bytes(rows: int, width: int, dtype: torch.dtype) -> int:
    """The approximate memory, in bytes, of captured draws on a CUDA device.

    Args:
        rows, width: the shape of the logits.
        dtype: their type.
    """
    if _has_kernels(torch.device("cuda"), dtype):
        return rows * _KERNEL_BYTES
    return min(rows * width, DRAWN_AT_ONCE) * _DRAWN_BYTES


def plain_choice(
    requests: Sequence[Request], lengths: Sequence[int], vocab_size: int
) -> PlainChoice | None:
    """Return how to choose the token after each request's first `lengths` tokens, or None if a row
    needs more than this module offers.
    """
    kind, numbers = PlainKind.GREEDY, []
    for row in map(Row, requests, lengths):
        steps = steps_of(*row, vocab_size)
        if steps.edits or steps.masks or steps.typical or row.request.spec.logprobs is not None:
            return None
        if not steps.draws:
            numbers.append(GREEDY_ROW)
            continue
        kind = max(kind, PlainKind.DRAWN if steps.keeps_all else PlainKind.FILTERED)
        params = row.request.spec.sampling
        top_k = min(params.top_k or vocab_size, vocab_size)
        top_p = params.top_p if params.top_p < 1.0 else _NO_TOP_P
        numbers.append((*chance(row), float(top_k), top_p, params.min_p))
    if kind is PlainKind.GREEDY:
        numbers = []
    return PlainChoice(kind, np.array(numbers, dtype=np.float64).reshape(-1, COLUMNS))


def write_most_likely(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """A MostLikely that uses torch operations."""
    best, ids = logits.max(dim=-1)
    tokens.copy_(valid(ids, best))


def draw_tokens(
    bound: LeastBound,
    kind: PlainKind,
    logits: torch.Tensor,
    numbers: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """A Draws that uses torch operations. bound: finds where filters cut."""
    rows = max(1, DRAWN_AT_ONCE // logits.shape[-1])
    for start in range(0, len(logits), rows):
        piece = slice(start, start + rows)
        _draw(bound, kind, logits[piece], numbers[piece], tokens[piece])


def _draw(
    bound: LeastBound,
    kind: PlainKind,
    logits: torch.Tensor,
    numbers: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    uniforms, temperature, top_k, top_p, min_p = torch.split(numbers, 1, dim=-1)
    best = logits.amax(dim=-1, keepdim=True).float()
    scaled = torch.sub(logits, best).div_(temperature.float())
    filters = Filters()
    if kind is PlainKind.FILTERED:
        filters = Filters(
            top_k=top_k.to(torch.int64),
            max_top_k=max(logits.shape[-1], TOPK_LIMIT + 1),  # whatever it is: whole rows
            top_p=top_p,
            min_p=min_p.float(),
        )
    drawn = valid(ops.draw(filtered_weights(scaled, filters, bound), uniforms), best.squeeze(-1))
    tokens.copy_(torch.where(uniforms.squeeze(-1) < 0, tokens, drawn))
