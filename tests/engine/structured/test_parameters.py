"""Arguments that are written one by one, between marks or as in Python: what is generated is read
back by readers that know the marks alone, and satisfies the schema; and what satisfies the schema
can be generated.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import jsonschema
import pytest

from engine.contract.errors import InvalidRequestError
from engine.contract.json_types import allowed_types, type_of
from engine.contract.types import TokenId
from engine.structured import GrammarCompiler
from engine.structured.matcher import GrammarMatcher
from engine.text import Tokenizer
from tests.engine.structured.conftest import V
from tests.engine.structured.following import allowed
from tests.engine.structured.tags import Form, Taker, params, tag, wander

NUM_WALKS = 200


def tagged(before: str, after: str | dict[str, str], close: str) -> Form:
    return {
        "type": "tagged_parameters",
        "before_name": before,
        "after_name": after,
        "after_value": close,
    }


PYTHON: Form = {"type": "python_arguments"}
BARE: Form = {"type": "bare_object", "quote": "<|user|>"}
GLM = tagged("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
TYPED = ("string", "boolean", "null", "object", "number")
FORMS: dict[str, Form] = {
    "glm": GLM,
    "minimax": tagged('<parameter name="', '">', "</parameter>\n"),
    "dsml": tagged(
        '<｜DSML｜parameter name="',
        {"string": '" string="true">', "other": '" string="false">'},
        "</｜DSML｜parameter>\n",
    ),
    "special tokens": tagged("<|user|>", "<|system|>\n<|tool|>", "\n<|assistant|>\n"),
    "special tokens and types": tagged(
        '<|user|>key="',
        {kind: f'" type="{kind}"<|system|>' for kind in TYPED} | {"other": '" type="x"<|system|>'},
        "<|assistant|>key<|system|>",
    ),
    "python": PYTHON,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "größe": {"enum": ["m", "a b"]},
        "text": {"type": "string", "maxLength": 9},
        "n": {"type": "integer", "minimum": -3, "maximum": 12},
        "flag": {"type": "boolean"},
        "none": {"anyOf": [{"$ref": "#/$defs/few"}, {"type": "null"}], "default": None},
        "either": {"type": ["string", "boolean", "integer"], "maxLength": 5, "maximum": 99},
        "one": {"enum": [True, 7, None, "x", [1]]},
        "list": {"type": "array", "items": {"$ref": "#/$defs/short"}, "maxItems": 2},
        "object": {
            "type": ["object", "array"],
            "properties": {"a": {"$ref": "#/$defs/short"}, "b": {"type": ["boolean", "null"]}},
            "required": ["b"],
            "additionalProperties": False,
            "items": {"type": "null"},
            "maxItems": 2,
        },
    },
    "required": ["text", "none", "either", "one"],
    "additionalProperties": False,
    "$defs": {
        "few": {"type": "integer", "minimum": 0, "maximum": 9},
        "short": {"type": "string", "maxLength": 4},
    },
}
VALID = jsonschema.Draft202012Validator(SCHEMA)
SOME: dict[str, list[Any]] = {
    "größe": ["m", "a b"],
    "text": ["", "null", "12", " \n", '{"a"', "<a>", "é'\""],
    "n": [-3, 0, 12],
    "flag": [True, False],
    "none": [None, 4],
    "either": ["a", "", True, 12],
    "one": [True, 7, None, "x", [1]],
    "list": [[], ["</p>", "\n"]],
    "object": [{"b": None}, {"a": "=", "b": True}, [], [None]],
}
"""Values of each property, all of them told from each other by a reader without types."""


def held(form: Form, schema: object = SCHEMA) -> Form:
    return tag("[", "]", {**form, "json_schema": schema})


@pytest.fixture(scope="module")
def takes(compiler: GrammarCompiler, tokenizer: Tokenizer) -> Taker:
    return Taker(compiler, tokenizer)


# ---- readers and a writer ------------------------------------------------------------------------


def read(form: Form, text: str) -> dict[str, Any]:
    assert text[0] + text[-1] == "[]"
    text = text[1:-1]
    pairs = list(read_python(text) if form is PYTHON else read_tagged(form, text))
    found = dict(pairs)
    assert len(found) == len(pairs)
    assert list(found) == [name for name in SCHEMA["properties"] if name in found]
    return found


def read_python(text: str) -> Any:
    words = {"True": True, "False": False, "None": None}
    at = 0
    while text:
        name = re.compile(r"([^\W\d]\w*)=").match(text, at)
        assert name, text[at:]
        at = name.end()
        word = next((word for word in words if text.startswith(word, at)), None)
        if word is None:
            value, at = json.JSONDecoder().raw_decode(text, at)
            assert value is not None
            assert not isinstance(value, bool)
        else:
            value, at = words[word], at + len(word)
        yield name[1], value
        if at == len(text):
            return
        assert text.startswith(", ", at)
        at += 2


def read_tagged(form: Form, text: str) -> Any:
    before, close = form["before_name"], form["after_value"]
    after = form["after_name"]
    marks = after if isinstance(after, dict) else {"": after}
    at = 0
    while at < len(text):
        assert text.startswith(before, at)
        at += len(before)
        stop, kind = min((text.index(m, at), k) for k, m in marks.items() if m in text[at:])
        name, at = text[at:stop], stop + len(marks[kind])
        types = allowed_types(SCHEMA["properties"][name], SCHEMA)
        is_json = kind != "string" if kind else "string" not in types
        if is_json or (text[at] == "[" and "array" in types and not kind):
            value, at = json.JSONDecoder().raw_decode(text, at)
        else:
            ends = [text.find(mark.strip(), at) for mark in (before, close)]
            stop = min(end for end in ends if end >= 0) - (len(close) - len(close.lstrip()))
            value, at = text[at:stop], stop
            if not kind:
                value = typed(value, types)
        assert not kind or marks[kind] == mark_of(value, marks)
        assert text.startswith(close, at)
        at += len(close)
        yield name, value


def mark_of(value: Any, marks: dict[str, str]) -> str:
    """The mark that tells the type of a value; the schema's numbers are integers."""
    kinds = ["number", "other"] if type_of(value) == "integer" else [type_of(value), "other"]
    return next(marks[kind] for kind in kinds if kind in marks)


def typed(text: str, types: frozenset[str]) -> Any:
    """A text as what it looks like, if that is allowed; else a string."""
    words = {"True": "true", "False": "false", "None": "null"}
    try:
        value = json.loads(words.get(text.strip(), text))
    except ValueError:
        return text
    kind = type_of(value)
    return value if kind != "string" and kind in types else text


def write(form: Form, arguments: dict[str, Any]) -> str:
    written = []
    for name, value in arguments.items():
        text = json.dumps(value, ensure_ascii=False)
        if form is PYTHON:
            is_word = value is None or isinstance(value, bool)
            written.append(f"{name}={value if is_word else text}")
            continue
        after = form["after_name"]
        mark = after if isinstance(after, str) else mark_of(value, after)
        text = value if isinstance(value, str) else text
        written.append(form["before_name"] + name + mark + text + form["after_value"])
    return f"[{(', ' if form is PYTHON else '').join(written)}]"


# ---- exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_what_is_generated_is_read_back(takes: Taker, name: str) -> None:
    form = FORMS[name]
    words = ["null", "None", "True", "true", "12", "[1]", '{"b": ', '"', '"]', "\n", ", n=3", "]"]
    words += [text for text in form.values() if isinstance(text, str)]
    words += [form.get("after_value", "").strip(), "</arg_value", "text", "x"]
    hints = [takes.bytewise(word) for word in words if word]
    make = takes.compiler.compile(params(held(form)), frozenset([TokenId(V - 1)]))
    whole, seen = 0, dict[str, set[str]]()
    for seed in itertools.count():
        matcher = make()
        assert isinstance(matcher, GrammarMatcher)
        text = wander(matcher, takes.tokenizer, seed, hints, 600)
        if text is None:
            continue
        found = read(form, text)
        VALID.validate(found)
        for key, value in found.items():
            seen.setdefault(key, set()).add(type_of(value))
        if (whole := whole + 1) == NUM_WALKS:
            break
    assert seed < 2 * NUM_WALKS
    assert seen.keys() == SCHEMA["properties"].keys()
    assert all(len(seen[key]) > 1 for key in ("none", "either", "one", "object")), seen


@pytest.mark.parametrize("name", FORMS)
def test_what_satisfies_the_schema_can_be_generated(takes: Taker, name: str) -> None:
    form, draw = FORMS[name], random.Random(5)
    for _ in range(40):
        arguments = {
            key: draw.choice(values)
            for key, values in SOME.items()
            if key in SCHEMA["required"] or draw.random() < 0.5
        }
        VALID.validate(arguments)
        text = write(form, arguments)
        assert read(form, text) == arguments
        assert takes(held(form), text), text


def object_of(properties: dict[str, Any], *required: str) -> Form:
    return {"properties": properties, "required": list(required), "additionalProperties": False}


def dsml(value: str, is_string: str) -> str:
    return f'[<｜DSML｜parameter name="a" string="{is_string}">{value}</｜DSML｜parameter>\n]'


def glm(value: str) -> str:
    return f"[<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n]"


TEXT: Form = {"type": "string"}
CASES: list[tuple[str, Form, list[str], list[str]]] = [
    (
        "python",
        object_of({"a": {}, "b": {"type": "integer"}, "c": {"type": "null"}}, "b"),
        ["[b=1]", "[a=None, b=1]", "[b=1, c=None]", '[a={"x": null}, b=1, c=None]', '[a="", b=2]'],
        ["[]", "[a=1]", "[, b=1]", "[b=1, ]", "[b=1,c=None]", "[b=1c=None]", "[b=1, a=1]"],
    ),
    (
        "python",
        object_of({"a": {}, "b": {"type": "integer"}, "c": {"type": "null"}}),
        ["[]", "[a=True]", "[c=None]", "[a=False, c=None]"],
        ["[a=null]", "[a=true]", "[c=null]", "[b=1, b=1]", "[b=True]", "[b=None]", "[, c=None]"],
    ),
    ("python", object_of({"a": TEXT, "b": TEXT}), ["[]", '[b="x"]', '[a="", b=""]'], ['["x"]']),
    ("python", object_of({}), ["[]"], ["[a=1]", "[ ]"]),
    (
        "python",
        object_of({"a": {"anyOf": [{"enum": [True, 3]}, {"const": None}]}}, "a"),
        ["[a=True]", "[a=None]", "[a=3]"],
        ["[a=False]", "[a=1]", '[a="True"]'],
    ),
    ("python", object_of({"a": {"allOf": [{"type": "boolean"}]}}, "a"), ["[a=True]"], ["[a=3]"]),
    (
        "python",
        object_of({"a": {"type": ["number", "null"], "enum": [1, 2, None]}}, "a"),
        ["[a=1]", "[a=2]", "[a=None]"],
        ["[a=3]", "[a=null]"],
    ),
    (
        "python",
        object_of({"a": {"type": ["integer", "null"], "enum": [1, 2]}}, "a"),
        ["[a=1]"],
        ["[a=None]", "[a=3]"],
    ),
    (
        "python",
        object_of({"a": {"type": ["boolean", "string"], "not": {"type": "string"}}}, "a"),
        ["[a=True]", "[a=False]"],
        ['[a="x"]'],
    ),
    (
        "dsml",
        object_of({"a": {"type": ["string", "number", "null"]}}, "a"),
        [dsml("12", "true"), dsml("null", "true"), dsml("12", "false"), dsml("null", "false")],
        [dsml("x", "false"), dsml("</｜DSML｜parameter>", "true"), dsml("true", "false"), "[]"],
    ),
    (
        "dsml",
        object_of({"a": TEXT}, "a"),
        [dsml("", "true"), dsml("<｜DSML｜parameter name=", "true"), dsml('{"a": 1}', "true")],
        [dsml('<｜DSML｜parameter name="', "true"), dsml("x", "false")],
    ),
    (
        "glm",
        object_of({"a": {"type": ["string", "integer"]}}, "a"),
        [glm("x1"), glm("-1"), glm("</arg_key>"), glm("\n")],
        [glm("-x"), glm("1x"), glm("<arg_key>"), glm("a</arg_value>b")],
    ),
]


def test_bare_objects_have_constants_of_their_type_alone(takes: Taker) -> None:
    schema = object_of({"a": {"type": ["number", "string"], "enum": [1, 2.5, "x", None]}}, "a")
    form = held(BARE, schema)
    assert all(takes(form, f"[a:{value}]") for value in ("1", "2.5", "<|user|>x<|user|>"))
    assert not any(takes(form, f"[a:{value}]") for value in ("null", "3", "x", "<|user|>1<|user|>"))


@pytest.mark.parametrize(("name", "schema", "good", "bad"), CASES)
def test_texts(takes: Taker, name: str, schema: Form, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert takes(held(FORMS[name], schema), text), text
    for text in bad:
        assert not takes(held(FORMS[name], schema), text), text


def test_qwen_xml_parameter_is_a_special_case(takes: Taker) -> None:
    content = tagged("<parameter=", ">\n", "\n</parameter>\n")
    draw = random.Random(1)
    for _ in range(10):
        one, other = (
            takes.compiler.compile(params(held(form)), frozenset([TokenId(V - 1)]))()
            for form in (content, {"type": "qwen_xml_parameter"})
        )
        for _ in range(60):
            ids = allowed(one, V)
            assert ids == allowed(other, V)
            token = TokenId(draw.choice(sorted(ids)))
            assert one.accept(token)
            assert other.accept(token)
            if one.is_complete:
                break
        assert one.is_complete == other.is_complete


def test_many_arguments_that_may_be_left_out(takes: Taker) -> None:
    names = [f"p{index}" for index in range(256)]
    schema = object_of({name: {"type": ["integer", "null"]} for name in names})
    text = ", ".join(f"{name}=None" for name in names[3::2])
    assert takes(held(PYTHON, schema), f"[{text}]")
    assert not takes(held(PYTHON, schema), f"[{text}, p4=1]")


# ---- refusals ------------------------------------------------------------------------------------


def glm_but(**more: object) -> Form:
    return {**GLM, "json_schema": SCHEMA, **more}


def named(name: str, form: Form = GLM) -> Form:
    return {**form, "json_schema": object_of({name: TEXT})}


def python(value: object) -> Form:
    return {**PYTHON, "json_schema": {"properties": {"a": value}}}


def bare(num_names: int, num_more: int) -> Form:
    """An object with so many names of another one, and that of the next, up to the first again."""
    names = [str(index) for index in range(num_more)]
    definitions: dict[str, Any] = {
        name: {"type": "object"}
        | object_of({f"p{i}": {"$ref": f"#/$defs/{after}"} for i in range(num_names)})
        for name, after in zip(names, [*names[1:], names[0]], strict=True)
    }
    schema = object_of({"a": {"$ref": "#/$defs/0"}}) | {"$defs": definitions}
    return {**BARE, "json_schema": schema}


REFUSED: list[tuple[Form, str]] = [
    (glm_but(before_name=None), "before_name is missing; it must be a string"),
    (glm_but(before_name=""), "before_name must have 1 to 256 characters, not only blanks"),
    (glm_but(after_value="\n"), "after_value must have 1 to 256 characters"),
    (glm_but(after_value="x" * 257), "after_value must have 1 to 256 characters"),
    (glm_but(after_value='\n"""\n'), "after_value ends as it begins"),
    (glm_but(after_name=3), "after_name is 3; it must be a string"),
    (glm_but(after_name={"string": ">"}), "after_name.other is missing; it must be a string"),
    (glm_but(after_name={"other": ">"}), "after_name.string is missing; it must be a string"),
    (glm_but(after_name={"string": "a", "other": ""}), "after_name.other must have 1 to 256"),
    (glm_but(after_name={"string": "a", "other": "b", "type": "c"}), "after_name.type is no type"),
    (glm_but(after_name={"string": ">", "other": ">>"}), "after_name.other and `string` begin"),
    (glm_but(escapes={}), "escapes is not known; known here: after_name, after_value, before"),
    ({**PYTHON, "before_name": "x"}, "before_name is not known; known here: json_schema"),
    (glm_but(json_schema=[]), "json_schema is neither a JSON object"),
    (named("a<"), "has the name 'a<', which cannot be written in the parameter's mark"),
    (named('a"', FORMS["minimax"]), "has the name 'a\"'"),
    (named("a&quot;", FORMS["minimax"]), 'none of them " or &, no special token'),
    (named("a<|eos|>", FORMS["minimax"]), "has the name 'a<|eos|>'"),
    (named("x" * 257), "which cannot be written"),
    (
        named("a=b", PYTHON),
        "has the name 'a=b', which cannot stand without quotation marks; use letters",
    ),
    (named(" a", PYTHON), "has the name ' a', which cannot stand without"),
    (named("x" * 257, PYTHON), "which cannot stand without quotation marks"),
    (glm_but(json_schema=object_of({"a": {"const": "<arg_key>"}})), "has the value '<arg_key>'"),
    (python(False), "properties.a is a schema that allows nothing"),
    (python({"type": "integer", "enum": ["x"]}), "properties.a is a schema that allows nothing"),
    (python({"type": "x"}), "properties.a.type names none of array, boolean"),
    (python({"anyOf": {}}), "properties.a.anyOf must be a list"),
    (python({"anyOf": [{"const": n} for n in (*range(300), None)]}), "a has too many branches"),
    ({**BARE, "json_schema": object_of({"a": {"type": "null", "enum": [1]}})}, "has no value that"),
    ({**BARE, "json_schema": object_of({"a": {"enum": [3], "maximum": 2}})}, "a.maximum cannot"),
    (
        {
            **BARE,
            "json_schema": object_of(
                {"a": {"oneOf": [{"type": "string", "maxLength": 1}, {"type": "string"}]}}
            ),
        },
        "oneOf whose branches may overlap",
    ),
    (bare(2, 3), "is deeper than 16 values, or one of more than 4096"),
    (bare(100, 1), "is deeper than 16 values, or one of more than 4096"),
    (python({"type": "array", "if": {}}), "properties.a uses keywords that are not supported"),
]


@pytest.mark.parametrize(("content", "message"), REFUSED)
def test_what_cannot_be_held_is_refused_with_its_place(
    compiler: GrammarCompiler, content: Form, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(params(tag("[", "]", content)), frozenset())
    assert caught.value.field == "grammar.structural_tag"
    assert caught.value.description.startswith("format.content.")
    assert message in caught.value.description
