"""One output's token ids become text, as they come, and a character is never split.

The law. Let P be the prompt's ids and O all output ids. What `push` and `flush` return, joined, is

    decode(P + O) without its beginning decode(P)

that is, the output's text as it stands in its context: a blank that the tokenizer drops at the
beginning of a text is dropped only where the prompt has no text. With an empty prompt this is
decode(O). Two cases need a word more:

- A prompt that ends within a character: the output's first text then has the character as a whole
  (or one U+FFFD, if it is never completed), and decode(P) above is without that part.
- <0xAB> tokens (byte fallback) that are not valid UTF-8: the library's decoder makes one U+FFFD of
  every byte of the whole run of such tokens, the run's valid characters included, which cannot be
  known before the run's end. Here, the valid characters stay, and each invalid part (as Unicode
  defines it) becomes one U+FFFD, as in byte-level tokenizers.

Two ways lead there. Where the text is the concatenation of the tokens' bytes
(`pieces.PieceRules.concatenates`: all byte-level and nearly all sentencepiece-like tokenizers) a
table look-up and an incremental UTF-8 decoder suffice; at most three bytes are pending. For the
others (WordPiece, ...) a short window of ids is decoded, with and without the new ones, and the
difference is the text:

    ids   [ context | pending ]        text = decode(context + pending) without decode(context)
          0         read

Both cost the same for every token, however long the output, and hold no more than the ids of two
pushes or a handful of ids, whichever is more.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

from engine.text.tokenizer import PieceTable, Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 6
"""How many of the prompt's ids the first pending ones are decoded with."""
_PENDING = 8
"""More pending ids than this are not one unfinished character any more."""


class IncrementalDetokenizer(Protocol):
    """Turns one output's ids into text; for one output, on one thread at a time."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is complete now and was not before; empty within a character."""
        ...

    def flush(self) -> str:
        """The rest: U+FFFD for a character that was never completed. The output is over then."""
        ...


def incremental_detokenizer(
    tokenizer: Tokenizer,
    *,
    skip_special_tokens: bool = True,
    prompt_tail: Sequence[int] = (),
    shown: frozenset[int] = frozenset(),
) -> IncrementalDetokenizer:
    """Begin an output.

    Args:
        tokenizer: the model's.
        skip_special_tokens: whether special tokens are left out of the text.
        prompt_tail: the ids before the output: the whole prompt, or its last ids; only the last
            few are looked at. Empty: the output begins the text.
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
        """The bytes of ids that come where the text may still be empty."""
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
    """For all other tokenizers, by the library's decoder."""

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
        """Whether a context, newest id first, may begin within a character."""
        text = self._tokenizer.decode(tail[::-1], skip_special_tokens=False)
        return _REPLACEMENT in text and len(tail) < 4 * _CONTEXT

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[:end], skip_special_tokens=False)

    def _take(self, end: int, text: str, before: str) -> str:
        """Hand out what text has beyond before; the ids that made it are the next ones' context.

        So a context always begins where a character does.
        """
        del self._ids[: self._read]
        self._read = end - self._read
        return text[len(before) :]
