"""Packed token ids for requests and results: four bytes per id, or twelve per id with a value.

A tuple of integers takes up to forty bytes per id. A request waits in two processes, and its prompt
and lists may be as long as the model's context or vocabulary. They are therefore packed on arrival
and stay packed: in the front end, on the way to the engine's process, and in the engine. Candidates
with their log-probabilities travel in the opposite direction; as tuples of pairs, 128 of them took
15 kB per token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast, overload

import numpy as np
import numpy.typing as npt

from engine.contract.errors import InvalidRequestError
from engine.contract.types import TokenId

_LARGEST = 2**31 - 1
_DENSE = 16
"""The density threshold for `set_of`: if the ids' range has at most this many values per id, a flag
for each value is faster than sorting. For a whole vocabulary, flags take half a millisecond, and
numpy's `unique` takes 20.
"""


def _is_id(token: object) -> bool:
    return type(token) is int and 0 <= token <= _LARGEST


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TokenIds(Sequence[TokenId]):
    """An immutable sequence of token ids. It equals the tuple of the same ids and has the same
    hash. A slice of it is a tuple.

    Attributes:
        packed: the ids, int32 in this machine's byte order.
    """

    packed: bytes = b""

    @classmethod
    def of(cls, ids: Iterable[int], field: str = "ids") -> TokenIds:
        """Pack ids. Packed ids are returned unchanged.

        Raises:
            InvalidRequestError: an id is not an integer, below zero, or above 2^31 - 1; the message
                names `field`.
        """
        if isinstance(ids, TokenIds):
            return ids
        listed = ids if isinstance(ids, list | tuple) else tuple(ids)
        if listed and not (
            set(map(type, listed)) == {int} and min(listed) >= 0 and max(listed) <= _LARGEST
        ):
            position, token = next(one for one in enumerate(listed) if not _is_id(one[1]))
            raise InvalidRequestError(
                f"{field}[{position}]",
                f"is {token!r}; token ids are whole numbers from 0 to {_LARGEST}",
            )
        return cls(array("i", listed).tobytes())

    @classmethod
    def set_of(cls, ids: Iterable[int]) -> TokenIds:
        """Pack ids in ascending order, without duplicates. Raises like `of`."""
        given = cls.of(ids).array
        if len(given) and given.max() < _DENSE * len(given):
            is_there = np.zeros(int(given.max()) + 1, dtype=np.bool_)
            is_there[given] = True
            return cls(np.flatnonzero(is_there).astype(np.int32).tobytes())
        return cls(np.unique(given).tobytes())

    @property
    def array(self) -> npt.NDArray[np.int32]:
        """A read-only view of the ids without a copy, int32 [N]."""
        return np.frombuffer(self.packed, dtype=np.int32)

    def without(self, others: TokenIds) -> TokenIds:
        """Return the ids that are not among `others`."""
        ids = self.array
        return TokenIds(ids[~np.isin(ids, others.array)].tobytes())

    def __len__(self) -> int:
        return len(self.packed) // 4

    def __iter__(self) -> Iterator[TokenId]:
        return iter(self._ids())

    def __contains__(self, token: object) -> bool:
        return token in self._ids()

    @overload
    def __getitem__(self, index: int) -> TokenId: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TokenId, ...]: ...
    def __getitem__(self, index: int | slice) -> TokenId | tuple[TokenId, ...]:
        taken = self._ids()[index]
        return taken if isinstance(taken, int) else tuple(taken)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self.packed == other.packed
        if isinstance(other, tuple):
            return tuple(self) == other
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def _ids(self) -> memoryview[TokenId]:
        return cast("memoryview[TokenId]", memoryview(self.packed).cast("i"))


NO_IDS = TokenIds()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TokenValues(Sequence[tuple[TokenId, float]]):
    """An immutable sequence of (token id, value) pairs. A value is, for example, a logit bias or a
    log-probability.

    It equals the tuple of the same pairs and has the same hash.

    Attributes:
        ids: the ids of the pairs.
        packed: the values, float64 in this machine's byte order, one for each pair.
    """

    ids: TokenIds = NO_IDS
    packed: bytes = b""

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, float]], field: str = "values") -> TokenValues:
        """Pack pairs. Packed pairs are returned unchanged.

        Raises:
            InvalidRequestError: as in `TokenIds.of`.
        """
        if isinstance(pairs, TokenValues):
            return pairs
        listed = tuple(pairs)
        ids = TokenIds.of([token for token, _ in listed], field)
        return cls(ids, array("d", [value for _, value in listed]).tobytes())

    @property
    def values(self) -> npt.NDArray[np.float64]:
        """A read-only view of the values without a copy, float64 [N]."""
        return np.frombuffer(self.packed, dtype=np.float64)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[tuple[TokenId, float]]:
        return zip(self.ids, self._values(), strict=True)

    @overload
    def __getitem__(self, index: int) -> tuple[TokenId, float]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[TokenId, float], ...]: ...
    def __getitem__(
        self, index: int | slice
    ) -> tuple[TokenId, float] | tuple[tuple[TokenId, float], ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return self.ids[index], self._values()[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenValues):
            return self.ids == other.ids and self.packed == other.packed
        if isinstance(other, tuple):
            return tuple(self) == other
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def _values(self) -> memoryview[float]:
        return memoryview(self.packed).cast("d")


NO_VALUES = TokenValues()
