"""What a schema says is what is generated, to the last digit; what could not be followed exactly is
refused, with its place.
"""

from __future__ import annotations

import datetime
import json
import random
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.errors import InvalidRequestError
from engine.contract.sampling_params import MAX_GRAMMAR_BYTES, GrammarKind
from engine.contract.types import TokenId
from engine.structured import GrammarCompiler
from engine.text import Tokenizer
from tests.engine.structured.conftest import form
from tests.engine.structured.following import takes, walk

SCHEMA = GrammarKind.JSON_SCHEMA
Schema = dict[str, object]
NONE: frozenset[TokenId] = frozenset()


HELD = [
    "9007199254740992", "-9007199254740992", "0", "-0", "1e3", "9.007199254740992e15", "0.1",
    "0.30000000000000004", "1e-7", "123456.789", "0e30", "1.50",
]  # fmt: skip
CHANGED = [
    "1234567890123456789", "9007199254740993", "-9007199254740993", "18446744073709551615",
    "123456789012345678901234567890", "1e400", "1e22", "1e-400", "9" * 5000, "1e999999999999999999",
    "0.1000000000000000055511151231257827", "9007199254740992.5", "0.12345678901234567890",
]  # fmt: skip
BOUNDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]


@pytest.mark.parametrize("literal", HELD)
def test_numbers_that_are_held_are_written_as_they_are(
    compiler: GrammarCompiler, tokenizer: Tokenizer, literal: str
) -> None:
    make_matcher = compiler.compile(form(SCHEMA, f'{{"const": {literal}}}'), NONE)
    for seed in range(3):
        text = walk(make_matcher(), tokenizer, seed)
        assert text is not None
        assert Decimal(text.strip()) == Decimal(literal)


@pytest.mark.parametrize("literal", CHANGED)
@pytest.mark.parametrize("keyword", ["const", "multipleOf"])
def test_numbers_that_would_be_changed_are_refused_with_their_place(
    compiler: GrammarCompiler, keyword: str, literal: str
) -> None:
    schema = f'{{"properties": {{"n": {{"type": "number", "{keyword}": {literal}}}}}}}'
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(form(SCHEMA, schema), NONE)
    assert caught.value.field == "grammar.json_schema"
    assert f"$.properties.n.{keyword}" in caught.value.description
    assert literal[:30] in caught.value.description
    assert "a string" in caught.value.description
    assert len(str(caught.value)) < 450


@pytest.mark.parametrize("literal", CHANGED)
@pytest.mark.parametrize("keyword", BOUNDS)
def test_bounds_that_are_not_held_are_narrowed_and_that_is_told(
    compiler: GrammarCompiler, keyword: str, literal: str
) -> None:
    schema = f'{{"properties": {{"n": {{"type": "number", "{keyword}": {literal}}}}}}}'
    is_lower, exact = keyword in BOUNDS[::2], Decimal(literal)
    has_none = exact > 2**53 - 1 if is_lower else exact < -(2**53)
    if has_none or exact.copy_abs() < Decimal("1e-300"):
        with pytest.raises(InvalidRequestError) as caught:
            compiler.compile(form(SCHEMA, schema), NONE)
        assert f"$.properties.n.{keyword}" in caught.value.description
        assert len(str(caught.value)) < 450
        return
    [note] = compiler.compile(form(SCHEMA, schema), NONE).notes
    assert note.startswith(f"the {keyword} {literal[:30]}")
    assert len(note) < 200
    bound = Decimal(note.partition(" in $.properties.n is held as ")[2])
    assert bound >= exact if is_lower else bound <= exact
    assert abs(bound) == 2**53 or abs(bound - exact) < abs(exact) * Decimal("1e-15")


@pytest.mark.parametrize(
    ("schema", "least", "most"),
    [
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, -(2**53), 2**53),
        ({"minimum": 0, "maximum": 2**64 - 1}, 0, 2**53),
        ({"exclusiveMinimum": -(2**63) - 1, "exclusiveMaximum": 2**63}, 1 - 2**53, 2**53 - 1),
        ({"minimum": -3.4e38, "maximum": 1e308}, -(2**53), 2**53),
    ],
)
def test_bounds_of_64_bits_are_narrowed_to_what_is_held(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Schema, least: int, most: int
) -> None:
    integers = {"type": "integer", **schema}
    for number in (least, most, 0):
        assert takes(compiler, tokenizer, integers, str(number))
    for number in (least - 1, most + 1, 2**63, -(2**64)):
        assert not takes(compiler, tokenizer, integers, str(number))


def test_a_number_that_is_never_written_may_have_any_size(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    schema = (
        '{"type": "integer", "default": 9223372036854775807, "examples": [1e400], "maximum": 3}'
    )
    assert takes(compiler, tokenizer, schema, "3")
    for keyword in ("maxLength", "maxItems", "maxProperties"):
        for most in ("9223372036854775807", "4294967295", "1e30"):
            assert compiler.compile(form(SCHEMA, f'{{"{keyword}": {most}}}'), NONE).notes == ()
    assert takes(compiler, tokenizer, '{"type": "string", "minLength": 2.0}', '"ab"')
    with pytest.raises(InvalidRequestError, match=r"\$\.minLength"):
        compiler.compile(form(SCHEMA, '{"minLength": 9223372036854775807}'), NONE)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ('{"enum": [1, {"a": [2, 9007199254740993]}]}', "$.enum[1].a[1]"),
        ('{"$defs": {"enum": {"const": 9007199254740993}}}', "$.$defs.enum.const"),
        ('{"allOf": [{"items": {"minimum": 1e17}}]}', "$.allOf[0].items.minimum"),
        ('{"items": {"multipleOf": 1e-400}}', "$.items.multipleOf"),
    ],
)
def test_wherever_a_number_is_it_is_found(
    compiler: GrammarCompiler, schema: str, place: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(form(SCHEMA, schema), NONE)
    assert place in caught.value.description


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "take in 0 itself"),
        ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, "take in 1 itself"),
        ({"type": "number", "exclusiveMaximum": 0, "minimum": -0.5}, "take in 0 itself"),
        ({"minimum": 2, "exclusiveMinimum": True, "maximum": 2.5}, "take in 2 itself"),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, "take in 0 itself"),
        ({"$defs": {"a": {"maximum": 0.5}}, "$ref": "#/$defs/a", "exclusiveMinimum": 0}, "itself"),
        ({"type": "object", "minProperties": 2}, "names may be repeated"),
        ({"required": ["a"], "minProperties": 3}, "lower it to 2"),
        ({"const": {"a": ["x\x01"]}}, "U+0001 in $.const.a[0]"),
        ({"enum": ["x\x7f"]}, "U+007F in $.enum[0]"),
        ({"multipleOf": 1e-12}, "9 decimal places"),
        ({"allOf": [{"multipleOf": 0.000000001}, {"multipleOf": 7}]}, "multipleOf"),
        ({"properties": {f"p{i}": {"type": "string"} for i in range(2000)}}, "2000 optional"),
        (
            {"items": {"properties": {f"p{i}": {} for i in range(257)}, "required": []}},
            "257 optional properties in $.items;",
        ),
        ({"a" * 300: {"minimum": 10**20}}, "…"),
        ({"name": "x", "strict": True, "schema": {"type": "object"}}, 'stands under "schema"'),
        ({"schema": {}, "type": "object"}, 'stands under "schema"'),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
            'stands under "json_schema.schema"',
        ),
        ({"type": "json_schema", "name": "x", "schema": {}}, 'stands under "schema"'),
        ({"type": "json_schema", "json_schema": {"type": "object"}}, 'stands under "json_schema"'),
    ],
)
def test_what_would_not_be_followed_exactly_is_refused(
    compiler: GrammarCompiler, schema: object, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(form(SCHEMA, json.dumps(schema)), NONE)
    assert caught.value.field == "grammar.json_schema"
    assert message in caught.value.description
    assert len(str(caught.value)) < 450


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"exclusiveMinimum": 0}, "b": {"maximum": 0.5}}},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "number", "exclusiveMinimum": -1, "maximum": -0.5},
        {"type": "object", "required": ["a", "b"], "minProperties": 3},
        {"default": "\x1b[0m", "examples": ["\x7f"], "type": "string"},
        {"allOf": [{"multipleOf": 0.01}, {"multipleOf": 5}], "type": "number"},
        {"properties": {f"p{i}": {"type": "null"} for i in range(256)}},
        {
            "properties": {f"p{i}": {"type": "null"} for i in range(2000)},
            "required": [f"p{i}" for i in range(2000)],
        },
        {"properties": {"const": {"type": "object", "minProperties": 1}, "format": {}}},
    ],
)
def test_what_is_followed_exactly_is_taken(compiler: GrammarCompiler, schema: object) -> None:
    assert callable(compiler.compile(form(SCHEMA, json.dumps(schema)), NONE))


@pytest.mark.parametrize(
    "text",
    [
        "[" * (MAX_GRAMMAR_BYTES - 10),
        '{"a":' * 40_000,
        '{"enum": [' + "1," * 120_000 + "1]}",
        '{"const": ' + "9" * (MAX_GRAMMAR_BYTES - 20) + "}",
        '{"const": 0.' + "1" * (MAX_GRAMMAR_BYTES - 20) + "}",
        '{"const": 1' + "0" * (MAX_GRAMMAR_BYTES - 40) + "e-200000}",
    ],
)
def test_the_largest_texts_are_refused(compiler: GrammarCompiler, text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(form(SCHEMA, text), NONE)
    assert len(str(caught.value)) < 450


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {"a": {"type": "integer"}}}, r'{"\u0061":"x"}'),
        ({"patternProperties": {"^a": {"type": "integer"}}}, r'{"\u0061b":"x"}'),
        (
            {
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": {"type": "string"},
            },
            r'{"a":1,"\u0061":"x"}',
        ),
    ],
)
def test_a_declared_name_has_one_spelling(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: object, text: str
) -> None:
    assert not takes(compiler, tokenizer, schema, text)
    assert takes(compiler, tokenizer, schema, text.replace(r"\u0061", "é"))


def test_a_name_that_is_declared_with_escapes_is_the_name(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    schema = r'{"properties": {"\u0061": {"type": "integer"}}, "additionalProperties": false}'
    assert takes(compiler, tokenizer, schema, '{"a":1}')
    assert not takes(compiler, tokenizer, schema, r'{"\u0061":1}')
    assert not takes(compiler, tokenizer, schema, '{"a":"x"}')


DAYS = [
    ("2023-02-28", True), ("2023-02-29", False), ("2024-02-29", True), ("1900-02-29", False),
    ("2000-02-29", True), ("2100-02-29", False), ("0004-02-29", True), ("2023-02-30", False),
    ("2023-04-31", False), ("2023-12-31", True), ("2023-13-01", False), ("2023-10-10", True),
    ("2023-02-10", True), ("2023-02-00", False),
]  # fmt: skip


@pytest.mark.parametrize(("day", "exists"), DAYS)
@pytest.mark.parametrize("more", [{}, {"pattern": "^[0-9]"}, {"allOf": [{"minLength": 1}]}])
def test_a_date_is_one_of_the_calendar(
    compiler: GrammarCompiler, tokenizer: Tokenizer, more: dict[str, object], day: str, exists: bool
) -> None:
    schema = {"type": "string", "format": "date", **more}
    assert takes(compiler, tokenizer, schema, f'"{day}"') is exists
    moment = {"type": "string", "format": "date-time", **more}
    assert takes(compiler, tokenizer, moment, f'"{day}T23:59:59.5+01:00"') is exists
    assert not takes(compiler, tokenizer, moment, f'"{day}T12:00:60Z"')


def test_a_constant_that_looks_like_a_schema_is_left_alone(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    schema = {"const": {"format": "date", "minProperties": 7}}
    assert takes(compiler, tokenizer, schema, '{"format":"date","minProperties":7}')


_INTEGERS = st.integers(-(2**53), 2**53) | st.integers(-20, 20)
_NUMBERS = (
    _INTEGERS.map(str)
    | st.builds("{}e-{}".format, _INTEGERS, st.integers(0, 9))
    | st.floats(-(2.0**53), 2.0**53).filter(lambda one: abs(one) > 1e-9).map(repr)
)
_BOUNDED = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"])},
    optional={
        "minimum": _NUMBERS,
        "maximum": _NUMBERS,
        "exclusiveMinimum": _NUMBERS,
        "exclusiveMaximum": _NUMBERS,
        "multipleOf": st.sampled_from(["1", "2", "7", "0.5", "0.01", "25", "1.5"]),
    },
)


def fits(number: Fraction, schema: dict[str, str]) -> bool:
    """Whether a number satisfies the bounds above."""
    bounds = {key: Fraction(value) for key, value in schema.items() if key != "type"}
    return (
        (schema["type"] == "number" or number.denominator == 1)
        and number >= bounds.get("minimum", number)
        and number <= bounds.get("maximum", number)
        and number > bounds.get("exclusiveMinimum", number - 1)
        and number < bounds.get("exclusiveMaximum", number + 1)
        and number % bounds.get("multipleOf", number or 1) == 0
    )


@settings(max_examples=150, deadline=None)
@given(schema=_BOUNDED, seed=st.integers(0, 1000))
def test_random_bounds_are_kept_exactly(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, str], seed: int
) -> None:
    parts = [f'"{key}": {value}' for key, value in schema.items() if key != "type"]
    written = "{" + ", ".join([f'"type": "{schema["type"]}"', *parts]) + "}"
    try:
        make_matcher = compiler.compile(form(SCHEMA, written), frozenset([TokenId(0)]))
    except InvalidRequestError:
        return  # nothing satisfies it, or it cannot be followed exactly
    text = walk(make_matcher(), tokenizer, seed, endings=[0], max_tokens=40)
    # Without bounds 1e999999999 is a number too, and hard to compute with.
    if text is not None and len(text.lower().partition("e")[2].strip()) < 4:
        assert fits(Fraction(text.strip()), schema), (written, text)


_CHARACTERS = st.characters(
    codec="utf-8", exclude_characters="\x7f", exclude_categories=["Cc", "Cs"]
)
_CONSTANTS = st.recursive(
    st.none()
    | st.booleans()
    | _INTEGERS
    | st.builds(lambda digits, places: digits / 10**places, _INTEGERS, st.integers(0, 4))
    | st.text(_CHARACTERS, max_size=4)
    | st.sampled_from(["a\nb", '\t"\\/', "\u2028"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "é", 'q"', "\n"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=80, deadline=None)
@given(values=st.lists(_CONSTANTS, min_size=1, max_size=3), seed=st.integers(0, 1000))
def test_random_constants_are_written_exactly(
    compiler: GrammarCompiler, tokenizer: Tokenizer, values: list[object], seed: int
) -> None:
    """Numbers are compared as they are written, all else as values."""
    make_matcher = compiler.compile(form(SCHEMA, json.dumps({"enum": values})), NONE)
    text = walk(make_matcher(), tokenizer, seed)
    assert text is not None
    written = json.loads(text, parse_int=Decimal, parse_float=Decimal)
    wanted = [json.loads(json.dumps(v), parse_int=Decimal, parse_float=Decimal) for v in values]
    assert any(same(written, value) for value in wanted), (text, values)


def test_numbers_of_17_digits_are_written_exactly_or_refused(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    draw = random.Random(7)
    known = ["0.9371444992670599", "123456789012345.67", "-0.1234567890123456", "5e-40"]
    literals = known + [repr(draw.random() * 10 ** draw.randint(-8, 14)) for _ in range(250)]
    num_refused = 0
    for literal in literals:
        try:
            make_matcher = compiler.compile(form(SCHEMA, f'{{"enum": [{literal}]}}'), NONE)
        except InvalidRequestError:
            num_refused += 1
            assert literal not in known
            continue
        text = walk(make_matcher(), tokenizer, 0)
        assert text is not None
        assert Decimal(text) == Decimal(literal)
    assert num_refused <= 3


def same(one: object, other: object) -> bool:
    """Equality that tells true from 1."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_random_dates_exist(compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int) -> None:
    schema = '{"type": "string", "format": "date", "pattern": "^2[0-9]{3}-02-2"}'
    text = walk(compiler.compile(form(SCHEMA, schema), NONE)(), tokenizer, seed)
    assert text is not None
    datetime.date.fromisoformat(json.loads(text))
