"""The bytes that each token of a vocabulary writes, in a representation in which marks can be
found.

A special token is spelled with bytes that no text contains, so that a mark that is a special token
is found only where that token occurs. A token whose bytes no text contains belongs to no mark.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from engine.structured.special_names import SpecialNames

BLANKS = b" \t\r\n"
_BEGIN = b"\xff"
_DIGIT = 0xF8
"""The base value of the digits in a special token's spelling. In UTF-8, no byte is 0xF8 or more."""
_BASE = 7
_NUM_DIGITS = 8
_NO_TEXT = b"\xfe"
"""The spelling of a token with bytes that no text contains: a digit, because no spelling begins
with one.
"""


class TokenSpellings:
    """The spellings of a vocabulary's tokens.

    Attributes:
        by_id: each token's spelling; empty if it writes nothing.
        blanks: the tokens that consist of blanks only.
    """

    def __init__(
        self, texts: Sequence[bytes], special_ids: Iterable[int], names: SpecialNames
    ) -> None:
        """`texts`: each token's bytes. `special_ids`: the ids of the special tokens."""
        self._names = names
        self.by_id = [text if not text or max(text) < _DIGIT else _NO_TEXT for text in texts]
        for token in special_ids:
            self.by_id[token] = _special(token)
        order = sorted(range(len(self.by_id)), key=self.by_id.__getitem__)
        self._ids = order
        self._sorted = [self.by_id[token] for token in order]
        blank = (t for t, own in enumerate(self.by_id) if own.isspace())
        self.blanks = [token for token in blank if not self.by_id[token].strip(BLANKS)]

    def is_special(self, token: int) -> bool:
        """Whether a token is special. False if there is no token with this id."""
        return 0 <= token < len(self.by_id) and self.by_id[token].startswith(_BEGIN)

    def spell(self, text: str) -> bytes:
        """Return the spelling of a text, in which names of special tokens stand for these
        tokens.
        """
        return b"".join(
            part.encode() if isinstance(part, str) else _special(part)
            for part in self._names.parts(text)
        )

    def equal_to(self, spelling: bytes) -> list[int]:
        """Return the tokens with this spelling, which must not be empty."""
        return self._between(spelling, spelling + b"\x00")

    def starting_with(self, spelling: bytes) -> list[int]:
        """Return the tokens whose spelling begins with this text, which must not be empty."""
        return self._between(spelling, _successor(spelling))

    def containing(self, spelling: bytes) -> list[int]:
        """Return the tokens whose spelling contains this one."""
        return [token for token, own in enumerate(self.by_id) if spelling in own]

    def _between(self, first: bytes, behind: bytes) -> list[int]:
        return self._ids[bisect_left(self._sorted, first) : bisect_left(self._sorted, behind)]


def _special(token: int) -> bytes:
    digits = bytearray(_BEGIN)
    for _ in range(_NUM_DIGITS):
        token, digit = divmod(token, _BASE)
        digits.append(_DIGIT + digit)
    return bytes(digits)


def _successor(spelling: bytes) -> bytes:
    """Return the first spelling after all those that begin with this one."""
    kept = spelling.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\xff" * (len(spelling) + 1)
