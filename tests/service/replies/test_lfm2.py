"""LFM2's lists of calls as in Python."""

from __future__ import annotations

import json

import pytest

from service.replies import FORMATS, Context
from tests.service.replies.cases import (
    WHOLE_ARGUMENTS,
    Case,
    cases_of_lists,
    check,
    check_truncated,
    check_whole_arguments,
    parse,
)

FORMAT = FORMATS["lfm2"]
TEMPLATES = [
    '{{- "<|tool_call_start|>[" + calls + "]<|tool_call_end|>" -}}',
    "<|tool_list_start|>[{{ tools }}]<|tool_list_end|></think>",
]
OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"


def wrap(*calls: str) -> str:
    return f"{OPEN}[{', '.join(calls)}]{CLOSE}"


def none(id: str, raw: str) -> Case:
    return Case(id, raw, raw)


CALL = wrap("f(a='x')")
CALLED = ("f", '{"a":"x"}')
CASES = [
    *cases_of_lists(OPEN, CLOSE),
    Case("as in Python", CALL, calls=[CALLED]),
    Case("two as in Python", wrap("f(a='x')", "g()"), calls=[CALLED, ("g", "{}")]),
    Case("over lines", f"{OPEN}[\nf(a='x'),\ng()\n]{CLOSE}", calls=[CALLED, ("g", "{}")]),
    Case("no end, as in Python", f"{OPEN}[f(a='x')", calls=[CALLED]),
    Case("text beside it", f"Look.{CALL}Done.", "Look.Done.", calls=[CALLED]),
    Case("a quote within", wrap("f(a='it's')"), calls=[("f", '{"a":"it\'s"}')]),
    Case("a comma behind it", wrap("f(a='x','y', b=1)"), ",'y', b=1)]" + CLOSE,
         calls=[("f", '{"a":"x"', False)]),
    Case("a list", wrap("f(a=['x', 'y'])"), calls=[("f", '{"a":["x", "y"]}')]),
    Case("a list of JSON", wrap('f(a=["x" , 1 ])'), calls=[("f", '{"a":["x" , 1 ]}')]),
    Case("a tuple", wrap("f(a=('x', None,))"), calls=[("f", '{"a":["x", null]}')]),
    Case("a dictionary", wrap("f(a={'x': True, \"y\": [{}]})"),
         calls=[("f", '{"a":{"x": true, "y": [{}]}}')]),
    Case("a list without a comma", wrap("f(a=[1 2])"), f"[1 2])]{CLOSE}",
         calls=[("f", '{"a":', False)]),
    Case("a wrong bracket", wrap("f(a=[1))"), f"[1))]{CLOSE}", calls=[("f", '{"a":', False)]),
    Case("a number as a key", wrap("f(a={1: 2})"), f"{{1: 2}})]{CLOSE}",
         calls=[("f", '{"a":', False)]),
    Case("a set", wrap("f(a={'x'})"), f"{{'x'}})]{CLOSE}", calls=[("f", '{"a":', False)]),
    none("no list of calls", f"{OPEN}[hello]{CLOSE}"),
    none("no list", f"{OPEN}f(a='x'){CLOSE}"),
    Case("the second is none", wrap("f(a='x')", "hello"), f", hello]{CLOSE}", calls=[CALLED]),
    Case("ended in a list", f"{OPEN}[f(a=['x', 'y", "['x', 'y", calls=[("f", '{"a":', False)]),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_reply(case: Case) -> None:
    check(FORMAT, case)


@pytest.mark.parametrize("arguments", WHOLE_ARGUMENTS.values(), ids=WHOLE_ARGUMENTS.keys())
def test_arguments_are_as_they_were_written(arguments: str) -> None:
    def objects(name: str, arguments: str) -> str:
        return wrap(f'{{"name": "{name}", "arguments": {arguments}}}')

    check_whole_arguments(FORMAT, objects, arguments)


def test_a_reply_that_ends_anywhere() -> None:
    raw = f"<think>hm</think>hi{wrap('f(a=[1, True], b=None)', 'g(c=2)')}"
    check_truncated(FORMAT, raw, Context())


@pytest.mark.parametrize("levels", [63, 64])
def test_values_are_nested_as_deeply_as_arguments_may_be(levels: int) -> None:
    raw = wrap(f"f(a={'[' * levels}'x'{']' * levels})")
    whole = parse(FORMAT, [raw])
    assert parse(FORMAT, list(raw)) == whole
    [call] = whole.calls
    assert call.complete == (levels == 63)
    if call.complete:
        assert str(json.loads(call.arguments)["a"]).count("[") == levels
