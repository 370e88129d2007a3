"""Follows one output through a compiled grammar.

Only `accept` changes the state. At most one mask is computed for each token: when it is asked for,
or earlier if the output may end after an accepted token, to know whether anything can follow.

The matchers of one compiled grammar share its lexer. Its states are made when they are needed, and
a state made for one matcher costs the others nothing. But if the lexer reaches a limit, none of
them can go on. So only requests with the same salt share it, and it is dropped after such a failure
(`CompiledGrammar.failed`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from engine.types import TokenId

logger = logging.getLogger(__name__)

BITS = 32
"""The bits of a mask's word."""
_TOO_COMPLEX = (
    "became too complex to be followed after {num_tokens} tokens; make it smaller or less "
    "ambiguous: give each text one way to be read, repeat terminals of several characters rather "
    "than of one, and use smaller repetitions and fewer optional parts"
)


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar, ready for one request.

    Attributes:
        root: a matcher at the grammar's start; never advanced.
        vocab_size: V, the width of the logits.
        ending_token_ids: the ids that end the request's output.
        special_endings: those of them that are special tokens, which a form may name.
        expected_s: what a token of its output is expected to cost, in seconds of CPU time.
        failed: called when the grammar can no longer be followed.
    """

    root: LLMatcher
    vocab_size: int
    ending_token_ids: frozenset[TokenId]
    special_endings: tuple[TokenId, ...]
    expected_s: float
    failed: Callable[[], None]

    def make_matcher(self) -> GrammarMatcher:
        """Make a matcher at the grammar's start; cheap, one for each choice."""
        return GrammarMatcher(
            self.root.deep_copy(),
            self.vocab_size,
            self.ending_token_ids,
            special_endings=self.special_endings,
            expected_s=self.expected_s,
            failed=self.failed,
        )


class GrammarMatcher:
    """See `engine.request.TokenMatcher`.

    A mask allows every token with a text that fits, in any tokenization. It allows the request's
    ending ids only if the output may end here, even if their text would fit elsewhere, or if the
    form names the id and may end with it; so an output that an ending id ends is always complete.
    """

    __slots__ = (
        "_clock",
        "_endings",
        "_failed",
        "_is_complete",
        "_is_known",
        "_mask",
        "_matcher",
        "_num_tokens",
        "_special_endings",
        "_vocab_size",
        "expected_s",
        "failure",
        "spent_s",
    )

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        ending_token_ids: frozenset[TokenId],
        *,
        special_endings: tuple[TokenId, ...] = (),
        expected_s: float = 0.0,
        failed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Start at the state of `matcher`, which this object now owns. `special_endings`,
        `expected_s`, `failed`: see CompiledGrammar. `clock`: CPU seconds of the thread that uses
        this object.
        """
        self.expected_s = expected_s
        self.spent_s = 0.0
        self.failure: str | None = None
        self._num_tokens = 0
        self._failed = failed
        self._special_endings = special_endings
        self._clock = clock
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._endings = words_of(ending_token_ids, vocab_size)
        self._mask = np.zeros(num_words(vocab_size + 1), np.int32)  # with the extra token
        self._is_known = False  # whether _mask is that of the matcher's state
        self._is_complete = False

    @property
    def is_complete(self) -> bool:
        """Whether the output is complete and nothing can follow it."""
        return self._is_complete

    @property
    def is_free(self) -> bool:
        """Never: what a form holds is held to its end."""
        return False

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        """Write which tokens may come next; none if the grammar became too complex to follow, or
        the vocabulary has no token that fits.

        row: int32 [ceil(V / 32)], completely overwritten.
        """
        self._compute()
        row[:] = self._mask[: len(row)]
        places, bits = self._endings
        if self._may_end():
            row[places] |= bits
        else:
            row[places] &= ~bits
            for token in self._special_endings:
                if self._has(token) and self._may_end_with(token):
                    row[token // BITS] |= np.uint32(1 << token % BITS).view(np.int32)
        if self._vocab_size % BITS:
            row[-1] &= (1 << self._vocab_size % BITS) - 1

    def fitting(self) -> list[int]:
        """The ids that may come next."""
        row = np.zeros(num_words(self._vocab_size), np.int32)
        self.fill_mask(row)
        return ids_of(row)

    def accept(self, token: TokenId) -> bool:
        """Advance by a token. False: the grammar does not allow it, and the state is unchanged; or
        the grammar can no longer be followed (`failure`).
        """
        if self._is_complete or not 0 <= token < self._vocab_size:
            return False
        begin = self._clock()
        # A token of the mask is not tried first, because that costs as much as accepting it.
        if self._is_known and self._has(token):
            is_taken = self._matcher.consume_token(token)
        else:
            is_taken = self._matcher.try_consume_tokens([token]) == 1
        self.spent_s += self._clock() - begin
        if self._matcher.is_error():
            self._fail()
        if not is_taken or self.failure is not None:
            return False
        self._num_tokens += 1
        self._is_known = False
        if self._may_end():
            self._is_complete = self._matcher.is_stopped() or not self.can_go_on()
        return self.failure is None

    def can_go_on(self) -> bool:
        """Whether any token of the vocabulary may come next."""
        self._compute()
        last, behind = divmod(self._vocab_size, BITS)
        return bool(self._mask[:last].any() or self._mask[last] & ((1 << behind) - 1))

    def _may_end(self) -> bool:
        return bool(self._matcher.is_accepting()) and not self._matcher.is_error()

    def _may_end_with(self, token: TokenId) -> bool:
        """Whether the form, which names this ending id here, may end with it."""
        probe = self._matcher.deep_copy()
        return bool(probe.consume_token(token)) and bool(probe.is_accepting())

    def _has(self, token: TokenId) -> bool:
        place, bit = divmod(token, BITS)
        return bool(self._mask[place] >> bit & 1)

    def _compute(self) -> None:
        if self._is_known:
            return
        self._is_known = True
        begin = self._clock()
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self.spent_s += self._clock() - begin
        if self._matcher.is_error():
            self._fail()

    def _fail(self) -> None:
        self._is_known = True
        self._mask.fill(0)
        if self.failure is None and not _is_dead_end(self._matcher):
            logger.info("a grammar cannot be followed: %s", self._matcher.get_error())
            self.failure = _TOO_COMPLEX.format(num_tokens=self._num_tokens)
            self._failed()


def _is_dead_end(matcher: LLMatcher) -> bool:
    """Whether an error only says that no token of the vocabulary can follow."""
    return "NoExtension" in matcher.get_error()


def num_words(bits: int) -> int:
    """The words of a mask with this many bits."""
    return -(-bits // BITS)


def ids_of(row: npt.NDArray[np.int32]) -> list[int]:
    """The ids whose bits are set in a mask, in order."""
    found: list[int] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return found


def words_of(
    token_ids: frozenset[TokenId], vocab_size: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int32]]:
    """The mask's words that contain the bits of these ids, each once, and the bits in each."""
    words: dict[int, int] = {}
    for token in token_ids:
        if 0 <= token < vocab_size:
            place, bit = divmod(token, BITS)
            words[place] = words.get(place, 0) | 1 << bit
    bits = np.array(list(words.values()), np.uint32).view(np.int32)
    return np.array(list(words), np.intp), bits
