"""Guesses that the output is what the caller expects, up to changes.

expected   a b c d e f g         the place moves by one with each expected token
output     a b X d               after another one (X) it moves too, or stays if the tokens that
output     a b X c d             were not expected are put in rather than exchanged lately
output     a b X Y d e           the place is found again by the tokens next to it, and else by
                                 an n-gram
"""

from __future__ import annotations

from array import array

from typing_extensions import override

from engine.contract.request import Request
from engine.drafts.draft_source import DraftSource, Guess
from engine.drafts.suffix_index import SIZES, SharedIndexes, SuffixIndex

_LENGTHS = (1, 3, 8)
"""If at least this many tokens were as expected, the guess is of a further kind."""
_BEHIND, _AHEAD = 4, 32
"""How far from its place a pair of tokens is looked for."""
_NEAR = 3
"""How far from its place a single token is looked for."""
_CATCH_UP = 64
"""The most tokens that one call takes; the place among earlier ones is found by an n-gram."""
_LOST = 4
"""After this many tokens that were not expected, an n-gram may lead anywhere."""


class Prediction(DraftSource):
    """The text that the caller expects; see the module."""

    name = "prediction"
    num_kinds = len(_LENGTHS) + 1

    def __init__(self, expected: SuffixIndex, num_tokens: int) -> None:
        """`expected`: the expected tokens; the choices of a request share it. `num_tokens`: how
        many tokens the request has without its output.
        """
        self._expected = expected.text
        self._index = expected
        self._seen = num_tokens
        self._at = 0
        self._run = self._missed = 0
        self._stays = False  # at a token that was not expected

    @classmethod
    @override
    def begin(cls, request: Request, indexes: SharedIndexes) -> Prediction | None:
        spec = request.spec
        if not spec.prediction:
            return None
        expected = indexes.of(spec.request_id, cls.name, spec.prediction)
        return cls(expected, request.num_prompt_tokens)

    @override
    def guess(self, tokens: array[int], most: int) -> Guess | None:
        self._index.extend(len(self._expected))
        for position in range(max(self._seen, len(tokens) - _CATCH_UP), len(tokens)):
            self._take(tokens, position)
        self._seen = len(tokens)
        following = self._expected[self._at : self._at + most]
        if not following:
            return None
        return Guess(following, sum(self._run >= length for length in _LENGTHS))

    def _take(self, tokens: array[int], position: int) -> None:
        expected, at, token = self._expected, self._at, tokens[position]
        if at < len(expected) and expected[at] == token:
            self._at, self._run, self._missed = at + 1, self._run + 1, 0
            return
        self._run = 0
        self._missed += 1
        found = self._near(token, tokens[position - 1])
        if not found and self._missed >= _LOST:
            match = self._index.find(tokens[max(0, position - SIZES[0] + 1) : position + 1])
            if match is not None and match.size >= SIZES[-2]:
                found, self._run = match.end, match.size
        if found:
            self._missed = 0
        self._at = found or min(at + (not self._stays), len(expected))

    def _near(self, token: int, before: int) -> int:
        """Return the place after the token, if it stands close to where it was expected."""
        expected, at = self._expected, self._at
        first = max(1, at - _BEHIND)
        for place in range(first, min(at + _AHEAD, len(expected))):
            if expected[place] == token and expected[place - 1] == before:
                self._run = 2
                return place + 1
        for distance in range(1, _NEAR + 1):
            for place in (at - distance, at + distance):
                if 0 <= place < len(expected) and expected[place] == token:
                    self._run, self._stays = 1, place < at
                    return place + 1
        return 0
