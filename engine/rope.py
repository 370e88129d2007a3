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
