"""Filters the tokens that may be drawn: top_k, then top_p of the rest, then min_p, then
typical_p.

Each filter keeps the tokens on one side of a threshold, like the warpers of transformers, and also
keeps tokens exactly as likely as the last one kept. So the result depends neither on how a
threshold is found nor on the order of equal entries. For a small top_k, only the top of a row is
examined; otherwise the threshold is selected (see `selection`). No row is sorted.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np
import torch

from engine.sampling import ops
from engine.sampling.selection import LeastBound, least_bound

TOPK_LIMIT = 256
"""The largest top_k for which only the k most likely tokens are searched for."""


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of some rows. A field is None if no row has that filter.

    Attributes:
        top_k: int64 [R, 1], 1 to V; max_top_k: the largest, on the host.
        top_p, typical_p: float64 [R, 1]; min_p: float32 [R, 1].
    """

    top_k: torch.Tensor | None = None
    max_top_k: int = 0
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    typical_p: torch.Tensor | None = None


def choose_bound(device: torch.device) -> LeastBound:
    """Return the implementation for a device: a kernel if Triton is available, otherwise torch
    operations.
    """
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from engine.sampling import triton_selection

        return triton_selection.least_bound
    return least_bound


def filtered_weights(
    scaled: torch.Tensor, filters: Filters, bound: LeastBound = least_bound
) -> torch.Tensor:
    """Return the weights from which a token is drawn; 0 for tokens that are filtered out.

    Args:
        scaled: float32 [R, V]: the logits minus the row's largest, divided by the temperature.
        filters: the filters of the rows.
        bound: finds where to cut, see `selection`.

    Returns:
        int64 [R, V].
    """
    likelihood = torch.exp(scaled)
    farthest = _farthest(scaled, likelihood, filters, bound)
    if farthest is not None:
        # A float32 mask of ones is computed and multiplied several times as fast as a boolean one.
        keep = torch.empty_like(scaled)
        likelihood.mul_(torch.ge(scaled, -farthest, out=keep))
    if filters.min_p is not None:
        keep = torch.empty_like(scaled)
        # Relative to the most likely token, which has 1.
        likelihood.mul_(torch.ge(likelihood, filters.min_p, out=keep))
    weights = ops.as_weights(likelihood)
    if filters.typical_p is not None:
        weights = weights.where(_is_typical(scaled, weights, filters.typical_p, bound), 0)
    return weights


def _farthest(
    scaled: torch.Tensor, likelihood: torch.Tensor, filters: Filters, bound: LeastBound
) -> torch.Tensor | None:
    """Return how far below a row's largest entry top_k and top_p cut: float32 [R, 1], 0 or more.
    None if there is neither filter.

    Args:
        scaled, likelihood: float32 [R, V]; the second is the exponential of the first.
    """
    top_k, top_p = filters.top_k, filters.top_p
    if top_k is None and top_p is None:
        return None
    if top_k is not None and filters.max_top_k <= TOPK_LIMIT:
        return _farthest_of_few(scaled, top_k, filters.max_top_k, top_p)
    distance = scaled.abs()
    kth = None if top_k is None else bound(distance, None, top_k)
    if top_p is None:
        return kth
    weights = (likelihood * ops.WEIGHT_ONE).to(torch.int64)
    if kth is None:
        return bound(distance, weights, _limit(top_p, weights))
    weights = weights.where(distance <= kth, 0)
    return torch.minimum(bound(distance, weights, _limit(top_p, weights)), kth)


def _farthest_of_few(
    scaled: torch.Tensor, top_k: torch.Tensor, max_top_k: int, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Like `_farthest`, but looks only at the largest `max_top_k` entries of each row."""
    ordered = _largest(scaled, max_top_k)
    kth = ordered.gather(-1, top_k - 1)
    if top_p is None:
        return -kth
    weights = ops.weigh(ordered)
    # Other entries equal to the k-th are kept too, and count in the sum, wherever they are.
    tied = ops.count_least(scaled, kth).unsqueeze(-1) - top_k
    weights.mul_(torch.arange(1, max_top_k + 1, device=scaled.device) <= top_k)
    upto = torch.cumsum(weights, dim=-1)
    total = upto[:, -1:] + tied * weights.gather(-1, top_k - 1)
    # The first entry at which the limit is reached; if none, the tied ones are needed too.
    last = torch.searchsorted(upto, _share(top_p, total)).clamp_(max=max_top_k - 1)
    return -torch.maximum(ordered.gather(-1, last), kth)


def _limit(share: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the given share of each row's sum, rounded up to a whole weight: int64 [R, 1]."""
    return _share(share, weights.sum(dim=-1, keepdim=True))


def _share(share: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return the given share of each total, rounded up to a whole weight: int64 [R, 1]."""
    return (share * total).ceil_().to(torch.int64)


def _is_typical(
    scaled: torch.Tensor, weights: torch.Tensor, typical_p: torch.Tensor, bound: LeastBound
) -> torch.Tensor:
    """Locally typical sampling (Meister et al. 2022, arXiv:2202.00666): keep the tokens whose
    information content is closest to the distribution's entropy, until their probabilities reach
    typical_p. Returns bool [R, V].

    Args:
        scaled: float32 [R, V]. weights: int64 [R, V], after the other filters.
    """
    total = weights.sum(dim=-1, keepdim=True)
    log_total = torch.log(total.double() / ops.WEIGHT_ONE).float()
    information = log_total - scaled
    # The expected information, added up in integers. It is below 2^6 if the weight is not 0; the
    # division keeps the sum below 2^63.
    parts = torch.where(weights > 0, weights * information.double(), 0.0).div_(256.0)
    expected = parts.to(torch.int64).sum(dim=-1, keepdim=True).double() * 256.0
    entropy = (expected / total.double()).float()
    distance = (information - entropy).abs_().masked_fill_(weights == 0, float("inf"))
    return distance <= bound(distance, weights, _limit(typical_p, weights))


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    size = values.shape[-1]
    if values.device.type == "cpu" and not ops.looks_at_blocks(size, count):
        apart = np.partition(values.numpy(), size - count, axis=-1)
        return torch.from_numpy(np.sort(apart[:, size - count :], axis=-1)).flip(-1)
    return ops.top_values(values, count)[0]
