"""Guesses that the output goes on as the request's own prompt or output did before."""

from __future__ import annotations

from array import array

from typing_extensions import override

from engine.contract.request import Request
from engine.drafts.draft_source import DraftSource, Guess
from engine.drafts.suffix_index import SIZES, SharedIndexes, SuffixIndex

_LENGTHS = (3, 4, 6, 16)
"""Matches that are at least this long are of a further kind each; the shortest have 2 tokens."""


class OwnText(DraftSource):
    """The longest match of the last tokens, as far as an n-gram tells; the latest of these. A match
    that goes on is followed as long as it lasts.
    """

    name = "history"
    num_kinds = len(_LENGTHS) + 1

    def __init__(self, tokens: array[int], num_prompt_tokens: int, prompt: SuffixIndex) -> None:
        """`prompt`: of the prompt's tokens. The choices of a request share it."""
        self._prompt = prompt
        self._num_prompt_tokens = num_prompt_tokens
        self._output = SuffixIndex(tokens, max(0, num_prompt_tokens - 1))
        self._seen = len(tokens)
        self._at = 0  # what follows the match that is followed begins here; 0: there is none
        self._length = 0

    @classmethod
    @override
    def begin(cls, request: Request, indexes: SharedIndexes) -> OwnText:
        spec = request.spec
        prompt = indexes.of(spec.request_id, cls.name, spec.prompt)
        return cls(request.token_ids, request.num_prompt_tokens, prompt)

    @override
    def guess(self, tokens: array[int], most: int) -> Guess | None:
        count = len(tokens)
        self._prompt.extend(self._num_prompt_tokens)
        self._output.extend(count)
        self._follow(tokens, count)
        if self._length < SIZES[0]:
            tail = tokens[-SIZES[0] :]
            found = max((self._output.find(tail), self._prompt.find(tail)), key=_size)
            if found is not None and found.size > self._length:
                self._length, self._at = found
        if not self._at:
            return None
        following = tokens[self._at : self._at + most]
        period = count - self._at
        for index in range(len(following) - period, most - period):  # the text repeats itself
            following.append(following[index])
        return Guess(following, sum(self._length >= length for length in _LENGTHS))

    def _follow(self, tokens: array[int], count: int) -> None:
        """Advance along the match by the tokens since the last call, as far as it lasts."""
        if self._at:
            new = tokens[self._seen :]
            if tokens[self._at : self._at + len(new)] == new:
                self._at += len(new)
                self._length += len(new)
            else:
                self._at = self._length = 0
        self._seen = count


def _size(match: tuple[int, int] | None) -> int:
    return 0 if match is None else match[0]
