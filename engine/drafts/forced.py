"""Guesses that the output goes on with the text that its grammar forces.

In JSON, after the first letter of a name or its opening quote, the rest often is the only text that
fits. The model may divide it into other tokens than the tokenizer does, so how often it does not is
learned.
"""

from __future__ import annotations

from array import array

from typing_extensions import override

from engine.contract.request import Request
from engine.drafts.draft_source import DraftSource, Guess
from engine.drafts.suffix_index import SharedIndexes


class Forced(DraftSource):
    """The tokens of the text that must come next."""

    name = "grammar"
    num_kinds = 1

    def __init__(self, request: Request) -> None:
        self._request = request

    @classmethod
    @override
    def begin(cls, request: Request, indexes: SharedIndexes) -> Forced | None:
        return None if request.matcher is None else cls(request)

    @override
    def guess(self, tokens: array[int], most: int) -> Guess | None:
        matcher = self._request.matcher
        forced = () if matcher is None else matcher.forced(most)
        return Guess(array("i", forced), 0) if forced else None
