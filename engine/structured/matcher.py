"""Follows one output through a compiled grammar.

The state moves with `accept` only. One mask is computed a token at most: either when it is asked
for, or when a token was accepted behind which the output may end, to know whether anything can
follow.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from engine.types import TokenId

logger = logging.getLogger(__name__)

_BITS = 32


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar, ready for one request.

    Attributes:
        root: at the grammar's beginning; never moved on.
        vocab_size: V, the width of the logits.
        ending_token_ids: the ids that end the request's output.
    """

    root: LLMatcher
    vocab_size: int
    ending_token_ids: frozenset[TokenId]

    def make_matcher(self) -> GrammarMatcher:
        """A matcher at the beginning; cheap, one for each choice."""
        return GrammarMatcher(self.root.deep_copy(), self.vocab_size, self.ending_token_ids)


class GrammarMatcher:
    """See `engine.request.TokenMatcher`.

    A mask has the tokens whose text fits, in whatever way it is cut into tokens. The request's
    ending ids are in it where the output may end, and nowhere else, even where their text would
    fit: an output that an ending id ends is always whole.
    """

    __slots__ = ("_endings", "_is_complete", "_is_known", "_mask", "_matcher", "_vocab_size")

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, ending_token_ids: frozenset[TokenId]
    ) -> None:
        """Begin at the matcher's state; it belongs to this object from now on."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._endings = _words_of(ending_token_ids, vocab_size)
        self._mask = np.zeros(_num_words(vocab_size + 1), np.int32)  # with the token behind them
        self._is_known = False  # whether _mask is that of the matcher's state
        self._is_complete = False

    @property
    def is_complete(self) -> bool:
        """Whether the output is whole and nothing can follow it."""
        return self._is_complete

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        """Write which tokens may come next; none if the grammar became too complex to follow, or
        the vocabulary has no token that fits.

        row: int32 [ceil(V / 32)], overwritten whole.
        """
        self._compute()
        row[:] = self._mask[: len(row)]
        places, bits = self._endings
        if self._may_end():
            row[places] |= bits
        else:
            row[places] &= ~bits
        if self._vocab_size % _BITS:
            row[-1] &= (1 << self._vocab_size % _BITS) - 1

    def accept(self, token: TokenId) -> bool:
        """Go on with a token. False: the grammar does not allow it; the state is unchanged."""
        if self._is_complete or not 0 <= token < self._vocab_size:
            return False
        if self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._is_known = False
        if self._may_end():
            self._is_complete = self._matcher.is_stopped() or not self.can_go_on()
        return True

    def can_go_on(self) -> bool:
        """Whether any token of the vocabulary may come next."""
        self._compute()
        last, behind = divmod(self._vocab_size, _BITS)
        return bool(self._mask[:last].any() or self._mask[last] & ((1 << behind) - 1))

    def _may_end(self) -> bool:
        return bool(self._matcher.is_accepting()) and not self._matcher.is_error()

    def _compute(self) -> None:
        if self._is_known:
            return
        self._is_known = True
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error():
            logger.warning("a grammar cannot be followed: %s", self._matcher.get_error())
            self._mask.fill(0)


def _num_words(bits: int) -> int:
    return -(-bits // _BITS)


def _words_of(
    token_ids: frozenset[TokenId], vocab_size: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int32]]:
    """The words of a mask in which ids have their bits, each once, and these bits."""
    words: dict[int, int] = {}
    for token in token_ids:
        if 0 <= token < vocab_size:
            place, bit = divmod(token, _BITS)
            words[place] = words.get(place, 0) | 1 << bit
    bits = np.array(list(words.values()), np.uint32).view(np.int32)
    return np.array(list(words), np.intp), bits
