"""What holds for each format: its cases, damaged replies, JSON arguments as they are written."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from service.replies import FORMATS, Context, fold, tool_types
from service.replies.json_calls import MAX_CALLS, MAX_PARAMETERS
from service.replies.json_scanner import MAX_DEPTH
from service.replies.reader import MAX_BLANKS, MAX_HELD, MAX_NAME
from service.replies.tool_types import MAX_TYPED
from tests.service.replies.cases import (
    BROKEN_ARGUMENTS,
    WHOLE_ARGUMENTS,
    Case,
    check,
    check_broken_arguments,
    check_divided,
    check_truncated,
    check_whole_arguments,
    deep,
    parse,
)
from tests.service.replies.corpus import CORPORA
from tests.service.replies.corpus import olmo3 as python

EVERY = pytest.mark.parametrize("name", FORMATS)
MIN_CASES = 15
_FALLEN = {"kimi_k2": {"calls within reasoning"}}
"""Cases that come to something else by token: the mark ends reasoning where it is one."""


def cases() -> list[Any]:
    return [
        pytest.param(name, case, id=f"{name}-{case.id}")
        for name, corpus in CORPORA.items()
        for case in corpus.CASES
    ]


def wraps() -> list[Any]:
    return [
        pytest.param(name, wrap, id=f"{name}-{index}")
        for name, corpus in CORPORA.items()
        for index, wrap in enumerate(getattr(corpus, "WRAPS", []))
    ]


@pytest.mark.parametrize(("name", "case"), cases())
def test_a_reply(name: str, case: Case) -> None:
    check(FORMATS[name], case, by_token=case.id not in _FALLEN.get(name, ()))


@EVERY
def test_every_format_has_its_cases(name: str) -> None:
    ids = [case.id for case in CORPORA[name].CASES]
    assert FORMATS[name].name == name
    assert len(ids) >= MIN_CASES
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("arguments", WHOLE_ARGUMENTS.values(), ids=WHOLE_ARGUMENTS.keys())
@pytest.mark.parametrize(("name", "wrap"), wraps())
def test_arguments_are_as_they_were_written(
    name: str, wrap: Callable[[str, str], str], arguments: str
) -> None:
    check_whole_arguments(FORMATS[name], wrap, arguments)


@pytest.mark.parametrize("arguments", BROKEN_ARGUMENTS.values(), ids=BROKEN_ARGUMENTS.keys())
@pytest.mark.parametrize(("name", "wrap"), wraps())
def test_what_is_no_json_comes_as_text(
    name: str, wrap: Callable[[str, str], str], arguments: str
) -> None:
    check_broken_arguments(FORMATS[name], wrap, arguments)


@EVERY
def test_a_reply_that_ends_anywhere(name: str) -> None:
    corpus = CORPORA[name]
    check_truncated(FORMATS[name], corpus.TRUNCATED, Context(getattr(corpus, "TOOLS", {})))


DAMAGES: dict[str, Callable[[str, str], str]] = {
    "cut in the middle": lambda raw, mark: raw[: len(raw) // 2],
    "the beginning lost": lambda raw, mark: raw[len(raw) // 3 :],
    "a bracket more": lambda raw, mark: raw.replace("{", "{{").replace("(", "(("),
    "a bracket less": lambda raw, mark: raw.replace("}", "", 1).replace(")", "", 1),
    "a mark in a string": lambda raw, mark: raw.replace("x", mark).replace('"f"', f'"{mark}"'),
    "other quotes": lambda raw, mark: raw.replace('"', "“"),
    "single quotes": lambda raw, mark: raw.replace('"', "'"),
    "marks doubled": lambda raw, mark: raw.replace(mark, mark * 2),
    "no blanks": lambda raw, mark: raw.replace(" ", "").replace("\n", ""),
    "two at once": lambda raw, mark: "".join(a + b for a, b in zip(raw, raw, strict=True)),
    "in a fence": lambda raw, mark: f"```json\n{raw}\n```",
    "a closing mark lost": lambda raw, mark: raw.replace("</", "<").replace("/", ""),
}


@pytest.mark.parametrize("damage", DAMAGES)
@EVERY
def test_a_damaged_reply_loses_nothing(name: str, damage: str) -> None:
    format, corpus = FORMATS[name], CORPORA[name]
    context = Context(getattr(corpus, "TOOLS", {}), seed="seed")
    for mark in sorted(format.marks)[:6] or [""]:
        raw = DAMAGES[damage](corpus.TRUNCATED, mark or "|")
        check_divided(format, raw, context, parse(format, [raw], context))


# ---- what only some formats have -----------------------------------------------------------------


def test_bounds_of_what_is_held() -> None:
    hermes, corpus = FORMATS["hermes"], CORPORA["hermes"]
    blanks = " " * (MAX_BLANKS + 10)
    assert parse(hermes, [f"a{blanks}{corpus.CALL}"]).text == "a" + " " * 10
    assert parse(hermes, list(f"a{blanks}{corpus.CALL}")).text == "a" + " " * 10
    long = f'<tool_call>{{"x": "{"y" * MAX_HELD}", "name": "f"}}</tool_call>'
    assert parse(hermes, [long]).text == parse(hermes, list(long)).text == long
    name = corpus.wrap("n" * (MAX_NAME + 1), "{}")
    assert parse(hermes, [name]).text == name
    many = parse(hermes, [corpus.CALL * MAX_CALLS + "\n" + corpus.CALL])
    assert len(many.calls) == MAX_CALLS
    assert many.text == corpus.CALL


@pytest.mark.parametrize("name", ["glm", "minimax", "qwen3_coder", "kimi_k3", "olmo3"])
def test_arguments_are_bounded(name: str) -> None:
    corpus = CORPORA[name]

    def written(count: int) -> str:
        if name == "olmo3":
            return python.wrap(f"f({', '.join(f'k{i}=1' for i in range(count))})")
        values = {f"k{i}": "x" for i in range(count)}
        return str(getattr(corpus, "TAGS", corpus).wrap("f", **values))

    [call] = parse(FORMATS[name], [written(MAX_PARAMETERS)]).calls
    assert len(json.loads(call.arguments)) == MAX_PARAMETERS
    [call] = parse(FORMATS[name], [written(MAX_PARAMETERS + 1)]).calls
    assert not call.complete


def test_calls_have_the_models_ids() -> None:
    kimi = CORPORA["kimi_k2"]
    ones = kimi.one("functions.f:0", "{}") + kimi.one("functions.f:1", "{}") + kimi.ONE
    ids = [call.id for call in parse(FORMATS["kimi_k2"], [kimi.CALLS + ones]).calls]
    assert ids[:2] == ["functions.f:0", "functions.f:1"]
    assert ids[2] not in ids[:2]
    mistral, mark = FORMATS["mistral"], CORPORA["mistral"].MARK
    raw = f"{mark}f[CALL_ID]abcdefghi[ARGS]{{}}" * 2
    first, second = parse(mistral, [raw]).calls
    assert first.id == "abcdefghi"
    assert second.id != first.id
    assert len(second.id) == 9
    assert second.id.isalnum()
    before = f'{mark}[{{"id": "123456789", "name": "f", "arguments": {{}}}}]'
    assert parse(mistral, [before]).calls[0].id == "123456789"


def test_a_token_of_its_own_ends_reasoning() -> None:
    kimi, corpus = FORMATS["kimi_k2"], CORPORA["kimi_k2"]
    raw = f"hm{corpus.CALLS}{corpus.ONE}{corpus.CALLS_END}"
    for special in (frozenset[str](), frozenset({corpus.CALLS})):
        parser = kimi.begin(Context(in_reasoning=True, special=special))
        parser.told([2])
        reply = fold([*parser.push(raw), *parser.finish()])
        assert (reply.reasoning == "hm", len(reply.calls)) == (bool(special), len(special))


@pytest.mark.parametrize("arguments", python.WHOLE.values(), ids=python.WHOLE.keys())
def test_values_in_python_are_as_they_were_written(arguments: str) -> None:
    check(FORMATS["olmo3"], python.value("", arguments, arguments))


@pytest.mark.parametrize("name", python.PYTHON)
def test_what_python_writes_becomes_json(name: str) -> None:
    check(FORMATS["olmo3"], python.value("", python.BROKEN[name], python.PYTHON[name]))


@pytest.mark.parametrize(
    "arguments", [text for name, text in python.BROKEN.items() if name not in python.PYTHON]
)
def test_what_is_no_value_in_python_comes_as_text(arguments: str) -> None:
    raw, format = python.wrap(f"f(a={arguments})"), FORMATS["olmo3"]
    whole = parse(format, [raw])
    [call] = whole.calls
    assert not call.complete
    value = call.arguments.removeprefix('{"a":')
    assert arguments.startswith(value)
    assert whole.text == f"{arguments[len(value) :]}){python.CLOSE}"
    check_divided(format, raw, Context(), whole)


def test_a_text_in_python_that_is_too_long_to_hold() -> None:
    long = python.wrap(f"f(a='{'x' * MAX_HELD}')")
    whole = parse(FORMATS["olmo3"], [long])
    assert [call.complete for call in whole.calls] == [False]
    assert parse(FORMATS["olmo3"], [long[:100], long[100:]]) == whole


@pytest.mark.parametrize("levels", [MAX_DEPTH - 1, MAX_DEPTH])
def test_values_are_nested_as_deeply_as_arguments_may_be(levels: int) -> None:
    """The arguments themselves are one level."""
    raw = CORPORA["lfm2"].wrap(f"f(a={'[' * levels}'x'{']' * levels})")
    whole = parse(FORMATS["lfm2"], [raw])
    assert parse(FORMATS["lfm2"], list(raw)) == whole
    [call] = whole.calls
    assert call.complete == (levels < MAX_DEPTH)
    qwen = CORPORA["qwen3_coder"]
    [call] = parse(
        FORMATS["qwen3_coder"], [qwen.wrap("f", o=deep(levels))], Context(qwen.TOOLS)
    ).calls
    kind = dict if levels < MAX_DEPTH else str
    assert isinstance(json.loads(call.arguments)["o"], kind)


def test_a_value_too_long_to_hold_is_a_string() -> None:
    qwen = CORPORA["qwen3_coder"]
    context = Context(qwen.TOOLS)
    numbers = "[" + "1," * (MAX_HELD // 2) + "1]"
    fits = numbers[: MAX_HELD - 2] + "1]"
    for text, kind in ((numbers, str), (fits, list)):
        raw = qwen.wrap("f", l=text)
        whole = parse(FORMATS["qwen3_coder"], [raw], context)
        parts = [raw[start : start + 100] for start in range(0, len(raw), 100)]
        assert parse(FORMATS["qwen3_coder"], parts, context) == whole
        [call] = whole.calls
        assert isinstance(json.loads(call.arguments)["l"], kind)


def test_what_is_kept_of_schemas_is_bounded() -> None:
    assert CORPORA["qwen3_coder"].TOOLS["f"].keys() == {*"snxbolr", "on", "sn"}
    assert tool_types([{"name": "g"}, {}, {"function": 1}, {"function": {"name": 2}}]) == {"g": {}}
    properties = {str(i): {"type": "integer"} for i in range(MAX_TYPED)}
    many = [{"name": name, "parameters": {"properties": properties}} for name in ("a", "b")]
    assert [len(own) for own in tool_types(many).values()] == [MAX_TYPED, 0]
    nested: object = {"type": "integer"}
    for _ in range(50):
        nested = {"anyOf": [nested]}
    kept = tool_types([{"name": "a", "parameters": {"properties": {"x": nested}}}])
    assert kept == {"a": {"x": frozenset({"string"})}}


def test_whether_a_prompt_ends_within_reasoning() -> None:
    think = FORMATS["think"]
    assert think.opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert think.opens_reasoning("<think>")
    assert not think.opens_reasoning("<think>\n\n</think>\n\n")
    assert not think.opens_reasoning("")
    assert FORMATS["mistral"].opens_reasoning("x[THINK]")
    assert FORMATS["apriel"].opens_reasoning("<|a|>\nHere are my reasoning steps:\n")
    assert FORMATS["kimi_k3"].opens_reasoning("<|open|>think<|sep|>")
    assert not FORMATS["harmony"].opens_reasoning("<|start|>assistant")
    assert not FORMATS["functionary_v3_2"].opens_reasoning("x")
    assert FORMATS["gemma4"].closes_reasoning("<|channel>thought\n<channel|>")
