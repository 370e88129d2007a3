"""Tries out a new grammar, off the engine's thread. So a grammar that would fail within an output
is refused in advance, the cost of the others is known, and the lexer's first states are ready for
the first request.

    samples   tokens drawn from the masks: what an output costs
    names     byte by byte from each declared name to the next one in the schema's order, through
              the shortest values: many names in one object
    stretch   tokens of the vocabulary, repeated as often as they fit: long strings, deep nesting,
              the far ends of repetitions

All trials together are limited in tokens and in time. They do not prove that no output fails.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.contract.sampling_params import GrammarKind, GrammarParams
from engine.structured.grammar_errors import too_complex
from engine.structured.root import Root
from engine.structured.vocabulary import Vocabulary

_NUM_SAMPLES = 3
_NUM_TOKENS = 64
_MAX_S = 0.5
"""The approximate CPU time limit of one sample, in seconds. It limits the cost of a trial, not
which grammars are accepted.
"""
_NUM_FIRST = 16
"""One sample draws only among this many of the first tokens that fit. In most vocabularies the
first tokens are single bytes, such as brackets and quotes.
"""
_MAX_NAME_TOKENS = 4000
_MAX_NAMES_S = 0.1
_MAX_NAME_S = 0.001
"""The limits for the names: the number of tokens, and the CPU seconds in total and per name."""
_MAX_STRETCH_TOKENS = 512
_MAX_STRETCH_S = 0.05
"""The limits for the stretch: the number of tokens, and the CPU seconds."""
_NUM_NEXT_NAMES = 8
"""How many of the next names are tried at each position; some may belong to another branch."""
_RUN = 16
"""How many equal tokens are taken after one mask. The lexer's fuel applies to what follows a mask,
and this many tokens, or a name, need far less of it than the mask itself does.
"""
_TO_CLOSE = b']}{",'
"""The bytes that are written first outside of strings if they fit, to end a value quickly."""
_OPENERS = b"[{"
_CLOSERS = frozenset(b'"]},')


class Trial(NamedTuple):
    """The result of a trial.

    Attributes:
        error: why the grammar cannot be followed, for the caller that sent it. None if the trial
            found no problem.
        token_s: the cost of a token, in seconds of CPU time, once the lexer has its states.
    """

    error: str | None
    token_s: float


def try_out(root: Root, params: GrammarParams, vocabulary: Vocabulary, vocab_size: int) -> Trial:
    """Try out a grammar. Every run takes the same steps, except for the time limits.

    Args:
        root: the grammar's start; not advanced.
        params: what it was compiled from.
        vocabulary: the model's tokens.
        vocab_size: V. The extra token after the vocabulary, which ends the output, is never chosen.
    """
    costs: list[float] = []
    for number in range(_NUM_SAMPLES):
        walk = _Walk(root, vocab_size)
        _sample(walk, random.Random(number), None if number else _NUM_FIRST)
        if walk.is_lost:
            return Trial(walk.explain(params.kind), 0.0)
        if walk.tokens:
            costs.append(walk.spent_s / len(walk.tokens))
    names = list(_names(params.text)) if params.kind is GrammarKind.JSON_SCHEMA else []
    for number in range(2):
        walk = _Walk(root, vocab_size)
        if number == 0:
            _go_through(walk, vocabulary.bytes_alone, names)
        else:
            _stretch(walk, vocabulary)
        if walk.is_lost:
            return Trial(walk.explain(params.kind), 0.0)
    return Trial(None, min(costs, default=0.0))


class _Walk:
    """One path through a grammar.

    Attributes:
        tokens: the tokens taken.
        spent_s: the cost of these tokens and of their masks, in seconds of CPU time.
        matcher: the matcher after these tokens.
    """

    def __init__(self, root: Root, vocab_size: int) -> None:
        self.tokens: list[int] = []
        self.spent_s = 0.0
        self.matcher = root.matcher.deep_copy()
        self._root = root
        self._begin_s = time.thread_time()
        self._vocab_size = vocab_size
        self._mask = np.zeros(vocab_size // 32 + 1, np.int32)

    @property
    def is_lost(self) -> bool:
        """Whether the grammar could not be followed further, other than at the end of an output."""
        return self.matcher.is_error() and "NoExtension" not in self.matcher.get_error()

    def explain(self, kind: GrammarKind) -> str:
        """Explain why the grammar could not be followed further."""
        return too_complex(kind, self._root.text_of(self.tokens), len(self.tokens))

    def compute(self) -> bool:
        """Compute the mask. Return False if nothing can follow."""
        if self.matcher.is_stopped():
            return False
        begin = time.thread_time()
        self.matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self.spent_s += time.thread_time() - begin
        return not self.matcher.is_error()

    def fitting(self) -> npt.NDArray[np.intp]:
        """Return the tokens that fit, in ascending order; none at the end."""
        if not self.compute():
            return np.zeros(0, np.intp)
        tokens = np.flatnonzero(np.unpackbits(self._mask.view(np.uint8), bitorder="little"))
        return tokens[tokens < self._vocab_size]

    def allows(self, token: int) -> bool:
        """Whether a token is in the last mask."""
        return bool(self._mask[token // 32] >> token % 32 & 1)

    def take(self, tokens: list[int]) -> bool:
        """Take tokens as long as they fit. Return False if none was taken."""
        begin = time.thread_time()
        if len(tokens) == 1:
            num_taken = int(self.matcher.consume_token(tokens[0]))
        else:
            num_taken = self.matcher.try_consume_tokens(tokens)
        self.spent_s += time.thread_time() - begin
        self.tokens += tokens[:num_taken]
        return num_taken > 0

    def may_go_on(self, max_tokens: int, max_s: float) -> bool:
        """Whether the limits are not reached yet."""
        return len(self.tokens) < max_tokens and time.thread_time() - self._begin_s < max_s


def _sample(walk: _Walk, draw: random.Random, num_first: int | None) -> None:
    """Draw tokens from the masks. `num_first`: draw only from this many of the first ones that fit,
    or from all if None.
    """
    while walk.may_go_on(_NUM_TOKENS, _MAX_S):
        tokens = walk.fitting()[:num_first]
        if not len(tokens) or not walk.take([int(draw.choice(tokens))]):
            return


def _go_through(walk: _Walk, token_of: Mapping[int, int], names: Sequence[str]) -> None:
    """Write the declared names one after the other, with the shortest values. `token_of`: for each
    byte, the token that writes only that byte.
    """
    spelled = [json.dumps(name, ensure_ascii=False).encode() + b":" for name in names]
    draw = random.Random(0)
    is_string = False
    place = 0
    max_s = _MAX_NAMES_S + _MAX_NAME_S * len(names)
    while walk.may_go_on(_MAX_NAME_TOKENS, max_s):
        if not is_string and (skip := _next_name(walk, token_of, spelled[place:])):
            place += skip
            continue
        fitting = walk.fitting()
        wanted = [token_of.get(byte) for byte in (b'"' if is_string else _TO_CLOSE)]
        tokens = set(fitting.tolist())
        token = next((t for t in wanted if t in tokens), None)
        if token is None:
            alone = [t for t in token_of.values() if t in tokens]
            if not tokens:
                return
            token = draw.choice(alone or sorted(tokens))
        if not walk.take([token]):
            return
        is_string ^= token == token_of.get(ord('"'))


def _next_name(walk: _Walk, token_of: Mapping[int, int], spelled: Sequence[bytes]) -> int:
    """Write one of the next names, if one may follow. Return how many names to advance, or 0 if
    none may follow.
    """
    for index, name in enumerate(spelled[:_NUM_NEXT_NAMES]):
        for text in (name, b", " + name):
            tokens = [token_of[byte] for byte in text if byte in token_of]
            if len(tokens) == len(text) and walk.matcher.validate_tokens(tokens) == len(tokens):
                if walk.compute():
                    walk.take(tokens)
                return index + 1
    return 0


def _stretch(walk: _Walk, vocabulary: Vocabulary) -> None:
    """Take tokens that end nothing, if there are any, each as often as it fits."""
    draw = random.Random(0)
    openers = [vocabulary.bytes_alone.get(byte) for byte in _OPENERS]
    spellings = vocabulary.spellings.by_id
    while walk.may_go_on(_MAX_STRETCH_TOKENS, _MAX_STRETCH_S):
        fitting = walk.fitting()
        if not len(fitting):
            return
        some = [int(t) for t in fitting[:: len(fitting) // 16 + 1]]
        opening = [t for t in openers if t is not None and walk.allows(t)]
        lasting = [t for t in some if not _CLOSERS.intersection(spellings[t])]
        chosen = opening if opening and draw.random() < 0.5 else lasting or some
        if not walk.take([draw.choice(chosen)] * _RUN):
            return


def _names(text: str) -> Iterator[str]:
    """Yield the names of the properties that a schema declares, in order. An object's names come
    before those within its values.
    """
    stack: list[object] = [json.loads(text, parse_int=str)]  # numbers may be of any length
    while stack:
        value = stack.pop()
        if isinstance(value, _Name):
            yield value.name
        elif isinstance(value, list):
            stack += reversed(value)
        elif isinstance(value, dict):
            parts: list[object] = []
            for key, part in value.items():
                if key == "properties" and isinstance(part, dict):
                    for name, schema in part.items():
                        parts += (_Name(name), schema)
                else:
                    parts.append(part)
            stack += reversed(parts)


class _Name(NamedTuple):
    """A declared name, among the values of a schema."""

    name: str
