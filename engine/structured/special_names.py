"""Finds the names of a tokenizer's special tokens in texts that describe an output.

Such a name means only the token itself, not text that spells the name with other tokens.
"""

from __future__ import annotations

import re

from engine.text import Tokenizer

Part = str | int
"""A segment of a text: text, or the id of a special token."""


class SpecialNames:
    """Finds special tokens in texts."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: V; token ids beyond it are ignored."""
        self._ids: dict[str, int] = {}
        for token in sorted(tokenizer.special_token_ids):
            if token < vocab_size:
                name = tokenizer.token_bytes(token).decode("utf-8", "replace")
                self._ids.setdefault(name, token)
        self._ids.pop("", None)
        longest_first = sorted(self._ids, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first))
        self._find = re.compile(f"({pattern})") if pattern else None

    def parts(self, text: str) -> tuple[Part, ...]:
        """Split a text into segments. None is empty, and no two text segments are adjacent."""
        if self._find is None:
            return (text,) if text else ()
        split = enumerate(self._find.split(text))
        return tuple(self._ids[part] if index % 2 else part for index, part in split if part)

    def id_of(self, name: str) -> int | None:
        """Return the id of the special token with this name."""
        return self._ids.get(name)
