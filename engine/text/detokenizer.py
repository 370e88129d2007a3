"""Converts one output's token ids to text as they arrive, without ever splitting a character.

The invariant: let P be the prompt's ids and O all output ids. What `push` and `flush` return,
joined, is

    decode(P + O) without its beginning decode(P)

that is, the text of the output in its context. A blank that the tokenizer drops at the beginning of
a text is dropped only if the prompt has no text. With an empty prompt this is decode(O). There are
two special cases:

- A prompt that ends within a character: the output's first text then contains the whole character
  (or one U+FFFD, if it is never completed), and decode(P) above excludes the incomplete character.
- <0xAB> tokens (byte fallback) that are not valid UTF-8: the library's decoder produces one U+FFFD
  for every byte of the whole run of such tokens, even for its valid characters. That cannot be
  known before the run ends. Here, the valid characters are kept, and each invalid sequence (as
  Unicode defines it) becomes one U+FFFD, as in byte-level tokenizers.

There are two implementations. If the text is the concatenation of the tokens' bytes
(`pieces.PieceRules.concatenates`: all byte-level and nearly all sentencepiece-like tokenizers), a
table look-up and an incremental UTF-8 decoder suffice, and at most three bytes are pending. For the
others (WordPiece, ...), a short window of ids is decoded with and without the new ones, and the
difference is the text:

    ids   [ context | pending ]        text = decode(context + pending) without decode(context)
          0         read

Both have a constant cost per token, however long the output is. They hold no more than the ids of
two pushes or a handful of ids, whichever is more.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

from engine.text.tokenizer import PieceTable, Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 6
"""How many of the prompt's last ids are decoded together with the first output ids."""
_PENDING = 8
"""The most pending ids that can be one unfinished character."""


class IncrementalDetokenizer(Protocol):
    """Converts the ids of one output to text. Not thread-safe."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add new ids, and return the text that they complete; empty within a character."""
        ...

    def flush(self) -> str:
        """End the output, and return the rest: U+FFFD for a character that was never completed."""
        ...


def incremental_detokenizer(
    tokenizer: Tokenizer,
    *,
    skip_special_tokens: bool = True,
    prompt_tail: Sequence[int] = (),
    shown: frozenset[int] = frozenset(),
) -> IncrementalDetokenizer:
    """Create a detokenizer for one output.

    Args:
        tokenizer: the model's tokenizer.
        skip_special_tokens: whether special tokens are left out of the text.
        prompt_tail: the ids before the output: the whole prompt, or its end. Only the last few
            matter. Empty if the output is the beginning of the text.
        shown: special tokens that are not left out.
    """
    kind = _Bytes if tokenizer.piece_rules.concatenates else _Window
    pieces = tokenizer.pieces(skip_special_tokens=skip_special_tokens, shown=shown)
    return kind(tokenizer, pieces, prompt_tail)


class _Bytes:
    """For tokenizers whose text is the concatenation of the tokens' bytes."""

    __slots__ = ("_drop_marker", "_pending", "_pieces", "_strip", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, pieces: PieceTable, prompt_tail: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces
        rules = tokenizer.piece_rules
        self._drop_marker = bool(rules.first_marker)  # until the text's first token is there
        self._strip = rules.strip_blanks  # blanks still to be dropped
        self._pending = b""  # the beginning of a character: 0 to 3 bytes
        tail: list[int] = []
        size = 0
        for token_id in reversed(prompt_tail):
            if size > max(3, self._strip):
                break
            tail.append(token_id)
            size += len(self._pieces[token_id])
        self.push(tail[::-1])

    def push(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        if self._drop_marker or self._strip:
            data = self._beginning(token_ids)
        elif len(token_ids) == 1:
            data = pieces[token_ids[0]]
        else:
            data = b"".join([pieces[token_id] for token_id in token_ids])
        if self._pending:
            data = self._pending + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        text, _ = codecs.utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text

    def _beginning(self, token_ids: Sequence[int]) -> bytes:
        """Return the bytes of token ids, which may be the first ones in the text."""
        parts = []
        for token_id in token_ids:
            piece = self._pieces[token_id]
            if piece and self._drop_marker:
                piece = self._tokenizer.first_piece(token_id)
                self._drop_marker = False
            if piece and self._strip:
                blanks = sum(1 for _ in takewhile(b" "[0].__eq__, piece[: self._strip]))
                self._strip = self._strip - blanks if blanks == len(piece) else 0
                piece = piece[blanks:]
            parts.append(piece)
        return b"".join(parts)


class _Window:
    """For all other tokenizers; uses the library's decoder."""

    __slots__ = ("_ids", "_pieces", "_read", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, pieces: PieceTable, prompt_tail: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces
        tail: list[int] = []
        for token_id in reversed(prompt_tail):
            if len(tail) >= _CONTEXT and not self._begins_badly(tail):
                break
            if self._pieces[token_id]:
                tail.append(token_id)
        # Ids that put nothing into the text are left out: they would push the context out of the
        # window.
        self._ids = tail[::-1]
        self._read = len(tail)

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids += [token_id for token_id in token_ids if self._pieces[token_id]]
        if len(self._ids) == self._read:
            return ""
        before = self._decode(self._read)
        text = self._decode(len(self._ids))
        if len(text) > len(before) and not text.endswith(_REPLACEMENT):
            return self._take(len(self._ids), text, before)
        if len(self._ids) - self._read <= _PENDING:
            return ""
        # Too many for one unfinished character: take all but what may be one, where the text can be
        # cut there.
        for end in range(len(self._ids) - 1, len(self._ids) - 5, -1):
            part = self._decode(end)
            whole = not part.endswith(_REPLACEMENT) or end == len(self._ids) - 4
            if whole and len(part) > len(before) and text.startswith(part):
                return self._take(end, part, before)
        if len(self._ids) - self._read <= 2 * _PENDING:
            return ""
        return self._take(len(self._ids), text, before)

    def flush(self) -> str:
        if len(self._ids) == self._read:
            return ""
        return self._take(len(self._ids), self._decode(len(self._ids)), self._decode(self._read))

    def _begins_badly(self, tail: Sequence[int]) -> bool:
        """Whether a context (newest id first) may start in the middle of a character."""
        text = self._tokenizer.decode(tail[::-1], skip_special_tokens=False)
        return _REPLACEMENT in text and len(tail) < 4 * _CONTEXT

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[:end], skip_special_tokens=False)

    def _take(self, end: int, text: str, before: str) -> str:
        """Return what `text` has beyond `before`. The ids that produced it become the context of
        the next ones, so a context always starts at a character.
        """
        del self._ids[: self._read]
        self._read = end - self._read
        return text[len(before) :]
