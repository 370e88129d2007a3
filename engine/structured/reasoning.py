"""Follows an output that begins with reasoning: limits the reasoning, and starts the grammar after
it.

    START ──opening──▶ REASONING ──closing──▶ THEN ──▶ BLANKS ──▶ FORM
      │  the grammar's own first tokens                           ▲
      └───────────────────────────────────────────────────────────┘

With a grammar, START follows both the mark and the grammar until one of them no longer fits. If the
mark is completed, the grammar starts again after it. Within the reasoning anything may come, with
two exceptions: what would end the output, and a token that completes the closing mark and continues
with text that may not follow it.

Without a grammar, only the limit is enforced. After the closing mark the output is at START again,
because the service reads reasoning again if it begins before any other text. At the first other
text the matcher is no longer needed (`is_free`).

When the limit is reached, only tokens that continue the closing mark fit. A token counts if it
begins before the mark. Tokens that may have begun the mark count until it is complete, so the limit
is never exceeded.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from copy import copy as shallow_copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.contract.sampling_params import ReasoningParams
from engine.contract.types import TokenId
from engine.structured.matcher import BITS, GrammarMatcher, ids_of, num_words, words_of
from engine.structured.reasoning_marks import Bits, MarkTables
from engine.structured.special_names import SpecialNames
from engine.structured.token_spellings import BLANKS
from engine.structured.vocabulary import Vocabulary

Row = npt.NDArray[np.int32]


class _At(enum.Enum):
    START = enum.auto()
    REASONING = enum.auto()
    THEN = enum.auto()
    BLANKS = enum.auto()
    FORM = enum.auto()
    OVER = enum.auto()


@dataclass(frozen=True, slots=True, eq=False)
class HeldReasoning:
    """What the matchers of one request have in common.

    Attributes:
        params: the request's reasoning parameters.
        tables: the tables of its marks.
        spellings: what each token writes.
        every: the mask of all tokens, int32 [ceil(V / 32)].
        thoughts: the mask of the tokens allowed in reasoning. With a grammar, it excludes the
            ending ids and the forbidden ones.
        barred: with a grammar, the tokens that are not in `thoughts`.
        endings: the ids that end the request's output.
        make_form: creates a matcher of the grammar; None if there is no grammar.
    """

    params: ReasoningParams
    tables: MarkTables
    spellings: list[bytes]
    every: Row
    thoughts: Row
    barred: frozenset[TokenId]
    endings: Bits
    make_form: Callable[[], GrammarMatcher] | None

    def make_matcher(self) -> ReasoningMatcher:
        """Create a matcher at the output's start. Cheap; each choice needs one."""
        return ReasoningMatcher(self)


def hold_reasoning(
    params: ReasoningParams,
    tables: MarkTables,
    vocabulary: Vocabulary,
    ending_token_ids: frozenset[TokenId],
    make_form: Callable[[], GrammarMatcher] | None,
) -> HeldReasoning:
    """Collect what a request's matchers need."""
    vocab_size = len(vocabulary.spellings.by_id)
    every = np.full(num_words(vocab_size), -1, np.int32)
    if vocab_size % BITS:
        every[-1] = (1 << vocab_size % BITS) - 1
    barred = frozenset[TokenId]()
    if make_form is not None:
        barred = ending_token_ids | _ids_of(params.forbidden, vocabulary.names)
    thoughts = every.copy()
    _clear(thoughts, words_of(barred, vocab_size))
    return HeldReasoning(
        params,
        tables,
        vocabulary.spellings.by_id,
        every,
        thoughts,
        barred,
        words_of(ending_token_ids, vocab_size),
        make_form,
    )


def _ids_of(names: tuple[str, ...], special: SpecialNames) -> frozenset[TokenId]:
    """Return the ids of the named tokens that the model has; it cannot write the others."""
    return frozenset(TokenId(i) for name in names if (i := special.id_of(name)) is not None)


class ReasoningMatcher:
    """A TokenMatcher for reasoning and a grammar after it. Following the marks takes a few
    microseconds per token, which are not counted as the grammar's.
    """

    __slots__ = (
        "_at",
        "_begins",
        "_form",
        "_held",
        "_left",
        "_mark",
        "_num_bytes",
        "_num_tokens",
        "_place",
        "_spent_s",
        "_state",
        "_tail",
    )

    def __init__(self, held: HeldReasoning) -> None:
        """Start at the output's first token."""
        self._held = held
        self._form: GrammarMatcher | None = None
        self._num_tokens = 0  # of reasoning, with those that may have begun the closing mark
        self._num_bytes = 0
        self._begins: list[int] = []  # of tokens that may be a part of the closing mark
        self._spent_s = 0.0  # by forms that were given up
        self._mark = held.tables.opening  # that is looked for at START
        self._place: int | None = 0  # within `_mark` or `then`; None: the mark cannot come any more
        self._tail = b""  # the reasoning's last bytes
        self._state = 0  # how much of the closing mark they are
        self._left = held.tables.max_blanks  # blanks that may come
        self._at = _At.START
        if held.params.is_open:
            self._at = _At.REASONING
        elif not held.params.opening:
            self._place = None
        if self._at is _At.START:
            self._begin_form()
            self._leave_start()

    # ---- what the engine asks --------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether the output is complete and nothing can follow it."""
        return self._at is _At.FORM and self._form is not None and self._form.is_complete

    @property
    def is_free(self) -> bool:
        """Whether the output is unconstrained from here on."""
        return self._at is _At.OVER

    @property
    def expected_s(self) -> float:
        """The expected cost of a token; see GrammarMatcher."""
        return 0.0 if self._form is None else self._form.expected_s

    @property
    def spent_s(self) -> float:
        """The cost of following the grammar so far, in seconds of CPU time."""
        return self._spent_s + (0.0 if self._form is None else self._form.spent_s)

    @property
    def failure(self) -> str | None:
        """Why the grammar can no longer be followed, or None if it can."""
        return None if self._form is None else self._form.failure

    def fill_mask(self, row: Row) -> None:
        """Write which tokens may come next. row: int32 [ceil(V / 32)], completely overwritten."""
        held, tables = self._held, self._held.tables
        match self._at:
            case _At.START:
                self._fill_with_form(row)
                if self._place is not None and held.make_form is not None:
                    _set(row, tables.go_on_opening[self._place])
            case _At.REASONING if self._is_exhausted():
                row.fill(0)
                _set(row, tables.go_on_closing[self._state])
                _clear(row, held.endings)
            case _At.REASONING:
                row[:] = held.thoughts
                if held.make_form is not None:
                    _clear(row, tables.unfit[self._state])
            case _At.THEN:
                row.fill(0)
                _set(row, tables.go_on_then[self._place or 0])
                _clear(row, held.endings)
            case _At.BLANKS:
                self._fill_with_form(row)
                _set(row, tables.blanks[self._left])
            case _At.FORM | _At.OVER:
                self._fill_with_form(row)

    def copy(self) -> ReasoningMatcher:
        """Return a matcher in the same state; see TokenMatcher."""
        made = shallow_copy(self)
        made._begins = self._begins.copy()
        made._form = None if self._form is None else self._form.copy()
        return made

    def charge(self, seconds: float) -> None:
        """Count what a copy has cost."""
        self._spent_s += seconds

    def num_fitting(self, tokens: Sequence[int]) -> int:
        """Return how many of some tokens may come next; all of them where that is not cheap."""
        if self._at is _At.FORM and self._form is not None:
            return self._form.num_fitting(tokens)
        return len(tokens)

    def forced(self, most: int) -> Sequence[int]:
        """Return up to `most` tokens of the text that the grammar forces next."""
        if self._at is _At.FORM and self._form is not None:
            return self._form.forced(most)
        return ()

    def fitting(self) -> list[int]:
        """Return the ids that may come next."""
        row = np.zeros_like(self._held.every)
        self.fill_mask(row)
        return ids_of(row)

    def accept(self, token: TokenId) -> bool:
        """Advance by a token. Return False if it does not fit, which leaves the state unchanged, or
        if the grammar can no longer be followed (`failure`).
        """
        if not 0 <= token < len(self._held.spellings):
            return False
        written = self._held.spellings[token]
        match self._at:
            case _At.START:
                return self._start(token, written)
            case _At.REASONING:
                return self._reason(token, written)
            case _At.THEN:
                return self._follow_then(written)
            case _At.BLANKS:
                return self._skip_blanks(token, written)
            case _At.FORM:
                return self._form is not None and self._form.accept(token)
            case _At.OVER:
                return True

    # ---- START -----------------------------------------------------------------------------------

    def _start(self, token: TokenId, written: bytes) -> bool:
        if self._held.make_form is None:
            self._look_for_mark(written)
            return True
        in_form = self._form is not None and self._form.accept(token)
        place, behind = _follow(self._mark, self._place, written)
        if place == len(self._mark):
            if self._held.tables.closing not in behind:
                self._think(behind)
                return True
            place = None
        if not in_form:
            if place is None:
                return False
            self._give_up_form()
        self._place = place
        self._leave_start()
        return True

    def _look_for_mark(self, written: bytes) -> None:
        """Check, without a grammar, whether reasoning begins. Blanks may come before it."""
        if self._place == 0:
            written = written.lstrip(BLANKS)
        if not written:
            return
        self._place, behind = _follow(self._mark, self._place, written)
        if self._place == len(self._mark):
            self._think(behind)
        else:
            self._leave_start()

    def _leave_start(self) -> None:
        """Leave START if the mark can no longer come."""
        if self._place is None:
            self._at = _At.OVER if self._held.make_form is None else _At.FORM

    # ---- REASONING -------------------------------------------------------------------------------

    def _is_exhausted(self) -> bool:
        most = self._held.params.max_tokens
        return most is not None and self._num_tokens >= most

    def _think(self, behind: bytes) -> None:
        """Begin the reasoning. `behind`: what the opening mark's last token wrote after the
        mark.
        """
        self._give_up_form()
        self._at = _At.REASONING
        self._tail, self._state, self._begins = b"", 0, []
        self._add(behind)

    def _reason(self, token: TokenId, written: bytes) -> bool:
        tables = self._held.tables
        if self._is_exhausted():
            place, behind = _follow(tables.closing, self._state, written)
            if place is None or not tables.fits(behind):
                return False
        elif self._held.make_form is not None:
            found = (self._tail + written).partition(tables.closing)
            if token in self._held.barred or not (found[1] == b"" or tables.fits(found[2])):
                return False
        self._num_tokens += 1
        self._begins.append(self._num_bytes)
        self._add(written)
        return True

    def _add(self, written: bytes) -> None:
        """Add text to the reasoning."""
        closing = self._held.tables.closing
        before, mark, behind = (self._tail + written).partition(closing)
        self._num_bytes += len(written)
        if mark:
            begin = self._num_bytes - len(mark) - len(behind)
            self._num_tokens -= sum(place >= begin for place in self._begins)
            self._close(behind)
            return
        nearest = self._num_bytes - len(closing) + 1
        self._begins = [place for place in self._begins if place >= nearest]
        self._tail = before[max(0, len(before) - len(closing) + 1) :]
        self._state = self._held.tables.state_of(self._tail)

    def _close(self, behind: bytes) -> None:
        """End the reasoning. `behind`: what the closing mark's last token wrote after the mark."""
        tables = self._held.tables
        if self._held.make_form is None:
            self._at = _At.START
            self._mark = tables.then + tables.opening
            self._place = 0 if tables.opening else None
            self._leave_start()
            if self._at is _At.START:
                self._look_for_mark(behind)
            return
        num_blanks = max(0, len(behind) - len(tables.then))
        self._left = tables.max_blanks - num_blanks
        self._place = len(behind) - num_blanks
        self._at = _At.THEN
        self._leave_then()

    # ---- THEN, BLANKS and FORM -------------------------------------------------------------------

    def _follow_then(self, written: bytes) -> bool:
        place, behind = _follow(self._held.tables.then, self._place, written)
        if place is None or behind.strip(BLANKS) or len(behind) > self._left:
            return False
        self._place = place
        self._left -= len(behind)
        self._leave_then()
        return True

    def _leave_then(self) -> None:
        if self._place == len(self._held.tables.then):
            self._begin_form()
            self._at = _At.BLANKS if self._left else _At.FORM

    def _skip_blanks(self, token: TokenId, written: bytes) -> bool:
        if self._form is not None and self._form.accept(token):
            self._at = _At.FORM
            return True
        if not written or written.strip(BLANKS) or len(written) > self._left:
            return False
        self._left -= len(written)
        if not self._left:
            self._at = _At.FORM
        return True

    def _begin_form(self) -> None:
        if self._held.make_form is not None:
            self._form = self._held.make_form()

    def _give_up_form(self) -> None:
        self._spent_s = self.spent_s
        self._form = None

    def _fill_with_form(self, row: Row) -> None:
        """Write what the grammar allows, or everything if there is no grammar."""
        if self._form is not None:
            self._form.fill_mask(row)
        elif self._held.make_form is None:
            row[:] = self._held.every
        else:
            row.fill(0)


def _follow(mark: bytes, place: int | None, written: bytes) -> tuple[int | None, bytes]:
    """Continue matching a mark.

    Returns:
        The new position in the mark, and what was written after the mark. The position is None if
        something other than the mark was written, or nothing.
    """
    if place is None or not written:
        return None, b""
    rest = mark[place:]
    if written.startswith(rest):
        return len(mark), written[len(rest) :]
    return (place + len(written), b"") if rest.startswith(written) else (None, b"")


def _set(row: Row, tokens: Bits) -> None:
    places, bits = tokens
    row[places] |= bits


def _clear(row: Row, tokens: Bits) -> None:
    places, bits = tokens
    row[places] &= ~bits
