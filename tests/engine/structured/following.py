"""Follow matchers by hand, as the engine does."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Collection

import numpy as np

from engine.contract.request import TokenMatcher
from engine.contract.sampling_params import GrammarKind, GrammarParams
from engine.contract.types import TokenId
from engine.structured import GrammarCompiler
from engine.text import Tokenizer


def allowed(matcher: TokenMatcher, vocab_size: int) -> set[int]:
    """The ids in a matcher's mask; the row is filled with ones before."""
    row = np.full(-(-vocab_size // 32), -1, np.int32)
    matcher.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any()
    return set(np.flatnonzero(bits).tolist())


def walk(
    matcher: TokenMatcher,
    tokenizer: Tokenizer,
    seed: int,
    *,
    endings: Collection[int] = (),
    max_tokens: int = 400,
    closes_after: int | None = None,
) -> str | None:
    """Draw tokens from the masks until the output is complete; None: it became too long.

    Every mask has a token, and every token of it is accepted. After `closes_after` tokens what
    closes a part of JSON is drawn wherever it fits.
    """
    single, closing = _by_bytes(tokenizer)
    draw = random.Random(seed)
    output: list[int] = []
    while not matcher.is_complete:
        if len(output) == max_tokens:
            return None
        ids = allowed(matcher, tokenizer.vocab_size)
        assert ids, "nothing may follow, and the output is not complete"
        # The short ones more often, or arrays and strings hardly ever end.
        short = ids & single | ids.intersection(endings)
        chosen = short if short and draw.random() < 0.5 else ids
        if closes_after is not None and len(output) >= closes_after:
            chosen = ids.intersection(endings) or ids & closing or chosen
        token = draw.choice(sorted(chosen))
        if token in endings:
            break
        assert matcher.accept(TokenId(token))
        output.append(token)
    return tokenizer.decode(output)


@functools.cache
def _by_bytes(tokenizer: Tokenizer) -> tuple[frozenset[int], frozenset[int]]:
    """The tokens of one byte, and those that close a string, an array or an object."""
    texts = {i: tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    single = frozenset(i for i, text in texts.items() if len(text) == 1)
    return single, frozenset(i for i in single if texts[i] in b'"]}')


def takes(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: object, text: str) -> bool:
    """Whether a text, byte by byte, is one of a schema's."""
    written = schema if isinstance(schema, str) else json.dumps(schema)
    end = TokenId(tokenizer.vocab_size - 1)
    assert not tokenizer.token_bytes(end), "an id without text is needed"
    params = GrammarParams(kind=GrammarKind.JSON_SCHEMA, text=written, flexible_whitespace=True)
    matcher = compiler.compile(params, frozenset([end]))()
    by_byte = _bytes_of(tokenizer)
    if not all(matcher.accept(by_byte[byte]) for byte in text.encode()):
        return False
    return matcher.is_complete or end in matcher.fitting()


@functools.cache
def _bytes_of(tokenizer: Tokenizer) -> dict[int, TokenId]:
    """The token of each byte that has one."""
    texts = [(tokenizer.token_bytes(i), TokenId(i)) for i in range(tokenizer.vocab_size)]
    return {text[0]: token for text, token in reversed(texts) if len(text) == 1}
