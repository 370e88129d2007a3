"""The steps of sampling as pure tensor functions. R is rows (requests), V the vocabulary.

Each row's result depends only on that row, bit for bit. Sums along a row are integer sums, which do
not depend on the order of addition. So the number of rows or threads cannot change a draw. Another
device, or the CPU kernel (see `drawing`), occasionally computes e^x with a different last bit. A
draw may then differ, at most once in ten thousand draws.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

WEIGHT_ONE = float(1 << 40)
"""The weight of a row's most likely token. A token 2^41 times less likely has weight 0; a row's
weights stay below 2^63 up to a vocabulary of 2^22.
"""

_BLOCK = 512
"""The block size for the sums used to search a row."""
_TOP_BLOCK = 128
"""The block size for the maxima used to find a row's largest entries."""


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first of the largest entries of each row; a NaN counts as the largest.

    Args:
        logits: floating [R, V].

    Returns:
        Its id, int64 [R], and the entry itself [R].
    """
    if logits.device.type == "cpu":
        # numpy's argmax is several times as fast as torch's.
        ids = torch.from_numpy(logits.float().numpy().argmax(axis=-1))
    else:
        ids = torch.argmax(logits, dim=-1)
    return ids, logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def penalize(
    logits: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Apply the repetition penalty (CTRL, arXiv:1909.05858), then presence and frequency penalties.

    Args:
        logits: float32 [N], the logits of tokens that were seen in the prompt or the output.
        counts: float32 [N], how often each was seen in the output.
        repetition, presence, frequency: float32 [N].

    Returns:
        float32 [N].
    """
    penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
    return penalized - frequency * counts - presence * (counts > 0)


def pack(allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Pack one bit for each token, least significant bit first, as token matchers do.

    Args:
        allowed: bool [V].

    Returns:
        int32 [ceil(V / 32)].
    """
    packed = np.zeros(mask_width(len(allowed)) * 4, dtype=np.uint8)
    packed[: (len(allowed) + 7) // 8] = np.packbits(allowed, bitorder="little")
    return packed.view(np.int32)


def mask_width(vocab_size: int) -> int:
    """The number of int32 words that hold one bit for each token."""
    return (vocab_size + 31) // 32


def mask_table(device: torch.device) -> torch.Tensor:
    """Return the table for `apply_masks`: float32 [256, 8].

    The row of each byte value holds inf for each bit that is set and -inf for the others.
    """
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return torch.where(bits == 1, float("inf"), float("-inf")).to(device)


def apply_masks(logits: torch.Tensor, packed: torch.Tensor, table: torch.Tensor) -> None:
    """Set the logits of tokens whose bit is not set to -inf, in place.

    Args:
        logits: float32 [R, V].
        packed: uint8 [R, 4 * ceil(V / 32)], the bytes of what `pack` returns.
        table: see `mask_table`.
    """
    limits = table.index_select(0, packed.reshape(-1).to(torch.int32))
    limits = limits.view(logits.shape[0], -1)[:, : logits.shape[1]]
    torch.minimum(logits, limits, out=logits)


def weigh(scaled: torch.Tensor) -> torch.Tensor:
    """Return exp(scaled) as integers from 0 to WEIGHT_ONE.

    Args:
        scaled: float32 [R, V], at most 0.

    Returns:
        int64 [R, V].
    """
    return as_weights(torch.exp(scaled))


def as_weights(likelihood: torch.Tensor) -> torch.Tensor:
    """Scale values between 0 and 1 to int64 weights. Overwrites the values."""
    return likelihood.mul_(WEIGHT_ONE).to(torch.int64)


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw a token for each row with probabilities proportional to the weights: the first token at
    which the cumulative weight exceeds uniform × the total.

    Args:
        weights: int64 [R, V], none negative. uniforms: float64 [R, 1] in [0, 1).

    Returns:
        int64 [R]: never a token of weight 0, unless all weights are 0.
    """
    size = weights.shape[-1]
    whole = size // _BLOCK * _BLOCK
    sums = weights[:, :whole].view(len(weights), whole // _BLOCK, _BLOCK).sum(dim=-1)
    if whole < size:
        sums = torch.cat([sums, weights[:, whole:].sum(dim=-1, keepdim=True)], dim=-1)
    ends = torch.cumsum(sums, dim=-1)
    total = ends[:, -1:]
    # If rounding gives the total itself, the last token must still be chosen.
    target = torch.minimum((uniforms * total).to(torch.int64), total - 1)
    # The clamps only matter for rows with a NaN, for which the sampler refuses the token.
    block = torch.searchsorted(ends, target, right=True).clamp(max=sums.shape[-1] - 1)
    rest = target - (ends - sums).gather(-1, block)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(-1, ids.clamp(max=size - 1))
    found = torch.searchsorted(torch.cumsum(inside, dim=-1), rest, right=True)
    return (block * _BLOCK + found).clamp(max=size - 1).squeeze(-1)


def looks_at_blocks(size: int, count: int) -> bool:
    """Whether so few entries are wanted that most blocks contain none of them."""
    return count * _TOP_BLOCK * 2 <= size // _TOP_BLOCK * _TOP_BLOCK


def top_values(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest entries of each row, largest first, and their indices. The rows must not
    contain a NaN.

    On a CPU, only the blocks with the largest maxima are searched; the others cannot contain any.

    Args:
        values: float [R, V]. count: 1 to V.

    Returns:
        float [R, count], int64 [R, count].
    """
    size = values.shape[-1]
    whole = size // _TOP_BLOCK * _TOP_BLOCK
    if values.device.type != "cpu" or not looks_at_blocks(size, count):
        return torch.topk(values, count, dim=-1)
    blocks = values[:, :whole].view(len(values), whole // _TOP_BLOCK, _TOP_BLOCK)
    best = torch.topk(blocks.amax(dim=-1), count, dim=-1, sorted=False).indices
    ids = best.unsqueeze(-1) * _TOP_BLOCK + torch.arange(_TOP_BLOCK, device=values.device)
    tail = torch.arange(whole, size, device=values.device).expand(values.shape[0], -1)
    ids = torch.cat([ids.flatten(1), tail], dim=-1)
    found, places = torch.topk(values.gather(-1, ids), count, dim=-1)
    return found, ids.gather(-1, places)


def count_above(values: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Count the entries of each row that are above a bound.

    Args:
        values: float32 [R, V], V below 2^24. bound: float32 [R, 1].

    Returns:
        int64 [R].
    """
    # Ones as float32 are computed and added several times as fast as booleans, and exactly.
    ones = torch.gt(values, bound, out=torch.empty_like(values))
    return ones.sum(dim=-1).to(torch.int64)


def count_least(values: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Count the entries of each row that are at or above a bound; see `count_above`."""
    ones = torch.ge(values, bound, out=torch.empty_like(values))
    return ones.sum(dim=-1).to(torch.int64)
