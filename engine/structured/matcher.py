"""Follows one output through a compiled grammar.

Only `accept` changes the state. One mask is computed for each token, when it is requested. It is
computed earlier if the output may end after an accepted token, to know whether anything can follow.
In any case, it is computed before a token is accepted, because llguidance's limits apply to what
follows a mask.

The matchers of one compiled grammar share its lexer, and can lose it together (`root`). If a single
mask used up all the fuel, its matcher is known to be the cause, and that output ends. All others
(and all of them if the lexer has too many states) continue with a newly created lexer, starting
from the tokens that they have accepted. Only requests with the same salt share a lexer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from copy import copy as shallow_copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from engine.contract.sampling_params import GrammarKind
from engine.contract.types import TokenId
from engine.structured.grammar_errors import too_complex
from engine.structured.root import Root, is_lexer_error

logger = logging.getLogger(__name__)

BITS = 32
"""The number of bits in a word of a mask."""
_TOKEN_BYTES = 16
"""How much of a forced text is tokenized for each token that is wanted, in bytes."""
_NUM_MOVES = 2
"""How often a matcher may move: once to a lexer that others have also filled, then to a new one."""
_LEFT_BEHIND = (
    "cannot be followed after {num_tokens} tokens, because another output of the same form became "
    "too complex and there was no time left to set up this one again; send it again"
)


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar, ready for one request.

    Attributes:
        kind: the kind of grammar, for messages.
        root: its start.
        vocab_size: V, the width of the logits.
        ending_token_ids: the ids that end the request's output.
        special_endings: those of them that are special tokens, which a grammar may name.
        expected_s: the expected cost of an output token, in seconds of CPU time.
        lost: called when its lexer is lost.
        tokenize: returns the tokens of a text that the grammar forces.
    """

    kind: GrammarKind
    root: Root
    vocab_size: int
    ending_token_ids: frozenset[TokenId]
    special_endings: tuple[TokenId, ...] = ()
    expected_s: float = 0.0
    lost: Callable[[], None] = lambda: None
    tokenize: Callable[[str], Sequence[int]] = lambda text: ()

    def make_matcher(self) -> GrammarMatcher:
        """Create a matcher at the grammar's start. Cheap; each choice needs one."""
        return GrammarMatcher(self)


class GrammarMatcher:
    """A TokenMatcher (see `engine.contract.request`) for a compiled grammar.

    A mask allows every token whose text fits, in any tokenization. The request's ending ids are
    different, even if their text would fit. They are allowed only if the output may end here, or if
    the grammar names the id and may end with it. So an output that an ending id ends is always
    complete.
    """

    __slots__ = (
        "_clock",
        "_endings",
        "_grammar",
        "_is_complete",
        "_is_known",
        "_mask",
        "_matcher",
        "_root",
        "_tokens",
        "expected_s",
        "failure",
        "spent_s",
    )

    def __init__(
        self, grammar: CompiledGrammar, *, clock: Callable[[], float] = time.thread_time
    ) -> None:
        """Begin at the grammar's start. `clock`: CPU seconds of the calling thread."""
        self.expected_s = grammar.expected_s
        self.spent_s = 0.0
        self.failure: str | None = None
        self._grammar = grammar
        self._root = grammar.root
        self._tokens: list[TokenId] = []
        self._clock = clock
        self._matcher = grammar.root.matcher.deep_copy()
        self._endings = words_of(grammar.ending_token_ids, grammar.vocab_size)
        self._mask = np.zeros(num_words(grammar.vocab_size + 1), np.int32)  # with the extra token
        self._is_known = False  # whether _mask is that of the matcher's state
        self._is_complete = False

    @property
    def is_complete(self) -> bool:
        """Whether the output is complete and nothing can follow it."""
        return self._is_complete

    @property
    def is_free(self) -> bool:
        """Always False: a grammar is enforced to its end."""
        return False

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        """Write which tokens may come next: none if the grammar became too complex to follow, or
        if no token of the vocabulary fits.

        row: int32 [ceil(V / 32)], completely overwritten.
        """
        self._compute()
        row[:] = self._mask[: len(row)]
        places, bits = self._endings
        if self._may_end():
            row[places] |= bits
        else:
            row[places] &= ~bits
            for token in self._grammar.special_endings:
                if self._has(token) and self._may_end_with(token):
                    row[token // BITS] |= np.uint32(1 << token % BITS).view(np.int32)
        if behind := self._grammar.vocab_size % BITS:
            row[-1] &= (1 << behind) - 1

    def fitting(self) -> list[int]:
        """Return the ids that may come next."""
        row = np.zeros(num_words(self._grammar.vocab_size), np.int32)
        self.fill_mask(row)
        return ids_of(row)

    def accept(self, token: TokenId) -> bool:
        """Advance by a token. Return False if the grammar does not allow it, which leaves the state
        unchanged, or if the grammar can no longer be followed (`failure`).
        """
        if self._is_complete or not 0 <= token < self._grammar.vocab_size:
            return False
        self._compute()
        if not self._has(token) or not self._consume(token):
            return False
        self._tokens.append(token)
        self._is_known = False
        if self._may_end():
            self._is_complete = self._matcher.is_stopped() or not self.can_go_on()
        return self.failure is None

    def copy(self) -> GrammarMatcher:
        """Return a matcher in the same state; see TokenMatcher."""
        made = shallow_copy(self)
        made._matcher = self._matcher.deep_copy()
        made._tokens = self._tokens.copy()
        made._mask = self._mask.copy()
        return made

    def charge(self, seconds: float) -> None:
        """Count what a copy has cost."""
        self.spent_s += seconds

    def num_fitting(self, tokens: Sequence[int]) -> int:
        """Return how many of some tokens, from the first on, may come next."""
        if self._is_complete or self._matcher.is_error():
            return 0
        begin = self._clock()
        # A copy, because what is too complex to follow would be an error of the matcher.
        found: int = self._matcher.deep_copy().validate_tokens(list(tokens))
        self.spent_s += self._clock() - begin
        return found

    def forced(self, most: int) -> Sequence[int]:
        """Return up to `most` tokens of the text that must come next."""
        if self._is_complete or self._matcher.is_error():
            return ()
        begin = self._clock()
        text: bytes = self._matcher.deep_copy().compute_ff_bytes()
        found: Sequence[int] = ()
        if text:
            found = self._grammar.tokenize(text[: most * _TOKEN_BYTES].decode("utf-8", "ignore"))
        self.spent_s += self._clock() - begin
        return found[:most]

    def can_go_on(self) -> bool:
        """Whether any token of the vocabulary may come next."""
        self._compute()
        last, behind = divmod(self._grammar.vocab_size, BITS)
        return bool(self._mask[:last].any() or self._mask[last] & ((1 << behind) - 1))

    def _may_end(self) -> bool:
        return bool(self._matcher.is_accepting()) and not self._matcher.is_error()

    def _may_end_with(self, token: TokenId) -> bool:
        """Whether the grammar, which names this ending id here, may end with it."""
        probe = self._matcher.deep_copy()
        return bool(probe.consume_token(token)) and bool(probe.is_accepting())

    def _has(self, token: TokenId) -> bool:
        place, bit = divmod(token, BITS)
        return bool(self._mask[place] >> bit & 1)

    def _compute(self) -> None:
        if self._is_known:
            return
        self._is_known = True
        if self._root.is_lost and not self._move():
            return
        self._fill()
        for _ in range(_NUM_MOVES):
            if not _has_too_many_states(self._matcher) or not self._move():
                break
            self._fill()
        if self._matcher.is_error():
            self._fail()

    def _fill(self) -> None:
        begin = self._clock()
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self.spent_s += self._clock() - begin
        if is_lexer_error(self._matcher):
            self._lose()

    def _consume(self, token: TokenId) -> bool:
        """Consume a token that the mask allows."""
        for _ in range(1 + _NUM_MOVES):
            begin = self._clock()
            is_taken = self._matcher.consume_token(token)
            self.spent_s += self._clock() - begin
            if not self._matcher.is_error() or _is_dead_end(self._matcher):
                return is_taken
            # Others' masks may have left no fuel for this token; a mask of its own gives more.
            if not self._root.check():
                break
            self._lose()
            self._is_known = False
            self._compute()
            if not self._has(token):
                break
        self._fail()
        return False

    def _lose(self) -> None:
        self._root.is_lost = True
        self._grammar.lost()

    def _move(self) -> bool:
        """Continue with a lexer that is not lost. Return False if there is no time for that. This
        costs other outputs as much time, so it is not counted as spent.
        """
        root: Root | None = None
        for _ in range(_NUM_MOVES):
            root = self._root.living()
            if root is None:
                break
            if (matcher := root.follow(self._tokens)) is not None:
                self._root, self._matcher = root, matcher
                return True
            if not root.is_lost:
                break
        is_own = root is not None and root.is_lost  # by its own tokens alone
        self._fail(None if is_own else _LEFT_BEHIND.format(num_tokens=len(self._tokens)))
        return False

    def _fail(self, why: str | None = None) -> None:
        """Record a failure. `why` is None if the grammar is too complex or no token can follow."""
        self._mask.fill(0)
        if self.failure is None and not (why is None and _is_dead_end(self._matcher)):
            logger.info("a grammar cannot be followed: %s", self._matcher.get_error())
            text = self._root.text_of(self._tokens)
            self.failure = why or too_complex(self._grammar.kind, text, len(self._tokens))


def _has_too_many_states(matcher: LLMatcher) -> bool:
    """Whether the lexer has too many states, from all its matchers together."""
    return is_lexer_error(matcher) and "too many states" in matcher.get_error()


def _is_dead_end(matcher: LLMatcher) -> bool:
    """Whether an error only says that no token of the vocabulary can follow."""
    return "NoExtension" in matcher.get_error()


def num_words(bits: int) -> int:
    """The number of words in a mask with this many bits."""
    return -(-bits // BITS)


def ids_of(row: npt.NDArray[np.int32]) -> list[int]:
    """Return the ids whose bits are set in a mask, in order."""
    found: list[int] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return found


def words_of(
    token_ids: frozenset[TokenId], vocab_size: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int32]]:
    """Return the indices of the mask's words that contain the bits of these ids, each once, and the
    bits in each.
    """
    words: dict[int, int] = {}
    for token in token_ids:
        if 0 <= token < vocab_size:
            place, bit = divmod(token, BITS)
            words[place] = words.get(place, 0) | 1 << bit
    bits = np.array(list(words.values()), np.uint32).view(np.int32)
    return np.array(list(words), np.intp), bits
