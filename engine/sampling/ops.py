"""The steps of sampling as pure tensor functions. R is rows (requests), V the vocabulary.

Each row's result depends on that row alone: rows are treated alike in one call, or not at all.
"""

from __future__ import annotations

import torch

_TOPK_LIMIT = 1024
"""Up to this top_k, the k most likely tokens are selected; above, the row is sorted whole."""


def apply_penalties(
    logits: torch.Tensor,
    seen: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Repetition penalty (CTRL, arXiv:1909.05858), then presence and frequency penalties.

    Args:
        logits: float32 [R, V].
        seen: bool [R, V], in prompt or output.
        output_counts: int32 [R, V], occurrences in the output.
        repetition, presence, frequency: float32 [R, 1].

    Returns:
        float32 [R, V].
    """
    penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, penalized, logits)
    return logits - frequency * output_counts - presence * (output_counts > 0)


def sample_plain(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw from the softmax of each row, by inverting its cumulative distribution.

    Args:
        logits: float32 [R, V], divided by the temperature.
        uniforms: float64 [R, 1] in [0, 1).

    Returns:
        int64 [R].
    """
    return _invert(torch.softmax(logits, dim=-1), uniforms).squeeze(-1)


def sample_filtered(
    logits: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
    max_top_k: int,
) -> torch.Tensor:
    """Draw from each row's most likely tokens: top_k, then top_p of what is left, then min_p.

    Args:
        logits: float32 [R, V], divided by the temperature.
        top_k: int64 [R, 1], 1 to V. top_p, min_p: float32 [R, 1].
        uniforms: float64 [R, 1] in [0, 1).
        max_top_k: the largest top_k, on the host.

    Returns:
        int64 [R].
    """
    if max_top_k <= _TOPK_LIMIT:
        ordered, order = torch.topk(logits, min(max_top_k, logits.shape[-1]), dim=-1)
    else:
        ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[-1], device=logits.device)
    probs = torch.softmax(ordered.masked_fill(ranks >= top_k, float("-inf")), dim=-1)
    before = torch.cumsum(probs, dim=-1) - probs  # probability of the more likely ones
    keep = (before < top_p) & (probs >= min_p * probs[:, :1])
    keep[:, 0] = True
    chosen = _invert(probs * keep, uniforms)
    return order.gather(-1, chosen).squeeze(-1)


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Where the cumulated weights pass the uniform number: int64 [R, 1]. Never an entry of weight
    zero.
    """
    cumulated = torch.cumsum(weights, dim=-1, dtype=torch.float64)
    target = uniforms * cumulated[:, -1:]
    # right=True finds the first entry above the target; rounding up to the total itself must not
    # pass the last one.
    last = torch.nextafter(cumulated[:, -1:], torch.zeros_like(target))
    found = torch.searchsorted(cumulated, torch.minimum(target, last), right=True)
    return found.clamp(
        max=weights.shape[-1] - 1
    )  # a row of NaN finds nothing; the sampler refuses it


def logprobs_of(
    logits: torch.Tensor, tokens: torch.Tensor, top_n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the chosen tokens and of the most likely ones.

    Args:
        logits: float32 [R, V], as the model gave them.
        tokens: int64 [R].

    Returns:
        logprob float32 [R], rank int64 [R] (1: most likely), candidates' ids int64 [R, n] and
        log-probabilities float32 [R, n], with n = min(top_n, V).
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1))
    rank = (logprobs > chosen).sum(dim=-1) + 1
    values, ids = torch.topk(logprobs, min(top_n, logprobs.shape[-1]), dim=-1)
    return chosen.squeeze(-1), rank, ids, values
