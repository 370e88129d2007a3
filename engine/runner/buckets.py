"""The sizes to which captured steps are padded. There are few enough to capture them all, and they
are close enough to each other to waste little.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MOST_MIXED_TOKENS = 1024
"""The maximum number of tokens in a captured step with prompts. A larger one takes so long that its
launches are hidden behind its computation.
"""
_DECODE_TOKENS = (1, 2, 4, 8, 16, 24, 32)
_MIXED_TOKENS = (64, 128, 256, 512, MOST_MIXED_TOKENS)
_REQUESTS_FACTOR, _FEWEST_REQUESTS = 4, 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes to pad to.

    Attributes:
        first: the small sizes, ascending.
        goes_on: whether the multiples of the last one are also sizes. If not, larger steps are not
            padded.
    """

    first: tuple[int, ...]
    goes_on: bool = True

    def at_least(self, size: int) -> int:
        """Return the smallest size that is at least `size`."""
        for candidate in self.first:
            if size <= candidate:
                return candidate
        return -(-size // self.first[-1]) * self.first[-1] if self.goes_on else size

    def at_most(self, size: int) -> int:
        """Return the largest size that is at most `size`, or 0 if all are larger."""
        last = self.first[-1]
        if size >= last:
            return size // last * last if self.goes_on else size
        return max((candidate for candidate in self.first if candidate <= size), default=0)

    def up_to(self, size: int) -> Iterator[int]:
        """Yield the sizes to which 1 to `size` are padded, ascending."""
        reached = 0
        while reached < size:
            reached = self.at_least(reached + 1)
            yield reached


def decode_sizes(interval: int) -> Sizes:
    """Return the sizes for the tokens of decode steps: the multiples of the interval.

    If it is 0, the sizes are 1, 2, 4, 8, 16, 24 and the multiples of 32.
    """
    return Sizes((interval,) if interval else _DECODE_TOKENS)


def mixed_sizes(interval: int) -> Sizes:
    """Return the sizes for the tokens of steps with prompts: the multiples of the interval.

    If it is 0, the sizes are the powers of two from 64 to 1024.
    """
    return Sizes((interval,)) if interval else Sizes(_MIXED_TOKENS, goes_on=False)


def request_sizes(most: int) -> Iterator[int]:
    """Yield the sizes for the requests of steps with prompts, descending: the maximum number of
    requests of a step, a quarter of it, and so on.
    """
    yield most
    while (most := most // _REQUESTS_FACTOR) >= _FEWEST_REQUESTS:
        yield most
