"""Rotary frequencies that depend on a request's length: what the core and the runner must know.

Beyond a model's original length, `dynamic` and `longrope` embeddings have other frequencies, which
transformers takes from the longest position of each forward pass. For a request that `generate`
computes alone this means: all tokens of the prompt are rotated for the prompt's length, each later
token for the length that it makes. This does not depend on how a request is cut into steps, so it
is kept for any batch:

    a token at position p is rotated for the length max(rope_length, p + 1)

where rope_length is the prompt's length. Some models of transformers (Phi-3 and its relatives) also
drop their cache when a request grows beyond the original length, and compute all of it again: then
rope_length becomes that length, and the request is computed anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LENGTH_SHIFT = 32
"""A position id beyond the original length carries its length in the bits from this one up."""
POSITION_MASK = (1 << LENGTH_SHIFT) - 1


@dataclass(frozen=True, slots=True)
class RopeLengths:
    """How a model's rotary frequencies depend on the length.

    Attributes:
        original: up to this many tokens they do not.
        longest: the longest request that the model allows, in tokens.
        is_graded: whether each length beyond the original has its own frequencies; if not, all have
            the same.
        restarts: whether a request that grows beyond the original length is computed anew.
    """

    original: int
    longest: int
    is_graded: bool
    restarts: bool

    def group(self, rope_length: int) -> int:
        """A number that is equal for requests whose equal tokens have equal keys, so that they may
        share prefixes; 0 up to the original length.
        """
        if rope_length <= self.original:
            return 0
        return rope_length if self.is_graded else 1


def with_lengths(
    positions: npt.NDArray[np.int64], rope_lengths: npt.NDArray[np.int64], original: int
) -> npt.NDArray[np.int64]:
    """Position ids that carry the lengths beyond the original one: int64 [T].

    rope_lengths: of each token's request, int64 [T].
    """
    lengths = np.maximum(rope_lengths, positions + 1)
    return positions + (np.where(lengths > original, lengths, 0) << LENGTH_SHIFT)
