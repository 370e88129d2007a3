"""Where the last tokens of a text stood before.

For each size, a table has an entry for each hash of that many tokens: the position after their last
occurrence. An entry may belong to other tokens with the same hash, so what is found is compared.

    text    a b c d a b c        n-grams that end before the last token are in the tables
    find(a b c)                  3 tokens, 3: what followed them begins at position 3

The tables are arrays of four bytes per entry, one to two entries per token: at most 32 bytes for
each token in all, whatever the text repeats.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from engine.contract.token_ids import TokenIds
from engine.contract.types import RequestId

SIZES = (6, 4, 3, 2)
"""How many tokens an n-gram has; the longest is looked up first."""
CHUNK_TOKENS = 16384
"""The most tokens that one call puts into the tables, so that it takes about a millisecond."""
_FEW = 12
"""Up to this many tokens are put in one by one, which is then faster."""
_LEAST = 64
_FACTORS = (0x1B873593, 0x0F4F7C15, 0x165667B1, 0x13C6EF37, 0x1D3F84D5, 0x085EBCA7)
"""Odd numbers below 2^29, so that a sum over tokens of 31 bits stays within 63 bits."""
_SHIFT = 23

_Hashes = npt.NDArray[np.int64]


class Match(NamedTuple):
    """Tokens that stand in the text: how many, and the position after them."""

    size: int
    end: int


class SuffixIndex:
    """The n-grams of a text that may grow.

    Attributes:
        text: the text, not to be changed but by who owns it.
    """

    def __init__(self, text: array[int], begin: int = 0) -> None:
        """`text`: only appended to. `begin`: the position of the first token at which an n-gram
        ends that is to be found.
        """
        self.text = text
        self._begin = self._next = begin
        self._make_tables(len(text) - begin)

    def extend(self, end: int) -> None:
        """Let the n-grams that end before the token at position end - 1 be found, or as many more
        of them as one call may take.
        """
        last = min(end - 1, self._next + CHUNK_TOKENS)
        if last - self._begin > self._size:
            self._make_tables(max(2 * self._size, end - 1 - self._begin))
            self._next = self._begin
            last = min(end - 1, self._next + CHUNK_TOKENS)
        if last - self._next <= _FEW:
            for position in range(max(self._next, SIZES[-1] - 1), last):
                tail = self.text[max(0, position - SIZES[0] + 1) : position + 1]
                for table, place in zip(self._tables, self._places(tail), strict=True):
                    if place >= 0:
                        table[place] = position + 1
        else:
            self._put_chunk(self._next, last)
        self._next = max(self._next, last)

    def find(self, tail: array[int]) -> Match | None:
        """Return the last occurrence of the longest n-gram with which `tail` ends."""
        places = self._places(tail[-SIZES[0] :])
        for size, table, place in zip(SIZES, self._tables, places, strict=True):
            if place >= 0 and (end := table[place]) and self.text[end - size : end] == tail[-size:]:
                return Match(size, end)
        return None

    @property
    def num_bytes(self) -> int:
        """The memory of the tables."""
        return sum(table.itemsize * len(table) for table in self._tables)

    def _make_tables(self, num_tokens: int) -> None:
        self._size = 1 << max(num_tokens, _LEAST).bit_length() - 1
        if self._size < num_tokens:
            self._size *= 2
        self._mask = self._size - 1
        empty = bytes(4 * self._size)
        self._tables = [array("i", empty) for _ in SIZES]

    def _places(self, tail: array[int]) -> list[int]:
        """Return the entry of each size's n-gram at the end of `tail`; -1 if it is too short."""
        mask = self._mask
        hashed, at, found = 0, 0, []
        last = len(tail)
        for size in reversed(SIZES):
            if size > last:
                found.append(-1)
                continue
            while at < size:
                hashed += tail[last - 1 - at] * _FACTORS[at]
                at += 1
            found.append((hashed ^ (hashed >> _SHIFT)) & mask)
        found.reverse()
        return found

    def _put_chunk(self, first: int, last: int) -> None:
        """Put the n-grams that end at positions first to before last into the tables."""
        start = max(0, first - SIZES[0] + 1)
        ids = np.frombuffer(self.text[start:last], dtype=np.int32).astype(np.int64)
        hashed: _Hashes = np.zeros(last - first, dtype=np.int64)
        at = 0
        for size, table in zip(reversed(SIZES), reversed(self._tables), strict=True):
            while at < size:
                shifted = ids[max(0, first - at - start) : last - at - start]
                hashed[len(hashed) - len(shifted) :] += shifted * _FACTORS[at]
                at += 1
            skipped = max(0, size - 1 - first)  # no n-gram of this size ends there
            places = ((hashed ^ (hashed >> _SHIFT)) & self._mask)[skipped:]
            # If a place occurs twice, numpy keeps the last value.
            np.frombuffer(table, dtype=np.int32)[places] = np.arange(
                first + skipped + 1, last + 1, dtype=np.int32
            )


class SharedIndexes:
    """The indexes of texts that belong to a request as a whole. Its choices share them, and they
    are dropped with the last choice.
    """

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[RequestId, str], SuffixIndex] = WeakValueDictionary()

    def of(self, request_id: RequestId, name: str, text: TokenIds) -> SuffixIndex:
        """Return the index of a request's text. `name`: which of its texts it is."""
        index = self._known.get((request_id, name))
        if index is None:
            index = self._known[request_id, name] = SuffixIndex(array("i", text.packed))
        return index
