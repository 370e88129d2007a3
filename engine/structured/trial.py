"""Takes a few steps in a new grammar, off the engine's thread. So a grammar that soon fails is
refused in time, a costly one is known to be costly, and the lexer's first states are ready for the
first request.
"""

from __future__ import annotations

import random
import time
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher

_NUM_WALKS = 3
_NUM_TOKENS = 64
_MAX_S = 0.5
"""About the most CPU seconds of one walk; limits the cost of a trial, not what is accepted."""
_NUM_FIRST = 16
"""One walk chooses among this many of the first tokens that fit: in most vocabularies the first
tokens are single bytes, such as brackets and quotes.
"""


class Trial(NamedTuple):
    """The result of a trial.

    Attributes:
        error: why llguidance could not go on; None: it could, or the output was complete.
        token_s: the cost of a token, in seconds of CPU time, once the lexer has its states.
    """

    error: str | None
    token_s: float


def try_out(root: LLMatcher, vocab_size: int) -> Trial:
    """Take a few steps with tokens that fit; the same ones in every run.

    Args:
        root: a matcher at the grammar's start; not advanced.
        vocab_size: V. The extra token after the vocabulary, which ends the output, is never chosen.
    """
    mask = np.zeros(vocab_size // 32 + 1, np.int32)
    costs: list[float] = []
    for walk in range(_NUM_WALKS):
        draw = random.Random(walk)
        matcher = root.deep_copy()
        num_tokens, spent_s = 0, 0.0
        while num_tokens < _NUM_TOKENS and spent_s < _MAX_S and not matcher.is_stopped():
            begin = time.thread_time()
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            spent_s += time.thread_time() - begin
            tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            tokens = tokens[tokens < vocab_size][: None if walk else _NUM_FIRST]
            if matcher.is_error() or len(tokens) == 0:
                break
            token = int(tokens[draw.randrange(len(tokens))])
            begin = time.thread_time()
            matcher.consume_token(token)
            spent_s += time.thread_time() - begin
            num_tokens += 1
        if matcher.is_error() and "NoExtension" not in matcher.get_error():
            return Trial(matcher.get_error(), 0.0)
        if num_tokens:
            costs.append(spent_s / num_tokens)
    return Trial(None, min(costs, default=0.0))
