"""The filters by sorting each row: what `engine.sampling.filters` must be equal to, bit by bit."""

from __future__ import annotations

import torch

from engine.sampling import ops
from engine.sampling.filters import Filters


def filtered_weights(scaled: torch.Tensor, filters: Filters) -> torch.Tensor:
    """The weights from which a token is drawn; 0: filtered out.

    Args:
        scaled: float32 [R, V]: logits, less the row's largest, divided by the temperature.

    Returns:
        int64 [R, V].
    """
    likelihood = torch.exp(scaled)
    threshold = _threshold(scaled, filters)
    if threshold is not None:
        # A float32 mask of ones is computed and multiplied several times as fast as a boolean one.
        keep = torch.empty_like(scaled)
        likelihood.mul_(torch.ge(scaled, threshold, out=keep))
    if filters.min_p is not None:
        keep = torch.empty_like(scaled)
        # Relative to the most likely token, which has 1.
        likelihood.mul_(torch.ge(likelihood, filters.min_p, out=keep))
    weights = ops.as_weights(likelihood)
    if filters.typical_p is not None:
        weights.mul_(_is_typical(scaled, weights, filters.typical_p))
    return weights


def _threshold(scaled: torch.Tensor, filters: Filters) -> torch.Tensor | None:
    """The smallest entry that top_k and top_p keep: float32 [R, 1]. None: all are kept."""
    top_k, top_p = filters.top_k, filters.top_p
    ordered = torch.sort(scaled, dim=-1).values
    if top_k is None:
        if top_p is None:
            return None
        return _nucleus(ordered, ops.weigh(ordered), torch.zeros_like(top_p), top_p)
    width = ordered.shape[-1]
    kth = ordered.gather(-1, width - top_k)
    if top_p is None:
        return kth
    weights = ops.weigh(ordered)
    # Other entries equal to the k-th are kept too, and count in the sum, wherever they are.
    tied = ops.count_least(scaled, kth).unsqueeze(-1) - top_k
    tied_weight = tied * weights.gather(-1, width - top_k)
    weights.mul_(torch.arange(width, 0, -1, device=scaled.device) <= top_k)
    return torch.maximum(_nucleus(ordered, weights, tied_weight, top_p), kth)


def _nucleus(
    ordered: torch.Tensor, weights: torch.Tensor, others: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The smallest of the fewest largest entries that reach top_p of the sum: float32 [R, 1].

    Args:
        ordered: float32 [R, N], ascending. weights: int64 [R, N], their weights.
        others: [R, 1], the weight of smaller entries that are not listed.
        top_p: float64 [R, 1].
    """
    upto = torch.cumsum(weights, dim=-1)
    listed = upto[:, -1:]
    limit = top_p * (listed + others)
    # An entry is removed if the more likely ones already reach the limit. For integers, listed -
    # upto >= limit is upto <= listed - ceil(limit).
    last = torch.searchsorted(upto, listed - limit.ceil().to(torch.int64), right=True)
    return ordered.gather(-1, last.clamp(max=ordered.shape[-1] - 1))


def _is_typical(
    scaled: torch.Tensor, weights: torch.Tensor, typical_p: torch.Tensor
) -> torch.Tensor:
    """Locally typical sampling (Meister et al. 2022, arXiv:2202.00666): keeps the tokens with an
    information content closest to the distribution's entropy, until their probabilities reach
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
    ordered, order = torch.sort(distance, dim=-1)
    upto = torch.cumsum(weights.gather(-1, order), dim=-1)
    last = (upto < typical_p * total).sum(dim=-1, keepdim=True)
    return distance <= ordered.gather(-1, last.clamp(max=distance.shape[-1] - 1))
