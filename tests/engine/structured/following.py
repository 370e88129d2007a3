"""Follow matchers by hand, as the engine does."""

from __future__ import annotations

import random
from collections.abc import Collection

import numpy as np

from engine.request import TokenMatcher
from engine.text import Tokenizer
from engine.types import TokenId


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
) -> str | None:
    """Draw tokens from the masks until the output is complete; None: it became too long.

    Every mask has a token, and every token of it is accepted.
    """
    draw = random.Random(seed)
    output: list[int] = []
    while not matcher.is_complete:
        if len(output) == max_tokens:
            return None
        ids = sorted(allowed(matcher, tokenizer.vocab_size))
        assert ids, "nothing may follow, and the output is not complete"
        # The short ones more often, or arrays and strings hardly ever end.
        short = [i for i in ids if i in endings or len(tokenizer.token_bytes(i)) == 1]
        token = draw.choice(short if short and draw.random() < 0.5 else ids)
        if token in endings:
            break
        assert matcher.accept(TokenId(token))
        output.append(token)
    return tokenizer.decode(output)
