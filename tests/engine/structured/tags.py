"""Structural tags, and whether a text is one of theirs."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

from engine.contract.sampling_params import GrammarKind, GrammarParams
from engine.contract.types import TokenId
from engine.structured import GrammarCompiler
from engine.structured.matcher import GrammarMatcher
from engine.text import Tokenizer
from tests.engine.structured.conftest import V
from tests.engine.structured.following import allowed

Form = dict[str, Any]
OBJECT: Form = {
    "type": "json_schema",
    "json_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


def tag(begin: str, end: object, content: Form = OBJECT) -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def params(form: Form | str, *, flexible: bool = False) -> GrammarParams:
    text = form if isinstance(form, str) else json.dumps(wrapped(form))
    return GrammarParams(kind=GrammarKind.STRUCTURAL_TAG, text=text, flexible_whitespace=flexible)


def wrapped(form: Form) -> Form:
    return form if "structures" in form else {"type": "structural_tag", "format": form}


class Taker:
    """Tells whether texts are of a format, written byte by byte and in the tokenizer's tokens."""

    def __init__(self, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
        self.compiler = compiler
        self.tokenizer = tokenizer
        special = {tokenizer.token_text(i): i for i in tokenizer.special_token_ids}
        self._special = special
        self._by_byte = {
            tokenizer.token_bytes(i): i
            for i in range(tokenizer.vocab_size - 1, -1, -1)
            if i not in tokenizer.special_token_ids
        }

    def __call__(self, form: Form, text: str, *, flexible: bool = False) -> bool:
        """Whether a text is one of the format's; both ways to write it must agree."""
        end = TokenId(V - 1)  # an id without text
        make = self.compiler.compile(params(form, flexible=flexible), frozenset([end]))
        found = set()
        for ids in (self.bytewise(text), self.tokenizer.encode(text, add_special_tokens=False)):
            matcher = make()
            taken = all(matcher.accept(TokenId(token)) for token in ids)
            found.add(taken and (matcher.is_complete or end in allowed(matcher, V)))
        assert len(found) == 1, (form, text)
        return found.pop()

    def bytewise(self, text: str) -> list[int]:
        ids: list[int] = []
        names = "|".join(map(re.escape, self._special))
        for index, part in enumerate(re.split(f"({names})", text)):
            if index % 2:
                ids.append(self._special[part])
            else:
                ids += [self._by_byte[bytes([byte])] for byte in part.encode()]
        return ids


def wander(
    matcher: GrammarMatcher,
    tokenizer: Tokenizer,
    seed: int,
    hints: Sequence[list[int]],
    most: int = 80,
) -> str | None:
    """Draw tokens until the output may end; None: it has more than `most`. Now and then a hint is
    written, as far as it may be, because random tokens hardly ever make up a word.
    """
    draw = random.Random(seed)
    end, output, hint = V - 1, bytearray(), list[int]()
    for _ in range(most):
        ids = allowed(matcher, V)
        assert ids, f"nothing may follow {bytes(output)!r}"
        if end in ids and draw.random() < 0.3:
            return output.decode()
        if not hint and draw.random() < 0.5:
            hint = list(draw.choice(hints))
        ids -= {end}
        token = hint.pop(0) if hint and hint[0] in ids else draw.choice(sorted(ids))
        assert matcher.accept(TokenId(token))
        output += tokenizer.token_bytes(token)
        if matcher.is_complete:
            return output.decode()
    return None
