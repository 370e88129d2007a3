"""Keywords that are written with others allow the same values, to the last one of small schemas."""

from __future__ import annotations

import itertools
import json
import logging
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator

from engine.contract.errors import InvalidRequestError
from engine.contract.sampling_params import GrammarKind
from engine.structured import GrammarCompiler
from engine.text import Tokenizer
from tests.engine.structured.conftest import form
from tests.engine.structured.following import takes

SCHEMA = GrammarKind.JSON_SCHEMA
Schema = dict[str, Any]
NAMES = "abcd"


def closed(*required: str, names: str = NAMES, **more: Any) -> Schema:
    return {
        "type": "object",
        "properties": {name: {"type": "null"} for name in names},
        "required": list(required),
        "additionalProperties": False,
        **more,
    }


OBJECTS: dict[str, Schema] = {
    "two at least": closed(minProperties=2),
    "two at least, one required": closed("b", minProperties=2),
    "three at most": closed(maxProperties=3),
    "one at most": closed(maxProperties=1),
    "one to two": closed(minProperties=1, maxProperties=2),
    "two, one required": closed("c", minProperties=2, maxProperties=2),
    "no bound in truth": closed(minProperties=0, maxProperties=9),
    "more than there are": closed(minProperties=1, maxProperties=4),
    "one needs another": closed(dependentRequired={"a": ["b"]}),
    "draft 7 needs": closed(dependencies={"a": ["b"], "b": ["c"]}),
    "each other": closed(dependentRequired={"a": ["d"], "d": ["a"]}),
    "needs what it has": closed("b", dependentRequired={"b": [], "a": ["b"]}),
    "needs what is none": closed(dependentRequired={"a": ["z"]}),
    "needs, and two at least": closed(minProperties=2, dependentRequired={"a": ["b"]}),
    "open, needs": {"type": "object", "properties": {"a": {}}, "dependentRequired": {"a": ["b"]}},
    "no type, needs": {"dependentRequired": {"a": ["b"]}},
    "not both": closed(**{"not": {"required": ["a", "b"]}}),
    "not one": closed(**{"not": {"required": ["a"]}}),
    "names of a list": {
        "type": "object",
        "propertyNames": {"enum": ["a", "c", 5]},
        "additionalProperties": {"type": "null"},
    },
    "names of a list, some declared": closed(propertyNames={"enum": ["a", "b"]}),
    "names of a reference": {
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/n"},
        "$defs": {"n": {"const": "d", "title": "N"}},
    },
    "names of a pattern": {
        "type": "object",
        "propertyNames": {"type": "string", "pattern": "^[ab]"},
    },
    "names of a length": {"type": "object", "propertyNames": {"minLength": 2}},
    "any names": closed(propertyNames={"type": "string"}),
    "never": closed(properties={"a": {"not": {}}, "b": {"not": True}, "c": {"not": False}}),
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
def test_the_same_objects_are_written(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    schema = OBJECTS[name]
    kind = Draft7Validator if "dependencies" in schema else Draft202012Validator
    validator = kind(schema)
    assert compiler.compile(form(SCHEMA, json.dumps(schema)), frozenset()).notes == ()
    for size in range(len(NAMES) + 1):
        for chosen in itertools.combinations(NAMES, size):
            value = dict.fromkeys(chosen)
            text = json.dumps(value)
            assert takes(compiler, tokenizer, schema, text) is validator.is_valid(value), text


ARRAYS: dict[str, Schema] = {
    "of three": {"items": {"enum": ["a", "b", "c"]}},
    "of three, and repeated in the list": {"items": {"enum": ["a", "b", "a", "b", "c"]}},
    "of two at least": {"items": {"enum": ["a", "b", "c"]}, "minItems": 2},
    "of one to two": {"items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 2.0},
    "of booleans": {"items": {"type": "boolean"}},
    "of booleans and null": {"items": {"type": ["boolean", "null"]}},
    "of one": {"items": {"const": "a"}},
    "of numbers": {"items": {"enum": [1, 1.0, True, "a"], "type": ["number", "boolean"]}},
    "of a type": {"items": {"enum": ["a", 1], "type": "string"}},
    "of one at most": {"items": {"enum": ["a", "b"]}, "maxItems": 1},
    "by a reference": {"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"enum": ["a", "b"]}}},
    "or nothing": {"type": ["array", "null"], "items": {"enum": ["a", "b"]}},
}
VALUES = ["a", "b", "c", True, False, None, 1]


@pytest.mark.parametrize("name", ARRAYS)
def test_the_same_sets_are_written(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    schema = {"type": "array", "uniqueItems": True, **ARRAYS[name]}
    validator = Draft202012Validator(schema)
    assert compiler.compile(form(SCHEMA, json.dumps(schema)), frozenset()).notes == ()
    for size in range(4):
        for chosen in itertools.product(VALUES, repeat=size):
            value, text = list(chosen), json.dumps(chosen)
            assert takes(compiler, tokenizer, schema, text) is validator.is_valid(value), text
    assert takes(compiler, tokenizer, schema, "null") is validator.is_valid(None)


def test_a_larger_set_comes_in_the_order_of_its_list_and_that_is_told(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    items = {"enum": list("abcdefgh")}
    schema = {"properties": {"s": {"type": "array", "uniqueItems": True, "items": items}}}
    assert compiler.compile(form(SCHEMA, json.dumps(schema)), frozenset()).notes == (
        "the items of $.properties.s come in the order in which the schema lists their values",
    )
    assert takes(compiler, tokenizer, schema, '{"s": ["a", "c", "h"]}')
    assert takes(compiler, tokenizer, schema, '{"s": []}')
    assert not takes(compiler, tokenizer, schema, '{"s": ["a", "a"]}')


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"not": {"type": "null"}}, ["1", '"a"', "[]"], ["null"]),
        ({"type": ["string", "null"], "not": {"type": "null"}}, ['"a"'], ["null"]),
        ({"type": ["number", "null"], "not": {"type": ["number"]}}, ["null"], ["1"]),
        ({"type": "string", "not": {"enum": ["a.", 'b"', 1]}}, ['"ax"', '"a"'], ['"a."', r'"b\""']),
        ({"type": "string", "not": {"const": ""}}, ['"a"'], ['""']),
        ({"type": "string", "not": {"pattern": "ab"}}, ['"ba"', '"a"'], ['"ab"', '"xabx"']),
        ({"type": "string", "not": {"pattern": "^a|b$"}}, ['"ba"'], ['"ax"', '"xb"']),
        ({"type": "integer", "not": {"type": "string", "title": "x"}}, ["1"], ['"a"']),
        ({"enum": [1, 2, "a"], "not": {}, "anyOf": [{}]}, [], ["1", '"a"']),
    ],
)
def test_what_is_excluded_is_not_written(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Schema, yes: list[str], no: list[str]
) -> None:
    whole = {"anyOf": [schema, {"const": "else"}]}
    for text in (*yes, *no):
        assert takes(compiler, tokenizer, whole, text) is (text in yes), text


@pytest.mark.parametrize(
    ("name", "yes", "no"),
    [
        ("uuid4", "123e4567-e89b-42d3-a456-426614174000", "123e4567-e89b-12d3-a456-426614174000"),
        ("uuid7", "017f22e2-79b0-7cc3-98c4-dc0c0c07398f", "017f22e2-79b0-4cc3-98c4-dc0c0c07398f"),
        ("base64", "aGk=", "aGk"),
        ("byte", "aGkh", "a"),
        ("base64url", "a-_h", "a+/h"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"pattern": "^[0-9a-z]"}, {"format": "uri", "allOf": [{}]}])
def test_a_well_known_format_is_held(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str, yes: str, no: str, more: Schema
) -> None:
    schema = {"type": "string", **more, "format": name}
    assert compiler.compile(form(SCHEMA, json.dumps(schema)), frozenset()).notes == ()
    assert takes(compiler, tokenizer, schema, json.dumps(yes))
    assert not takes(compiler, tokenizer, schema, json.dumps(no))


def test_an_unknown_format_is_an_annotation_which_is_told_once(
    compiler: GrammarCompiler, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {
        "type": "object",
        "properties": {
            "p": {"type": "string", "format": "path"},
            "q": {"type": "string", "format": "path"},
            "n": {"type": "integer", "format": "int32"},
            "x": {"format": "x" * 50},
            "unknown": {"type": "string", "format": "unknown"},
        },
    }
    params = form(SCHEMA, json.dumps(schema))
    with caplog.at_level(logging.INFO):
        first = compiler.compile(params, frozenset())
        assert compiler.compile(params, frozenset()).notes == first.notes
    assert first.notes == (
        'the format "unknown" in $.properties.unknown is not held',
        f'the format "{"x" * 37}…" in $.properties.x is not held',
        'the format "path" in $.properties.q is not held',
    )
    assert [record.message for record in caplog.records] == [
        f"a form is held with these notes: {'; '.join(first.notes)}"
    ]
    assert takes(compiler, tokenizer, schema, '{"p": "any", "n": 99999999999}')


def test_notes_are_bounded(compiler: GrammarCompiler) -> None:
    properties = {f"p{i}": {"type": "string", "format": f"f{i}"} for i in range(100)}
    notes = compiler.compile(
        form(SCHEMA, json.dumps({"properties": properties})), frozenset()
    ).notes
    assert len(notes) == 17
    assert notes[-1] == "84 more of this kind"


def test_notes_of_a_tag_and_of_reasoning_are_told(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"p": {"type": "string", "format": "path"}}}
    tag = {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<", "content": {"type": "json_schema"}, "end": ">"},
    }
    tag["format"]["content"]["json_schema"] = schema  # type: ignore[index]
    params = form(GrammarKind.STRUCTURAL_TAG, json.dumps(tag))
    assert compiler.compile(params, frozenset()).notes == (
        'the format "path" in $.properties.p is not held',
    )


STRINGS: Schema = {"type": "array", "uniqueItems": True, "items": {"type": "string"}}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (STRINGS, "in $; leave it out and drop what is repeated"),
        (
            {**STRINGS, "items": {"enum": list("abcdefghi")}},
            "items of 9 values, which are too many",
        ),
        ({**STRINGS, "items": {"enum": [str(i) for i in range(999)]}}, "no short list of values"),
        ({**STRINGS, "prefixItems": [{}]}, "no short list of values"),
        ({"type": "integer", "not": {"minimum": 3}}, "say what is allowed instead"),
        ({"type": "number", "not": {"type": "integer"}}, "say what is allowed instead"),
        ({"not": 5}, "say what is allowed instead"),
        (closed(names="abcdefgh", maxProperties=2), "8 properties that are not required"),
        (
            {"type": "object", "properties": {"a": {}}, "maxProperties": 2},
            "set additionalProperties to false",
        ),
        (
            closed(dependentRequired={str(i): ["a"] for i in range(7)}),
            "dependencies of 7 properties, of which at most 6 are told apart, in $; use anyOf",
        ),
        (closed(dependencies={"a": {"required": ["b"]}}), "with a schema for each case"),
        ({"type": "object", "propertyNames": {"format": "uri"}}, "list the names in `properties`"),
        ({"type": "object", "propertyNames": {"$ref": "#/x"}}, "list the names in `properties`"),
        (closed(propertyNames={"pattern": "^a"}), "list the names in `properties`"),
        ({"required": ["a"], "properties": {"a": {"not": {}}}, "type": "object"}, "property 'a'"),
        ({"type": "string", "pattern": r"\bfoo\b"}, "name the characters that may stand there"),
        ({"type": "string", "pattern": r"(a)\1"}, "repeat what the group lists"),
        ({"if": {}, "then": {}}, '"if", "then"; use anyOf with a schema for each case'),
        ({"unevaluatedProperties": False}, "use additionalProperties: false"),
        ({"$dynamicAnchor": "x"}, "leave it out"),
        ({"pattern": "^(?!a)b", "allOf": {}}, "give it a list of schemas"),
    ],
)
def test_what_is_not_held_is_refused_with_its_place_and_what_to_write(
    compiler: GrammarCompiler, schema: Schema, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(form(SCHEMA, json.dumps(schema)), frozenset())
    assert caught.value.field == "grammar.json_schema"
    assert message in caught.value.description
    assert len(str(caught.value)) < 450


def test_choices_within_choices_are_bounded(compiler: GrammarCompiler) -> None:
    """Two kilobytes that llguidance would work out to gigabytes."""

    def nested(depth: int) -> Schema:
        names = {f"p{i}": nested(depth - 1) if not i and depth else {} for i in range(8)}
        either = [{"properties": {"p1": False}}, {"required": ["p1", "p2"]}]
        return {"type": "object", "properties": names, "allOf": [{"anyOf": either}] * 6}

    def dependent(depth: int) -> Schema:
        names = {f"p{i}": dependent(depth - 1) if not i and depth else {} for i in range(8)}
        needed = {f"p{i}": [f"p{i + 1}"] for i in range(6)}
        return {"type": "object", "properties": names, "dependentRequired": needed}

    for make in (nested, dependent):
        assert compiler.compile(form(SCHEMA, json.dumps(make(0))), frozenset())
        with pytest.raises(InvalidRequestError, match="once its choices are worked out"):
            compiler.compile(form(SCHEMA, json.dumps(make(5))), frozenset())


def test_what_names_share_is_not_written_out_without_bound(compiler: GrammarCompiler) -> None:
    schema: Schema = {"type": "string", "enum": ["x" * 1000]}
    for _ in range(4):
        schema = {
            "type": "object",
            "propertyNames": {"enum": [f"n{i}" for i in range(200)]},
            "additionalProperties": schema,
        }
    with pytest.raises(InvalidRequestError, match="once its choices are worked out"):
        compiler.compile(form(SCHEMA, json.dumps(schema)), frozenset())
