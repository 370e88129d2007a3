"""The random parts of a run: ids, words, tokens. All follow from one seed and the vector's name, so
that a driver cannot know its answers, and a run can be repeated.
"""

from __future__ import annotations

import random
import re
import struct

from headrace.v1 import generation_pb2 as g

_LETTERS = "abcdefghijklmnopqrstuvwxyzäöüßéñαβγдж中文"


class Chance:
    """What is random in one run of one vector."""

    def __init__(self, seed: int, name: str) -> None:
        self._random = random.Random(f"{seed}/{name}")

    def identifier(self) -> str:
        """A request's id, or a part of one."""
        return f"{self._random.getrandbits(64):016x}"

    def word(self) -> str:
        """A word, not of ASCII alone."""
        return "".join(self._random.choices(_LETTERS, k=self._random.randint(2, 9)))

    def text(self, pattern: str) -> str:
        """A text, each `$w` in it replaced by a word."""
        return re.sub(r"\$w", lambda _match: self.word(), pattern)

    def token_id(self) -> int:
        """Any token's id."""
        return self._random.randrange(2**31)

    def token_ids(self, count: int | None = None) -> list[int]:
        """Some ids."""
        return [self.token_id() for _ in range(count or self._random.randint(1, 3))]

    def number(self, below: int) -> int:
        """A whole number."""
        return self._random.randrange(below)

    def shuffled(self, names: list[str]) -> list[str]:
        """The same in another order."""
        return self._random.sample(names, len(names))

    def logprob(self) -> float:
        """A log-probability, as float32 has it."""
        value = self._random.choice([-self._random.expovariate(1), -0.0, -0.1, float("-inf")])
        result: float = struct.unpack(">f", struct.pack(">f", value))[0]
        return result

    def token(self, piece: bytes, candidates: int) -> g.TokenInfo:
        """A token with its details; its bytes may be a part of a character."""
        info = g.TokenInfo(
            id=self.token_id(),
            text=piece.decode("utf-8", "replace"),
            bytes=piece,
            logprob=self.logprob(),
            rank=self._random.randrange(1, 1000),
        )
        for _ in range(candidates):
            other = self.word().encode()
            info.candidates.add(
                id=self.token_id(), text=other.decode(), bytes=other, logprob=self.logprob()
            )
        return info

    def random(self) -> random.Random:
        """For what else is random."""
        return self._random
