"""A tokenizer's ordinary files, from a GGUF file's metadata: BPE, byte-level or SentencePiece's.

A file with byte-level BPE names how text is cut into words before merges apply, in
`tokenizer.ggml.pre`. What a name means is known from the tokenizers that have it; others are
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.contract.errors import ModelRefusedError
from engine.loading.gguf.container import Container, Value
from engine.loading.gguf.sentencepiece_bpe import (
    NORMAL,
    OtherTokenizerError,
    sentencepiece_parts,
)

_BYTES: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(digits: str) -> list[dict[str, Any]]:
    pattern = {"Regex": _WORDS.format(digits=digits)}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return [split, {**_BYTES, "use_regex": False}]


_CUTS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [{**_BYTES, "use_regex": True}],
    "smollm": [{"type": "Digits", "individual_digits": True}, {**_BYTES, "use_regex": True}],
    "llama-bpe": _split("{1,3}"),
    "qwen2": _split(""),
}
"""How text is cut, by `tokenizer.ggml.pre`."""
_WHOLE_WORDS = "llama-bpe"
"""Takes a word that is a token as it is, without merges; and begins with its first token."""
_COMPOSED = "qwen2"
"""Brings text into the normal form C first."""
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_REMEDY = "put the tokenizer.json of the model that it was made from beside it"


def tokenizer_of(container: Container, num_embeddings: int) -> dict[str, dict[str, Any]]:
    """Return the contents of tokenizer.json and tokenizer_config.json, by these names.

    Args:
        container: the file.
        num_embeddings: how many rows the embedding has.

    Raises:
        ModelRefusedError: they cannot be told from the metadata.
    """
    name = container.files[0]
    own = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in container.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    tokens, kinds = own.get("tokens"), own.get("token_type")
    if not isinstance(tokens, list) or len(tokens) != num_embeddings:
        count = len(tokens) if isinstance(tokens, list) else "no"
        raise ModelRefusedError(
            f"{name}: it has {count} tokens for {num_embeddings} rows of the embedding: it is "
            "damaged; download it again"
        )
    types = kinds.tolist() if isinstance(kinds, np.ndarray) else [NORMAL] * len(tokens)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ModelRefusedError(f"{name}: tokens are there twice or lack their types: {_REMEDY}")
    is_sentencepiece = own.get("model") == "llama"
    try:
        read = sentencepiece_parts if is_sentencepiece else _byte_level_parts
        parts = read(own, tokens, types)
    except OtherTokenizerError as error:
        raise ModelRefusedError(
            f"{name}: its tokenizer is not read here ({error}): {_REMEDY}"
        ) from error
    vocabulary = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != _UNUSED
    }
    # The library panics where a merge makes no token.
    merges = parts["model"]["merges"]
    if any(one not in vocabulary for pair in merges for one in (*pair, "".join(pair))):
        raise ModelRefusedError(
            f"{name}: its tokenizer is damaged (a merge is of what is no token, or makes none): "
            f"{_REMEDY}"
        )
    special = _special(own, tokens)
    first = special.get("bos_token", "")
    is_usual = is_sentencepiece or own.get("pre") == _WHOLE_WORDS
    adds_first = own.get("add_bos_token", is_usual) is True and first in vocabulary
    if own.get("add_eos_token") is True:
        raise ModelRefusedError(f"{name}: its tokenizer ends prompts by a token: {_REMEDY}")
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                _added(index, token, kind == _CONTROL)
                for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
                if kind in (_CONTROL, _USER_DEFINED)
            ],
            **parts,
            "post_processor": _begins_with(first, vocabulary[first]) if adds_first else None,
            "model": {
                "type": "BPE",
                "dropout": None,
                "continuing_subword_prefix": "",
                "end_of_word_suffix": "",
                "vocab": vocabulary,
                **parts["model"],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **special,
            **_template(container.metadata),
        },
    }


def _byte_level_parts(
    own: Mapping[str, Value], tokens: Sequence[str], types: Sequence[int]
) -> dict[str, Any]:
    """Do the same as `sentencepiece_parts` for byte-level BPE."""
    model, cut, merges = own.get("model"), own.get("pre"), own.get("merges")
    if model != "gpt2" or not isinstance(cut, str) or cut not in _CUTS:
        raise OtherTokenizerError(f"{model!r}, {cut!r}" if model == "gpt2" else f"{model!r}")
    pairs = [str(one).split(" ", 2) for one in merges] if isinstance(merges, list) else []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise OtherTokenizerError("it has no merges that can be read")
    return {
        "normalizer": {"type": "NFC"} if cut == _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _CUTS[cut]},
        "decoder": {**_BYTES, "use_regex": True},
        "model": {
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": cut == _WHOLE_WORDS,
            "merges": pairs,
        },
    }


_ROLES = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
}
"""Keys of special tokens, by what a tokenizer's config calls them."""


def _special(own: Mapping[str, Value], tokens: Sequence[str]) -> dict[str, str]:
    found = {role: own.get(key) for role, key in _ROLES.items()}
    return {
        f"{role}_token": tokens[index]
        for role, index in found.items()
        if isinstance(index, int) and 0 <= index < len(tokens)
    }


def _added(index: int, token: str, is_special: bool) -> dict[str, Any]:
    form = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, **form, "special": is_special}


def _begins_with(token: str, index: int) -> dict[str, Any]:
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = [
        {"SpecialToken": {"id": token, "type_id": 1}},
        {"Sequence": {"id": "B", "type_id": 1}},
    ]
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, *second],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }


def _template(metadata: Mapping[str, Any]) -> dict[str, str]:
    template = metadata.get("tokenizer.chat_template")
    return {"chat_template": template} if isinstance(template, str) else {}
