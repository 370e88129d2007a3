"""Masks and steps, followed by hand over the demo model's tokenizer."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.request import TokenMatcher
from engine.contract.sampling_params import GrammarKind
from engine.contract.types import TokenId
from engine.structured import GrammarCompiler
from engine.text import Tokenizer
from tests.engine.structured.conftest import V, form
from tests.engine.structured.following import allowed, walk

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3},
        "ratio": {"type": "number", "minimum": 0.5, "maximum": 1.5},
        "note": {"type": ["string", "null"], "maxLength": 5},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def fits_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        isinstance(value, dict)
        and {"name", "age", "tags"} <= value.keys() <= SCHEMA["properties"].keys()  # type: ignore[attr-defined]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and len(value["tags"]) <= 3
        and all(tag in ("a", "bb", "ccc") for tag in value["tags"])
        and 0.5 <= value.get("ratio", 1) <= 1.5
        and (value.get("note") is None or len(value["note"]) <= 5)
    )


CHOICES = ("yes", "no", "no way", 'a "quote"\n', "naïve 🙂", "/x/", "\\")
LARK = 'start: term ("+" term)*\nterm: NUM | "(" term ")"\nNUM: /[0-9]{1,3}/\n'


def take(matcher: TokenMatcher, tokenizer: Tokenizer, text: str) -> None:
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert matcher.accept(TokenId(token))


def one(tokenizer: Tokenizer, text: str) -> TokenId:
    (token,) = tokenizer.encode(text, add_special_tokens=False)
    return TokenId(token)


@pytest.mark.parametrize("ends", [True, False])
def test_every_kind_gives_outputs_of_its_form(
    compiler: GrammarCompiler, tokenizer: Tokenizer, eos: TokenId, ends: bool
) -> None:
    endings = frozenset([eos]) if ends else frozenset()
    cases = [
        (form(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)), fits_schema),
        (form(GrammarKind.JSON_OBJECT), lambda text: isinstance(json.loads(text), dict)),
        (
            form(GrammarKind.REGEX, r"[A-Z][a-zé]{2,5} ([0-9]{2}|x/y)\n"),
            lambda text: re.fullmatch(r"[A-Z][a-zé]{2,5} ([0-9]{2}|x/y)\n", text),
        ),
        (
            form(GrammarKind.LARK, LARK),
            lambda text: re.fullmatch(r"(\d{1,3}|\(+\d{1,3}\)+)(\+(\d{1,3}|\(+\d{1,3}\)+))*", text),
        ),
        (form(GrammarKind.CHOICE, CHOICES), lambda text: text in CHOICES),
    ]
    for params, fits in cases:
        make_matcher = compiler.compile(params, endings)
        whole = 0
        for seed in range(8):
            text = walk(make_matcher(), tokenizer, seed, endings=endings, max_tokens=200)
            if text is not None:
                whole += 1
                assert fits(text), (params.kind, text)
        # Without ending ids, what may go on forever does: sums, and objects of any depth.
        assert whole > 0 or not ends


def test_an_ending_id_is_allowed_where_the_output_may_end_and_nowhere_else(
    compiler: GrammarCompiler, tokenizer: Tokenizer, eos: TokenId
) -> None:
    stop = one(tokenizer, "b")
    params = form(GrammarKind.REGEX, "ab*c?")
    matcher = compiler.compile(params, frozenset([eos, stop]))()
    plain = compiler.compile(params, frozenset())()
    assert not {eos, stop} & allowed(matcher, V)
    for each in (matcher, plain):
        take(each, tokenizer, "a")
        assert not each.is_complete
    assert {eos, stop} <= allowed(matcher, V)
    assert eos not in allowed(plain, V)
    assert stop in allowed(plain, V)  # as text, where it ends nothing
    # What only an end can follow is complete, for both.
    for each in (matcher, plain):
        take(each, tokenizer, "c")
        assert each.is_complete
    assert allowed(matcher, V) == {eos, stop}
    assert allowed(plain, V) == set()


def test_an_ending_id_that_is_text_of_the_form_does_not_cut_it(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    b = one(tokenizer, "b")
    matcher = compiler.compile(form(GrammarKind.REGEX, "a(b|x)c"), frozenset([b]))()
    take(matcher, tokenizer, "a")
    assert b not in allowed(matcher, V)
    assert one(tokenizer, "x") in allowed(matcher, V)


def test_a_refused_token_changes_nothing(
    compiler: GrammarCompiler, tokenizer: Tokenizer, eos: TokenId
) -> None:
    matcher = compiler.compile(form(GrammarKind.REGEX, "abc"), frozenset([eos]))()
    take(matcher, tokenizer, "a")
    before = allowed(matcher, V)
    for token in (one(tokenizer, "c"), eos, TokenId(V), TokenId(V - 1), TokenId(-2)):
        assert not matcher.accept(token)
        assert allowed(matcher, V) == before
    take(matcher, tokenizer, "bc")
    assert matcher.is_complete
    assert not matcher.accept(one(tokenizer, "c"))


def test_any_tokenization_fits(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(form(GrammarKind.REGEX, "the cat"), frozenset())()
    pieces = {tokenizer.token_bytes(token) for token in allowed(matcher, V)}
    assert {b"t", b"th"} <= pieces
    assert all(b"the cat".startswith(piece) and piece for piece in pieces)


def test_special_tokens_are_no_text(
    compiler: GrammarCompiler, tokenizer: Tokenizer, eos: TokenId
) -> None:
    special = tokenizer.special_token_ids
    anything = compiler.compile(form(GrammarKind.REGEX, r"(?s).+"), frozenset([eos]))()
    assert not special & allowed(anything, V)
    take(anything, tokenizer, "a")
    assert special & allowed(anything, V) == {eos}
    named = compiler.compile(form(GrammarKind.CHOICE, ("<|bos|>",)), frozenset())()
    assert {tokenizer.token_bytes(token) for token in allowed(named, V)} == {b"<", b"<|"} or {
        tokenizer.token_bytes(token) for token in allowed(named, V)
    } == {b"<"}


def test_a_lark_grammar_may_name_special_tokens(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    token = tokenizer.token_id("<|user|>")
    assert token is not None
    matcher = compiler.compile(form(GrammarKind.LARK, 'start: "a" <|user|> "b"'), frozenset())()
    take(matcher, tokenizer, "a")
    assert allowed(matcher, V) == {token}
    assert matcher.accept(TokenId(token))
    take(matcher, tokenizer, "b")
    assert matcher.is_complete


def test_characters_cut_over_tokens(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = json.dumps({"type": "string", "minLength": 2, "maxLength": 2})
    matcher = compiler.compile(form(GrammarKind.JSON_SCHEMA, schema), frozenset())()
    by_byte = {tokenizer.token_bytes(token): TokenId(token) for token in range(V - 1, -1, -1)}
    quote = by_byte[b'"']
    assert matcher.accept(quote)
    for byte in "🙂é".encode():
        ids = allowed(matcher, V)
        assert quote not in ids  # neither within a character, nor with one too few
        assert by_byte[bytes([byte])] in ids
        assert matcher.accept(by_byte[bytes([byte])])
    assert allowed(matcher, V) == {quote}
    # An invalid continuation is no character.
    other = compiler.compile(form(GrammarKind.JSON_SCHEMA, schema), frozenset())()
    assert other.accept(quote)
    assert other.accept(by_byte[b"\xc3"])
    assert not other.accept(by_byte[b"a"])


def test_blanks_in_json_are_bounded(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(form(GrammarKind.JSON_OBJECT, flexible=True), frozenset())()
    take(matcher, tokenizer, "{")
    blank = one(tokenizer, "\n")
    assert all(matcher.accept(blank) for _ in range(32))
    assert not matcher.accept(blank)
    take(matcher, tokenizer, "}")
    assert matcher.is_complete


def test_json_is_one_line_of_one_form(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """As `json.dumps` writes it, unless the caller leaves the white space to the model."""
    texts = ['{"a": [1, {"b": null}], "c": {}}', '{"a":1}', '{ "a": 1}', '{"a": 1,"b": 2}', "{\n}"]
    taken = []
    for text in texts:
        matcher = compiler.compile(form(GrammarKind.JSON_OBJECT), frozenset())()
        taken.append(all(matcher.accept(one(tokenizer, letter)) for letter in text))
    assert taken == [True, False, False, False, False]


def test_matchers_of_one_grammar_are_independent(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    make_matcher = compiler.compile(form(GrammarKind.CHOICE, ("left", "right")), frozenset())
    first, second = make_matcher(), make_matcher()
    take(first, tokenizer, "left")
    assert first.is_complete
    assert not second.is_complete
    take(second, tokenizer, "right")
    assert second.is_complete


def test_a_row_is_overwritten_whole(compiler: GrammarCompiler) -> None:
    make_matcher = compiler.compile(form(GrammarKind.CHOICE, ("left",)), frozenset())
    rows = np.zeros((3, -(-V // 32)), np.int32)
    rows[1] = -1
    make_matcher().fill_mask(rows[1])
    make_matcher().fill_mask(rows[2])
    assert (rows[1] == rows[2]).all()
    assert not rows[0].any()


_LEAVES = st.sampled_from(
    [
        {"type": "integer", "minimum": -3, "maximum": 40},
        {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"enum": ["x", 1, None, {"k": [True]}]},
        {"type": "boolean"},
        {"const": "é"},
    ]
)
_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: (
        st.builds(
            lambda item, low: {"type": "array", "items": item, "minItems": low, "maxItems": 3},
            inner,
            st.integers(0, 2),
        )
        | st.builds(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:1],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b c", 'q"', "ü"]), inner, max_size=3),
        )
        | st.builds(lambda branches: {"anyOf": branches}, st.lists(inner, min_size=1, max_size=2))
    ),
    max_leaves=5,
)


def fits(value: object, schema: dict[str, object]) -> bool:
    """Whether a value satisfies one of the small schemas above."""
    match schema:
        case {"anyOf": list(branches)}:
            return any(fits(value, branch) for branch in branches)
        case {"enum": list(values)}:
            return value in values and value is not True
        case {"const": constant}:
            return value == constant
        case {"type": "boolean"}:
            return isinstance(value, bool)
        case {"type": "integer", "minimum": int(low), "maximum": int(high)}:
            return type(value) is int and low <= value <= high
        case {"type": "string", "pattern": str(pattern)}:
            return isinstance(value, str) and re.fullmatch(pattern, value) is not None
        case {"type": "string", "maxLength": int(high)}:
            return isinstance(value, str) and len(value) <= high
        case {"type": "array", "items": dict(item), "minItems": int(low), "maxItems": int(high)}:
            return (
                isinstance(value, list)
                and low <= len(value) <= high
                and all(fits(part, item) for part in value)
            )
        case {"type": "object", "properties": dict(properties), "required": list(required)}:
            return (
                isinstance(value, dict)
                and value.keys() <= properties.keys()
                and all(name in value for name in required)
                and all(fits(part, properties[name]) for name, part in value.items())
            )
    raise AssertionError(schema)


@settings(max_examples=40, deadline=None)
@given(schema=_SCHEMAS, seed=st.integers(0, 1000))
def test_random_schemas(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    eos: TokenId,
    schema: dict[str, object],
    seed: int,
) -> None:
    endings = frozenset([eos])
    matcher = compiler.compile(form(GrammarKind.JSON_SCHEMA, json.dumps(schema)), endings)()
    text = walk(matcher, tokenizer, seed, endings=endings, max_tokens=300)
    if text is not None:
        assert fits(json.loads(text), schema), text


_REGEXES = st.recursive(
    st.sampled_from(["a", "b", "é", "[a-d]", "[0-9]", r"\n", "/", '"', r"\.", "🙂", "[^x]"]),
    lambda inner: (
        st.builds("({}|{})".format, inner, inner)
        | st.builds("{}{}".format, inner, inner)
        | st.builds("({}){{1,3}}".format, inner)
        | st.builds("x({})?".format, inner)
        | st.builds("({})*y".format, inner)
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(pattern=_REGEXES, seed=st.integers(0, 1000))
def test_random_regexes(
    compiler: GrammarCompiler, tokenizer: Tokenizer, eos: TokenId, pattern: str, seed: int
) -> None:
    endings = frozenset([eos])
    matcher = compiler.compile(form(GrammarKind.REGEX, pattern), endings)()
    text = walk(matcher, tokenizer, seed, endings=endings, max_tokens=100)
    if text is not None:
        assert re.fullmatch(pattern, text), (pattern, text)
