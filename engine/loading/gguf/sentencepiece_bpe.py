"""SentencePiece's BPE, from a GGUF file's metadata, as the parts of a tokenizer.json.

A file has scores of tokens, and no merges: of two tokens beside each other those are merged first
that make the token with the highest score. Each way to divide a token is therefore a merge, in the
order of scores. Characters that are no token become tokens of their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.loading.gguf.container import Value

NORMAL, UNKNOWN, BYTE = 1, 2, 6
"""Types of tokens."""
_BLANK = "\u2581"
"""Stands for a blank."""
_LONGEST = 256
"""The maximum length of a token. SentencePiece makes none longer than 16 characters by default."""


class OtherTokenizerError(Exception):
    """It is not the tokenizer that is known here. The message says what is else, or missing."""


def sentencepiece_parts(
    own: Mapping[str, Value], tokens: Sequence[str], types: Sequence[int]
) -> dict[str, Any]:
    """Return the normalizer, pre-tokenizer, decoder and model, by these names.

    Args:
        own: the metadata below `tokenizer.ggml`.
        tokens: all tokens, each of them once.
        types: their types.

    Raises:
        OtherTokenizerError: tokens would not be those of SentencePiece.
    """
    if own.get("precompiled_charsmap") is not None or own.get("remove_extra_whitespaces") is True:
        raise OtherTokenizerError("text is normalized first")
    scores = own.get("scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise OtherTokenizerError("tokens lack their scores")
    if max(map(len, tokens), default=0) > _LONGEST:
        raise OtherTokenizerError(f"a token has more than {_LONGEST} characters")
    if types.count(BYTE) != 256 or types.count(UNKNOWN) != 1:
        raise OtherTokenizerError("there are not tokens of all bytes, and an unknown one")
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    ways = {
        token: [(token[:at], token[at:]) for at in range(1, len(token))
                if token[:at] in normal and token[at:] in normal]
        for token in normal
    }  # fmt: skip
    by_score = {token: float(score) for token, score in zip(tokens, scores, strict=True)}
    merged = sorted(
        (token for token, found in ways.items() if found), key=lambda one: -by_score[one]
    )
    if len({by_score[token] for token in merged}) != len(merged) or np.isnan(scores).any():
        raise OtherTokenizerError("scores do not say which tokens are merged first")
    begins = own.get("add_space_prefix", True) is True
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}
    first = [{"type": "Prepend", "prepend": _BLANK}] if begins else []
    back = {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "}
    without_first = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, blanks]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *without_first],
        },
        "model": {
            "unk_token": tokens[types.index(UNKNOWN)],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "merges": [list(pair) for token in merged for pair in ways[token]],
        },
    }
