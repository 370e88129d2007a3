"""Rotary frequencies that depend on a request's length: what the core and the runner must know.

Beyond a model's original length, `dynamic` and `longrope` embeddings use other frequencies.
transformers derives them from the highest position of each forward pass. For a request that
`generate` computes alone, this means that all tokens of the prompt are rotated for the prompt's
length, and each later token for the length that it reaches. This rule does not depend on how a
request is split into steps, so the engine follows it in any batch:

    a token at position p is rotated for the length max(rope_length, p + 1)

Here, rope_length is the prompt's length. Some models in transformers (Phi-3 and its relatives) also
drop their cache when a request grows beyond the original length, and recompute all of it. In that
case rope_length becomes that length, and the request is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LENGTH_SHIFT = 32
"""A position id beyond the original length stores its length in the bits from this one up."""
POSITION_MASK = (1 << LENGTH_SHIFT) - 1


@dataclass(frozen=True, slots=True)
class RopeLengths:
    """How a model's rotary frequencies depend on the length.

    Attributes:
        original: the length, in tokens, up to which the frequencies do not depend on the length.
        longest: the longest request that the model allows, in tokens.
        is_graded: whether each length beyond the original has its own frequencies; if not, all have
            the same.
        restarts: whether a request that grows beyond the original length is recomputed.
    """

    original: int
    longest: int
    is_graded: bool
    restarts: bool

    def group(self, rope_length: int) -> int:
        """Return the group number of a request; 0 up to the original length.

        Within a group, equal tokens have equal keys, so its requests may share prefixes.
        """
        if rope_length <= self.original:
            return 0
        return rope_length if self.is_graded else 1


def with_lengths(
    positions: npt.NDArray[np.int64], rope_lengths: npt.NDArray[np.int64], original: int
) -> npt.NDArray[np.int64]:
    """Return position ids that carry the lengths beyond the original one: int64 [T].

    Args:
        rope_lengths: the rope length of each token's request, int64 [T].
    """
    lengths = np.maximum(rope_lengths, positions + 1)
    return positions + (np.where(lengths > original, lengths, 0) << LENGTH_SHIFT)
