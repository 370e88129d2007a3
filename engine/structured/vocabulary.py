"""The model's vocabulary for llguidance: the bytes that each token adds to the text.

The bytes come from Headrace's tables, so that masks match the text that the front end delivers. A
token without text (a special one, or an id that the tokenizer lacks) can be chosen only if a Lark
grammar names it, as in <|call|> or <[7]>. After the vocabulary comes one extra token, which no
model has. llguidance uses it to say that the output may end here, and `matcher` replaces it by the
request's ending ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from llguidance import LLTokenizer

from engine.contract.errors import UnsupportedFeatureError
from engine.structured.special_names import SpecialNames
from engine.structured.token_spellings import TokenSpellings
from engine.text import Tokenizer

_END_NAME = b"<|end of the output|>"
_NO_TEXT = 0xFF
"""A byte that never occurs in UTF-8; llguidance marks special tokens with it."""


class Vocabulary(NamedTuple):
    """A model's tokens, in the representations that matchers need.

    Attributes:
        tokens: llguidance's representation.
        names: finds special tokens in texts.
        spellings: what each token writes, to find marks in it.
        bytes_alone: for each byte, the token that writes only that byte.
    """

    tokens: LLTokenizer
    names: SpecialNames
    spellings: TokenSpellings
    bytes_alone: Mapping[int, int]


def read_vocabulary(tokenizer: Tokenizer | None, vocab_size: int) -> Vocabulary:
    """Convert a tokenizer for llguidance.

    Args:
        tokenizer: the model's tokenizer, or None if it has none.
        vocab_size: V, the width of the logits. The extra token after the vocabulary has this id.

    Raises:
        UnsupportedFeatureError: this tokenizer does not support structured output; the message says
            why.
    """
    if tokenizer is None:
        raise UnsupportedFeatureError(
            "grammar", "needs the model's tokenizer.json, which is not there"
        )
    if not tokenizer.piece_rules.concatenates:
        raise UnsupportedFeatureError(
            "grammar",
            "is not there for this model: the text of its tokens depends on their neighbours "
            "(its tokenizer is neither byte-level nor with byte fallback)",
        )
    read = _Tokens(tokenizer, vocab_size)
    tokens = LLTokenizer(read, n_vocab=vocab_size + 1)  # type: ignore[arg-type]
    names = SpecialNames(tokenizer, vocab_size)
    special = read.special_token_ids[:-1]
    spellings = TokenSpellings(read.tokens[:-1], special, names)
    last = len(read.tokens) - 2
    alone = {own[0]: last - i for i, own in enumerate(reversed(spellings.by_id)) if len(own) == 1}
    return Vocabulary(tokens, names, spellings, alone)


class _Tokens:
    """The attributes that llguidance reads from a tokenizer object."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        pieces = tokenizer.pieces(skip_special_tokens=False)
        special = {i for i in tokenizer.special_token_ids if i < vocab_size}
        self.tokens = [
            tokenizer.token_bytes(i) if i in special else _text(pieces[i])
            for i in range(vocab_size)
        ]
        self.tokens.append(_END_NAME)
        self.special_token_ids = [*sorted(special), vocab_size]
        self.eos_token_id = vocab_size
        self.bos_token_id = None

    def __call__(self, text: str) -> NoReturn:
        raise NotImplementedError(
            "llguidance tokenizes nothing here: its own forced tokens are off"
        )


def _text(piece: bytes) -> bytes:
    """Return a token's bytes, or nothing if no text can contain them."""
    return b"" if _NO_TEXT in piece else piece
