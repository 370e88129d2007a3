"""What sampling remembers about one request's tokens, on the host. Nothing here takes memory
proportional to vocabulary times batch.

Both records follow `token_ids` rather than what was computed, so prefill chunks and preemptions do
not affect them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.contract.token_ids import TokenIds

_PRIME = (1 << 61) - 1
_BASE = 0x1B873593CC9E2D51 % _PRIME


class TokenCounts:
    """The tokens that were seen, and how often each occurred in the output; for penalties."""

    __slots__ = ("_counts", "_ids", "_num_prompt_tokens", "_num_read", "_places")

    def __init__(self, prompt: TokenIds) -> None:
        self._ids = TokenIds.set_of(prompt).array.astype(np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._places = dict(zip(self._ids.tolist(), range(len(self._ids)), strict=True))
        self._num_read = len(prompt)

    def catch_up(self, token_ids: Sequence[int], end: int) -> None:
        """Count the tokens added since the last call. `token_ids` holds prompt and output; only the
        first `end` tokens count.
        """
        end = min(end, len(token_ids))  # fewer if the request has lost tokens since
        for token in token_ids[self._num_read : end]:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                grown = max(16, place)
                self._ids = np.concatenate([self._ids, np.zeros(grown, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(grown, np.float32)])
            self._ids[place] = token
            self._counts[place] += 1
        self._num_read = end

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The tokens that were seen, without duplicates: int64 [N]."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of `ids` was seen in the output: float32 [N]."""
        return self._counts[: len(self._places)]


class NgramIndex:
    """The tokens that followed each sequence of n - 1 tokens.

    Sequences are identified by a rolling hash (Karp and Rabin 1987), modulo 2^61 - 1, so memory
    grows with the number of tokens, not with tokens times n. Among a million sequences, two have
    the same hash with a probability of 2^-22; in that case one token too many is forbidden.
    """

    __slots__ = ("_dropped", "_followers", "_hash", "_num_read", "_width")

    def __init__(self, size: int) -> None:
        """Create an empty index.

        Args:
            size: n, at least 1.
        """
        self._width = size - 1
        self._followers: dict[int, int | set[int]] = {}
        self._hash = 0
        self._dropped = pow(_BASE, self._width, _PRIME)
        self._num_read = 0

    def catch_up(self, token_ids: Sequence[int], end: int) -> None:
        """Index the tokens added since the last call. `token_ids` holds prompt and output; only the
        first `end` tokens count.
        """
        end = min(end, len(token_ids))  # fewer if the request has lost tokens since
        followers, width, value = self._followers, self._width, self._hash
        for position in range(self._num_read, end):
            token = token_ids[position]
            if position >= width:
                known = followers.setdefault(value, token)
                if isinstance(known, set):
                    known.add(token)
                elif known != token:
                    followers[value] = {known, token}
            if width:
                value = value * _BASE + token + 1
                if position >= width:
                    value -= (token_ids[position - width] + 1) * self._dropped
                value %= _PRIME
        self._hash, self._num_read = value, end

    def repeating(self) -> Sequence[int]:
        """Return the tokens that would complete an n-gram that has already occurred."""
        if self._num_read < self._width:
            return ()
        known = self._followers.get(self._hash)
        if known is None:
            return ()
        return tuple(known) if isinstance(known, set) else (known,)
