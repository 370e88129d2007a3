"""Objects of many names, and other forms whose limits lie far behind their beginning: followed to
the end, or refused at the door.
"""

from __future__ import annotations

import json
import random

import pytest

from engine.contract.errors import InvalidRequestError
from engine.contract.sampling_params import GrammarKind, GrammarParams
from engine.contract.types import TokenId
from engine.structured import GrammarCompiler
from engine.text import Tokenizer
from tests.engine.structured.conftest import V, form
from tests.engine.structured.following import allowed, walk

EXHAUSTING = r"((.{1,200} ){1,200}[A-Z]){1,50}"
WORDS = "range rate ratio region remark repeat report result retry return route row rule run"
VALUES: dict[str, object] = {"string": "some text some text ", "integer": 123456, "boolean": True}


def many_optional(num_names: int, seed: int = 1) -> tuple[GrammarParams, str]:
    """An object of names that are all optional, open to others; and one with about half of them."""
    draw = random.Random(seed)
    words = WORDS.split()
    kinds = {
        f"{draw.choice(words)}_{draw.choice(words)}{i}": draw.choice(list(VALUES))
        for i in range(num_names)
    }
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in kinds.items()}}
    document = {key: VALUES[kind] for key, kind in kinds.items() if draw.random() < 0.5}
    return form(GrammarKind.JSON_SCHEMA, json.dumps(schema)), json.dumps(document)


@pytest.mark.parametrize("num_names", [50, 200, 256])
@pytest.mark.parametrize("masks", [False, True])
def test_many_optional_names_are_followed_to_their_end(
    compiler: GrammarCompiler, tokenizer: Tokenizer, num_names: int, masks: bool
) -> None:
    """Also where nobody asks for a mask: the lexer's fuel is for each token."""
    params, document = many_optional(num_names)
    make_matcher = compiler.compile(params, frozenset())
    matcher, beside = make_matcher(), make_matcher()
    tokens = tokenizer.encode(document, add_special_tokens=False)
    assert beside.accept(TokenId(tokens[0]))
    for token in tokens:
        if masks:
            assert token in allowed(matcher, V)
        assert matcher.accept(TokenId(token)), matcher.failure
    assert matcher.is_complete
    assert beside.accept(TokenId(tokens[1])), beside.failure
    later = make_matcher()
    for token in tokens[:100]:
        assert later.accept(TokenId(token)), later.failure


@pytest.mark.parametrize("num_names", [500, 1000])
def test_more_are_refused_at_the_door(compiler: GrammarCompiler, num_names: int) -> None:
    with pytest.raises(
        InvalidRequestError, match=rf"has {num_names} optional properties"
    ) as refused:
        compiler.compile(many_optional(num_names)[0], frozenset())
    assert "`required`" in str(refused.value)


@pytest.mark.parametrize("seed", range(3))
def test_random_walks_through_many_names(
    compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int
) -> None:
    params, _ = many_optional(120, seed)
    text = walk(compiler.compile(params, frozenset())(), tokenizer, seed, max_tokens=1500)
    assert text is None or isinstance(json.loads(text), dict)


def late_name(num_names: int) -> str:
    properties: dict[str, object] = {f"name_{i}": {"type": "integer"} for i in range(num_names)}
    pattern = r"^((.{1,100}[^0-9]){1,100}[A-Z]+){1,50}x$"
    properties["last"] = {"type": "string", "pattern": pattern}
    return json.dumps({"properties": {"in": {"type": "object", "properties": properties}}})


@pytest.mark.parametrize(
    ("kind", "text", "place"),
    [
        (GrammarKind.JSON_SCHEMA, late_name(20), r"in the string \$\.in\.last; .*simpler pattern"),
        (GrammarKind.REGEX, rf"[0-9]{{300}}{EXHAUSTING}", r'behind "'),
        (GrammarKind.LARK, f"start: A B\nA: /[a-z]{{200}}/\nB: /{EXHAUSTING}/", r'behind "'),
    ],
    ids=["a late name", "behind digits", "behind letters"],
)
def test_what_fails_far_behind_its_beginning_is_refused_with_its_place(
    compiler: GrammarCompiler, kind: GrammarKind, text: str, place: str
) -> None:
    with pytest.raises(InvalidRequestError, match=rf"too complex .* tokens, {place}"):
        compiler.compile(form(kind, text), frozenset())
