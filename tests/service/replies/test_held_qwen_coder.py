"""Arguments that the engine holds to a tool's schema in Qwen3-coder's XML are read back as
arguments that satisfy the schema, or the schema is refused before anything is generated.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.errors import InvalidRequestError
from engine.contract.sampling_params import GrammarKind, GrammarParams
from engine.contract.types import TokenId
from engine.structured import GrammarCompiler
from engine.text import Tokenizer
from service.replies import FORMATS, Context, tool_types
from tests.engine.structured.following import allowed
from tests.engine.structured.json_check import fits
from tests.service.replies.cases import parse

DEMO = Path(__file__).parents[3] / "models" / "demo"
V = 4100
END = TokenId(V - 1)
WORDS = ["null", "None", "true", "True", "12", "-3", '{"a": 1}', "[1]", '"x"', "\n</parameter>\n"]
WORDS += [
    "</parameter>",
    "abc",
    "1.5",
    "\n",
    " ",
    "é",
    "é\n</parameter>\n",
    "abcabc\n</parameter>\n",
]

Schema = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO, V)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, V)


def params(schema: Schema) -> GrammarParams:
    content = {"type": "qwen_xml_parameter", "json_schema": schema}
    begin, end = "<tool_call>\n<function=f>\n", "</function>\n</tool_call>"
    form = {"type": "tag", "begin": begin, "content": content, "end": end}
    text = json.dumps({"type": "structural_tag", "format": form})
    return GrammarParams(kind=GrammarKind.STRUCTURAL_TAG, text=text)


def write(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Schema, seed: int) -> str | None:
    """A random call; None: it became too long."""
    matcher = compiler.compile(params(schema), frozenset([END]))()
    draw, output, hint = random.Random(seed), bytearray(), list[int]()
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size - 1, -1, -1)}
    while not matcher.is_complete and len(output) < 1500:
        ids = allowed(matcher, V)
        assert ids, bytes(output)
        if not hint and draw.random() < 0.7:
            hint = [by_byte[bytes([byte])] for byte in draw.choice(WORDS).encode()]
        token = hint.pop(0) if hint and hint[0] in ids else draw.choice(sorted(ids - {END}))
        assert matcher.accept(TokenId(token))
        output += tokenizer.token_bytes(token)
    return output.decode() if matcher.is_complete else None


def check_arguments(schema: Schema, text: str) -> None:
    """A call is read as arguments that satisfy the schema, whole and by character."""
    tools = tool_types([{"name": "f", "parameters": schema}])
    for parts in ([text], list(text)):
        [call] = parse(FORMATS["qwen3_coder"], parts, Context(tools)).calls
        assert call.name == "f"
        assert call.complete
        assert fits(schema, json.loads(call.arguments)), (schema, text, call.arguments)


VALUES: dict[str, Schema | bool] = {
    "text": {"type": "string"},
    "short text": {"type": "string", "minLength": 2, "maxLength": 5},
    "a constant": {"const": "a b\n"},
    "constants": {"enum": ["x", "", "null", "12"]},
    "anything": {},
    "true": True,
    "text with a description": {"description": "d", "minLength": 3},
    "an integer": {"type": "integer", "minimum": -3, "maximum": 12},
    "a boolean": {"type": "boolean"},
    "a number": {"type": "number"},
    "an object": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    "an object without a type": {"properties": {"a": {"type": "integer"}}},
    "a list": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    "numbers": {"enum": [1, 2.5, None, True]},
    "perhaps text": {"type": ["string", "null"]},
    "text or number": {"type": ["string", "number", "boolean"], "maxLength": 4, "maximum": 12},
    "text or a list": {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]
    },
    "optional text": {
        "anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}],
        "default": None,
    },
    "optional integer": {"anyOf": [{"type": "integer", "maximum": 12}, {"type": "null"}]},
    "text or object": {"oneOf": [{"$ref": "#/$defs/text"}, {"$ref": "#/$defs/point"}]},
    "a reference": {"$ref": "#/$defs/point"},
    "a reference to text": {"$ref": "#/$defs/text"},
    "mixed constants": {"enum": ["a", 12, None, {"a": 1}]},
    "one of two constants": {"oneOf": [{"const": "a"}, {"const": "b", "title": "B"}]},
    "nested choices": {
        "anyOf": [{"anyOf": [{"type": "null"}, {"type": "boolean"}]}, {"const": "x"}]
    },
}
DEFS: Schema = {
    "text": {"type": "string", "maxLength": 8},
    "point": {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "next": {"$ref": "#/$defs/point"}},
        "required": ["x"],
        "additionalProperties": False,
    },
}  # fmt: skip


def with_defs(properties: dict[str, Any], required: list[str]) -> Schema:
    return {"type": "object", "properties": properties, "required": required, "$defs": DEFS}


@pytest.mark.parametrize("name", VALUES)
def test_each_value_is_read_as_one_of_its_schema(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    schema = with_defs({"v": VALUES[name]}, ["v"])
    whole = 0
    for seed in range(30):
        text = write(compiler, tokenizer, schema, seed)
        if text is not None:
            whole += 1
            check_arguments(schema, text)
    assert whole > 5


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_several_parameters(
    compiler: GrammarCompiler, tokenizer: Tokenizer, data: st.DataObject, seed: int
) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=4, unique=True))
    required = [name for name in names if data.draw(st.booleans())]
    schema = with_defs({name: VALUES[name] for name in names}, required)
    text = write(compiler, tokenizer, schema, seed)
    if text is not None:
        check_arguments(schema, text)


def test_no_parameters_and_undeclared_ones(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for schema in ({}, {"type": "object", "properties": {}}, {"properties": {}, "required": ["x"]}):
        text = write(compiler, tokenizer, schema, 3)
        assert text is not None
        check_arguments(schema, text)


def test_a_reference_at_the_root(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"$ref": "#/$defs/point", "$defs": DEFS}
    text = write(compiler, tokenizer, schema, 1)
    assert text is not None
    check_arguments(schema, text)


REFUSED: list[tuple[Schema, str]] = [
    ({"type": "array"}, "json_schema.type must be object"),
    ({"anyOf": [{"type": "object"}]}, "json_schema.anyOf cannot be held"),
    ({"properties": {}, "minProperties": 1}, "json_schema.minProperties cannot be held"),
    ({"required": ["x"], "additionalProperties": False}, "json_schema.required has 'x'"),
    ({"required": ["x"], "additionalProperties": {"type": "integer"}}, "describe it in `prop"),
    ({"properties": {"a>": {}}}, "has the name 'a>'"),
    ({"properties": {f"p{i}": {} for i in range(257)}}, "257"),
    ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "properties.a.pattern cannot be"),
    ({"properties": {"a": {"type": "string", "format": "date"}}}, "properties.a.format cannot be"),
    ({"properties": {"a": {"type": ["string", "null"], "pattern": "x"}}}, "a.pattern cannot be"),
    ({"properties": {"a": {"allOf": [{"type": "string"}]}}}, "properties.a.allOf cannot be"),
    ({"properties": {"a": {"const": "</parameter>"}}}, "would not be read as a string"),
    ({"properties": {"a": {"enum": ["1", 2]}}}, "has the value '1'"),
    ({"properties": {"a": {"anyOf": [{"type": "integer"}, {}]}}}, "a.anyOf[1] does not say its"),
    ({"properties": {"a": False}}, "is a schema that allows nothing"),
    ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "$ref names no schema"),
    (
        {"properties": {"a": {"oneOf": [{"type": "string"}, {"minLength": 2, "type": "string"}]}}},
        "has a oneOf whose branches may overlap",
    ),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_what_cannot_be_held_is_refused(
    compiler: GrammarCompiler, schema: Schema, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(params(schema), frozenset())
    assert caught.value.field == "grammar.structural_tag"
    assert caught.value.description.startswith("format.content.json_schema")
    assert message in caught.value.description
