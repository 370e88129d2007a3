"""Choices of tools, held by grammars: with random models, which call nothing by themselves, every
reply that has to call does, in the model's own format, with arguments that their schemas allow.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import headrace
import pytest
import pytest_asyncio
from headrace import AsyncClient, FinishReason, Result
from jsonschema import Draft202012Validator

from service.replies import FORMATS
from tests.service.callers import calling, make_directory

pytestmark = pytest.mark.asyncio(loop_scope="module")
_SHORT = {"type": "string", "maxLength": 6}
_SMALL = {"type": "integer", "minimum": -20, "maximum": 20}


def _object(properties: dict[str, Any], optional: Sequence[str] = (), **more: Any) -> Any:
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


SCHEMAS: dict[str, Any] = {
    "no parameters": None,
    "empty object": _object({}),
    "text": _object({"text": _SHORT}),
    "integer": _object({"count": _SMALL}),
    "bounds": _object({"n": {"type": "integer", "minimum": 3, "maximum": 5}}),
    "number": _object({"x": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25}}),
    "boolean": _object({"yes": {"type": "boolean"}}),
    "null": _object({"nothing": {"type": "null"}}),
    "enum of texts": _object({"unit": {"type": "string", "enum": ["m", "cm", "größer als 1 m"]}}),
    "enum of all kinds": _object({"one": {"enum": [1, 2.5, True, None]}}),
    "constant": _object({"kind": {"const": "gauge"}}),
    "largest exact integer": _object({"n": {"enum": [2**53, -(2**53), 0]}}),
    "names that are not ASCII": _object({"größe": _SMALL, "水位": {"type": "boolean"}}),
    "names with blanks and marks": _object({"a b": _SMALL, "c-d.e": _SMALL, "$f": _SMALL}),
    "array": _object({"at": {"type": "array", "items": _SMALL, "maxItems": 4}}),
    "array of two at least": _object(
        {"at": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}}
    ),
    "tuple": _object(
        {
            "pair": {
                "type": "array",
                "prefixItems": [_SMALL, {"type": "boolean"}],
                "items": False,
                "minItems": 2,
            }
        }
    ),
    "nested": _object({"a": _object({"b": _object({"c": _SMALL})})}),
    "array of objects": _object(
        {"rows": {"type": "array", "items": _object({"id": _SMALL}), "maxItems": 3}}
    ),
    "optional": _object({"a": _SMALL, "b": _SMALL, "c": {"type": "boolean"}}, ("b", "c")),
    "all optional": _object({"a": _SMALL, "b": {"type": "boolean"}}, ("a", "b")),
    "reference": _object({"p": {"$ref": "#/$defs/p"}}, **{"$defs": {"p": _object({"x": _SMALL})}}),
    "reference to a text": _object(
        {"p": {"$ref": "#/$defs/p"}}, **{"$defs": {"p": {"enum": ["a", "b"]}}}
    ),
    "definitions that use others": _object(
        {"p": {"$ref": "#/$defs/p"}},
        **{
            "$defs": {
                "p": _object({"q": {"$ref": "#/$defs/q"}}),
                "q": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            }
        },
    ),
    "one of several": _object({"v": {"anyOf": [_SMALL, {"type": "boolean"}, {"type": "null"}]}}),
    "objects told apart": _object(
        {
            "shape": {
                "anyOf": [
                    _object({"kind": {"const": "circle"}, "r": _SMALL}),
                    _object({"kind": {"const": "box"}, "w": _SMALL, "h": _SMALL}),
                ]
            }
        }
    ),
    "a list of types": _object({"v": {"type": ["integer", "null"], "minimum": 0, "maximum": 9}}),
    "long names": _object({"n" * 60: _SMALL, "m" * 60: {"type": "boolean"}}),
    "many": _object({f"p{number}": {"type": "boolean"} for number in range(12)}),
    "marks in constants": _object({"mark": {"enum": ["</tool_call", '"}', "[ARGS", "```"]}}),
}
"""Each of a finite language, so that an output has to end. For families whose values have no
quotation marks, see `docs/chat.md`.
"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{index}",
            **({"parameters": schema} if schema is not None else {}),
        },
    }
    for index, schema in enumerate(SCHEMAS.values())
]
VALIDATORS = {
    tool["function"]["name"]: Draft202012Validator(
        tool["function"].get("parameters", {"type": "object", "maxProperties": 0})  # type: ignore[attr-defined]
    )
    for tool in TOOLS
}
FEW = ("harmony", "mistral", "qwen3_coder")
"""Formats that differ most: special tokens alone, one list of calls, no JSON. `make test` has
these, `make test-slow` one of each kind.
"""
GROUP = 6
MESSAGES = [{"role": "user", "content": "How high is the river?"}]


def one_of_each_kind() -> list[str]:
    """A format of each kind of form; `test_held_calls.py` walks through those of all."""
    found: dict[tuple[object, ...], str] = {}
    for name, format in reversed(list(FORMATS.items())):
        if (form := format.form) is not None:
            kind = form.content["type"], isinstance(form.content.get("after_name"), dict)
            found[*kind, form.bare, form.text == "", form.opening == "", form.separator is None] = (
                name
            )
    return sorted({*found.values(), *FEW})


def groups() -> list[list[dict[str, Any]]]:
    """The tools, some at a time."""
    return [TOOLS[start : start + GROUP] for start in range(0, len(TOOLS), GROUP)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in FEW else (pytest.mark.slow,))
        for name in one_of_each_kind()
    ],
)
def directory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A format that has calls, and a random model of it."""
    name = request.param
    return name, make_directory(tmp_path_factory.mktemp(name.replace("_", "-")), name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(directory: tuple[str, Path]) -> AsyncIterator[tuple[str, AsyncClient]]:
    """A client of a server of each."""
    name, path = directory
    async with calling(path, name) as client:
        yield name, client


async def ask(client: AsyncClient, tools: Sequence[Any], seed: int, **options: Any) -> Result:
    given: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 3500}
    if "reasoning_budget" in (await client.model()).capabilities.names:
        given["max_reasoning_tokens"] = 8
    given |= options
    return await client.generate(MESSAGES, tools=tools, **given)


def check(result: Result, names: set[str]) -> None:
    """The reply is calls of these tools alone, each with arguments that its schema allows."""
    assert result.finish_reason is FinishReason.TOOL_CALLS, (result.finish_reason, result.text)
    assert result.text == ""
    assert result.tool_calls
    for call in result.tool_calls:
        assert call.name in names
        VALIDATORS[call.name].validate(json.loads(call.arguments))


async def test_a_required_call_is_one_whatever_the_model(client: tuple[str, AsyncClient]) -> None:
    name, caller = client
    several = FORMATS[name].form
    assert several is not None
    asked = []
    for seed, tools in enumerate(groups() * (3 if name in FEW else 9)):
        names = {tool["function"]["name"] for tool in tools}
        more = {"parallel_tool_calls": False} if seed % 2 else {}
        asked.append((ask(caller, tools, seed, tool_choice="required", **more), names))
    results = await asyncio.gather(*(call for call, _ in asked))
    for seed, (result, (_, names)) in enumerate(zip(results, asked, strict=True)):
        check(result, names)
        if seed % 2:
            assert len(result.tool_calls) == 1
    counts = {len(result.tool_calls) for result in results}
    assert (max(counts) > 1) == (several.separator is not None)


async def test_one_function_is_the_one_that_is_called(client: tuple[str, AsyncClient]) -> None:
    _, caller = client
    choice = lambda name: {"type": "function", "function": {"name": name}}  # noqa: E731
    names = [tool["function"]["name"] for tool in TOOLS]
    results = await asyncio.gather(
        *(
            ask(caller, TOOLS[start : start + GROUP], start, tool_choice=choice(names[index]))
            for start in range(0, len(TOOLS), GROUP)
            for index in range(start, min(start + GROUP, len(TOOLS)))
        )
    )
    for name, result in zip(names, results, strict=True):
        check(result, {name})


async def test_none_is_called_where_none_is_to_be(client: tuple[str, AsyncClient]) -> None:
    name, caller = client
    marks = FORMATS[name].form.marks  # type: ignore[union-attr]
    results = await asyncio.gather(
        *(ask(caller, TOOLS[:3], seed, tool_choice="none", max_tokens=200) for seed in range(6))
    )
    for result in results:
        assert not result.tool_calls
        assert not any(mark in result.text for mark in marks)
        assert result.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


async def test_what_is_called_by_choice_is_held_too(client: tuple[str, AsyncClient]) -> None:
    """A random model calls by choice where a bias makes it write the mark; some formats' models
    then call without end, and what their last call lacks is not theirs.
    """
    name, caller = client
    form = FORMATS[name].form
    assert form is not None
    bias = {}
    if not form.text:  # else a call is one way of a few to begin
        begin = form.begun("") if form.bare else form.marks[0]
        bias = {(await caller.tokenize(begin)).token_ids[0 if form.bare else -1]: 6.0}
    results = await asyncio.gather(
        *(
            ask(
                caller,
                tools,
                seed,
                tool_choice=headrace.ToolChoice("auto"),
                logit_bias=bias,
                max_tokens=300,
            )
            for seed, tools in enumerate(groups() * 3)
        )
    )
    whole = [
        call
        for result in results
        for call in result.tool_calls[
            : None if result.finish_reason is FinishReason.TOOL_CALLS else -1
        ]
    ]
    assert whole
    for call in whole:
        VALIDATORS[call.name].validate(json.loads(call.arguments))
