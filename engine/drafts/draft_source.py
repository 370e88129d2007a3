"""The interface of what guesses the tokens that follow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from typing import ClassVar, NamedTuple, Self

from engine.contract.request import Request
from engine.drafts.suffix_index import SharedIndexes


class Guess(NamedTuple):
    """What a source expects next.

    Attributes:
        tokens: the tokens, at least one.
        kind: how good the source's guesses of this kind are is learned separately; 0 or more.
    """

    tokens: array[int]
    kind: int


class DraftSource(ABC):
    """Guesses the tokens that follow one choice's. Used on the engine's thread only.

    Attributes:
        name: class attribute: the source's name in options and statistics.
        num_kinds: class attribute: the number of kinds of guesses.
    """

    name: ClassVar[str]
    num_kinds: ClassVar[int]

    @classmethod
    @abstractmethod
    def begin(cls, request: Request, indexes: SharedIndexes) -> Self | None:
        """Create the source of a choice's guesses, or None if it would never have any.

        Args:
            request: has all its prompt and perhaps some output.
            indexes: what the choices of a request share.
        """

    @abstractmethod
    def guess(self, tokens: array[int], most: int) -> Guess | None:
        """Return at most `most` tokens that may follow, or None if nothing suggests any.

        It is asked at some steps and not at others. Its time per token is bounded, whatever the
        tokens are: what it has to catch up with is done a part at a time.

        Args:
            tokens: the request's prompt and output. Only appended to from one call to the next.
            most: at least 1.
        """
