"""Filters the tokens that may be drawn: top_k, then top_p of the rest, then min_p, then
typical_p.

Each filter keeps the tokens on one side of a threshold, as the warpers of transformers do; tokens
exactly as likely as the last kept one are kept too. So the result does not depend on how a
threshold is found, or on the order of equal entries. For a small top_k only the top of a row is
searched; other rows are sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.sampling import ops

TOPK_LIMIT = 256
"""Up to this top_k, only the k most likely tokens are searched for; above it, the row is sorted."""


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of some rows. None: no row has that filter.

    Attributes:
        top_k: int64 [R, 1], 1 to V; max_top_k: the largest, on the host.
        top_p, typical_p: float64 [R, 1]; min_p: float32 [R, 1].
    """

    top_k: torch.Tensor | None = None
    max_top_k: int = 0
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    typical_p: torch.Tensor | None = None


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
    if top_k is None:
        if top_p is None:
            return None
        ordered = _sort(scaled)
        return _nucleus(ordered, ops.weigh(ordered), torch.zeros_like(top_p), top_p)
    # Ascending: the largest max_top_k entries, or all.
    few = filters.max_top_k <= TOPK_LIMIT
    ordered = _largest(scaled, filters.max_top_k) if few else _sort(scaled)
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
    ordered, order = _sort_with_places(distance)
    upto = torch.cumsum(weights.gather(-1, order), dim=-1)
    last = (upto < typical_p * total).sum(dim=-1, keepdim=True)
    return distance <= ordered.gather(-1, last.clamp(max=distance.shape[-1] - 1))


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Each row's largest entries, ascending."""
    size = values.shape[-1]
    if values.device.type == "cpu" and not ops.looks_at_blocks(size, count):
        apart = np.partition(values.numpy(), size - count, axis=-1)
        return torch.from_numpy(np.sort(apart[:, size - count :], axis=-1))
    return ops.top_values(values, count)[0].flip(-1)


def _sort(values: torch.Tensor) -> torch.Tensor:
    """Sort each row, ascending. On a CPU numpy sorts many times as fast as torch."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return torch.sort(values, dim=-1).values


def _sort_with_places(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort each row, ascending; also returns where the entries were."""
    if values.device.type == "cpu":
        order = torch.from_numpy(values.numpy().argsort(axis=-1))
        return values.gather(-1, order), order
    ordered, order = torch.sort(values, dim=-1)
    return ordered, order
