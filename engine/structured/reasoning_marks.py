"""The marks around reasoning, and the tokens that write them.

A mark may consist of one token or many, and a token may write its end and more. So for each
position within a mark there is a list of the tokens that continue it from there. These tables are
created once for a vocabulary and its marks. They are small: few tokens fit at any position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.contract.errors import InvalidRequestError
from engine.contract.types import TokenId
from engine.structured.matcher import words_of
from engine.structured.token_spellings import BLANKS, TokenSpellings

Bits = tuple[npt.NDArray[np.intp], npt.NDArray[np.int32]]
"""Tokens in a mask: the indices of its words, each once, and the bits in each word."""


class Marks(NamedTuple):
    """Marks as requested; see `ReasoningParams`."""

    opening: str
    closing: str
    then: str
    max_blanks: int


class MarkTables:
    """The tables of one vocabulary and its marks.

    Attributes:
        opening, closing, then: the marks' spellings.
        max_blanks: the most blanks before the grammar starts.
        go_on_opening, go_on_closing, go_on_then: for each position in the mark, the tokens that
            continue it.
        unfit: for each length of a prefix of the closing mark that the text ends with, the tokens
            that complete the mark and continue with what may not follow it.
        blanks: for each number of blanks that are left, the tokens with at most that many blanks.
    """

    def __init__(self, marks: Marks, spellings: TokenSpellings) -> None:
        """Create the tables.

        Raises:
            InvalidRequestError: the tokens cannot write the closing mark, or what follows it.
        """
        self._spellings = spellings
        self.opening = spellings.spell(marks.opening)
        self.closing = spellings.spell(marks.closing)
        self.then = spellings.spell(marks.then)
        self.max_blanks = marks.max_blanks
        self.go_on_opening = self._go_on(self.opening, lambda rest: self.closing not in rest)
        self.go_on_closing = self._go_on(self.closing, self.fits)
        self.go_on_then = self._go_on(self.then, self._are_blanks)
        whole = spellings.containing(self.closing)
        self.unfit = [self._unfit(whole, length) for length in range(len(self.closing))]
        self.blanks = self._blanks()
        for name, mark, text in (
            ("closing", self.closing, marks.closing),
            ("then", self.then, marks.then),
        ):
            if not self._is_writable(mark):
                raise InvalidRequestError(
                    "grammar.reasoning",
                    f"{name} is {text!r}, which the model's tokens cannot write",
                )

    def state_of(self, tail: bytes) -> int:
        """Return the length of the longest prefix of the closing mark that this text ends with."""
        for length in range(min(len(tail), len(self.closing) - 1), 0, -1):
            if self.closing.startswith(tail[-length:]):
                return length
        return 0

    def fits(self, rest: bytes) -> bool:
        """Whether this may follow the closing mark within the same token, before the grammar
        starts.
        """
        if self.then.startswith(rest):
            return True
        return rest.startswith(self.then) and self._are_blanks(rest[len(self.then) :])

    def _are_blanks(self, rest: bytes) -> bool:
        return not rest.strip(BLANKS) and len(rest) <= self.max_blanks

    def _go_on(self, mark: bytes, fits: Callable[[bytes], bool]) -> list[Bits]:
        return [self._bits(self._next(mark, place, fits)) for place in range(len(mark))]

    def _next(self, mark: bytes, place: int, fits: Callable[[bytes], bool]) -> list[int]:
        rest = mark[place:]
        found = [t for n in range(1, len(rest)) for t in self._spellings.equal_to(rest[:n])]
        spelled = self._spellings.by_id
        ends = self._spellings.starting_with(rest)
        return found + [token for token in ends if fits(spelled[token][len(rest) :])]

    def _unfit(self, whole: Iterable[int], length: int) -> Bits:
        """Return the `unfit` tokens for one length. `whole`: the tokens that contain the whole
        mark.
        """
        before = self.closing[:length]
        candidates = set(whole)
        while length:
            candidates.update(self._spellings.starting_with(self.closing[length:]))
            length = self.state_of(self.closing[1:length])
        return self._bits(token for token in candidates if not self._completes_well(before, token))

    def _completes_well(self, before: bytes, token: int) -> bool:
        text = before + self._spellings.by_id[token]
        place = text.find(self.closing)
        return place < 0 or self.fits(text[place + len(self.closing) :])

    def _blanks(self) -> list[Bits]:
        spelled = self._spellings.by_id
        return [
            self._bits(token for token in self._spellings.blanks if len(spelled[token]) <= left)
            for left in range(self.max_blanks + 1)
        ]

    def _bits(self, tokens: Iterable[int]) -> Bits:
        return words_of(frozenset(map(TokenId, tokens)), len(self._spellings.by_id))

    def _is_writable(self, mark: bytes) -> bool:
        """Whether a sequence of tokens spells exactly this mark."""
        reached = {0}
        for place in range(len(mark)):
            if place in reached:
                rest = mark[place:]
                reached |= {
                    place + n for n in range(1, len(rest) + 1) if self._spellings.equal_to(rest[:n])
                }
        return len(mark) in reached
