"""The tokenizer of the demo model: byte-level BPE that splits a word the same way in every context.

The input is training texts; the output is a `tokenizers.Tokenizer`. Merges are learned from words
without the space before them. Then the most frequent beginnings of words get a variant with the
space, through merges of the lowest rank. " Brest" and the "Brest" after a quotation mark are
therefore split at the same positions, and a word that the model has never read can be copied from
a sentence into JSON token by token. Each digit is a separate token, so that numbers are copied
digit by digit. A word ends where a lower-case letter meets a capital one (`sendEmail`), so that the
tokens of a name are those of a sentence.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

_WORDS = r"\p{Lu}+(?!\p{Ll})|\p{Lu}?\p{Ll}+|[\p{L}\p{M}]+"
_OTHERS = r"\p{N}| ?[^\s\p{L}\p{N}\p{M}]+|\s+(?!\S)|\s+"
_SPACE = "Ġ"  # a space, as byte-level BPE writes it


def _pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def train_tokenizer(
    texts: list[str], specials: list[str], marks: list[str], size: int, spaced: int
) -> Tokenizer:
    """Train the tokenizer.

    Args:
        texts: training texts.
        specials: special tokens, which get the first ids.
        marks: tokens that are shown as text.
        size: the size of the vocabulary.
        spaced: how many of its tokens are a beginning of a word with the space before it.
    """
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = _pre_tokenizer(f"{_WORDS}|{_OTHERS}")
    trainer = trainers.BpeTrainer(
        vocab_size=size - spaced,
        special_tokens=[*specials, *marks],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    for mark in [*specials, *marks]:
        texts = [text.replace(mark, "\n") for text in texts]
    bare.train_from_iterator(texts, trainer)
    first = Counter(_beginnings(bare, texts))
    return _with_spaces(bare, [token for token, _ in first.most_common(spaced)], specials, marks)


def _beginnings(bare: Tokenizer, texts: Iterable[str]) -> Iterable[str]:
    """Return the first tokens of all words that have a space before them."""
    for encoding in bare.encode_batch(list(texts), add_special_tokens=False):
        tokens = encoding.tokens
        for space, token in pairwise(tokens):
            if space == _SPACE and token[0].isalpha() and token[0] != _SPACE:
                yield token


def _with_spaces(
    bare: Tokenizer, beginnings: list[str], specials: list[str], marks: list[str]
) -> Tokenizer:
    model = json.loads(bare.to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    vocabulary = dict(model["vocab"])
    for token in beginnings:
        vocabulary[_SPACE + token] = len(vocabulary)
        merges.append((_SPACE, token))
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    words = (
        _WORDS.replace(r"\p{Lu}+", r" ?\p{Lu}+")
        .replace(r"\p{Lu}?", r" ?\p{Lu}?")
        .replace("|[", "| ?[")
    )
    made.pre_tokenizer = _pre_tokenizer(f"{words}|{_OTHERS}")
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in specials]
    )
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in marks])
    return made
