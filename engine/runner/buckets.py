"""The sizes to which captured steps are padded: few enough to capture, and close enough to waste
little.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN_STEPS = (1, 2, 4, 8, 16, 32, 64)
_CONTEXT_STEPS = (256, 1024, 4096)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes to pad to: a few small ones, then multiples of the last of these.

    Attributes:
        first: the small sizes, ascending.
    """

    first: tuple[int, ...]

    def at_least(self, size: int) -> int:
        """The smallest of the sizes that is at least `size`."""
        for candidate in self.first:
            if size <= candidate:
                return candidate
        return -(-size // self.first[-1]) * self.first[-1]

    def at_most(self, size: int) -> int:
        """The largest of the sizes that is at most `size`; 0: all are larger."""
        last = self.first[-1]
        if size >= last:
            return size // last * last
        return max((candidate for candidate in self.first if candidate <= size), default=0)

    def up_to(self, size: int) -> Iterator[int]:
        """The sizes to which 1 to `size` are padded, ascending."""
        reached = 0
        while reached < size:
            reached = self.at_least(reached + 1)
            yield reached


def token_sizes(interval: int) -> Sizes:
    """The sizes for a step's tokens: the multiples of the interval; 0: powers of two up to 64, then
    multiples of 64.
    """
    return Sizes((interval,) if interval else _TOKEN_STEPS)


def context_sizes(interval: int) -> Sizes:
    """The sizes for the context that is read, in tokens: the multiples of the interval; 0: 256,
    1024, 4096 and its multiples.
    """
    return Sizes((interval,) if interval else _CONTEXT_STEPS)
