"""Kimi K2's sections of calls."""

from __future__ import annotations

import pytest

from service.replies import FORMATS, Context
from tests.service.replies.cases import (
    BROKEN_ARGUMENTS,
    WHOLE_ARGUMENTS,
    Case,
    check,
    check_broken_arguments,
    check_truncated,
    check_whole_arguments,
    parse,
)

FORMAT = FORMATS["kimi_k2"]
TEMPLATES = [
    "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|><think>",
    "<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}",
]
CALLS, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def one(id: str, arguments: str) -> str:
    return f"{BEGIN}{id}{ARGUMENTS}{arguments}{END}"


def wrap(name: str, arguments: str) -> str:
    return f"{CALLS}{one(f'functions.{name}:0', arguments)}{CALLS_END}"


ONE, OTHER = one("functions.f:0", '{"a": 1}'), one("functions.g:1", "{}")
CALL = f"{CALLS}{ONE}{CALLS_END}"
CALLED = ("f", '{"a": 1}')


def none(id: str, raw: str) -> Case:
    return Case(id, raw, raw)


CASES = [
    Case("nothing", ""),
    none("text", "Hello <you>: f:0."),
    Case("a call", CALL, calls=[CALLED]),
    Case("two calls", f"{CALLS}{ONE}{OTHER}{CALLS_END}", calls=[CALLED, ("g", "{}")]),
    Case("two sections", f"{CALL}{CALL}", calls=[CALLED, CALLED]),
    Case("no prefix", f"{CALLS}{one('f:3', '{}')}{CALLS_END}", calls=[("f", "{}")]),
    Case("a name with a colon", f"{CALLS}{one('functions.a:b:12', '{}')}", calls=[("a:b", "{}")]),
    Case("a name with dots", f"{CALLS}{one('functions.a.b:0', '{}')}", calls=[("a.b", "{}")]),
    Case("not ASCII", f"{CALLS}{one('functions.größe_水:0', '{}')}", calls=[("größe_水", "{}")]),
    Case(
        "blanks",
        f"{CALLS}\n{BEGIN} functions.f:0 {ARGUMENTS} {{}} {END}\n{CALLS_END}\n",
        calls=[("f", "{}")],
    ),
    Case("no section", ONE, calls=[CALLED]),
    Case("no end of the section", f"{CALLS}{ONE}", calls=[CALLED]),
    Case("no end of a call", f"{CALLS}{ONE[: -len(END)]}", calls=[CALLED]),
    Case("no end of the first", f"{CALLS}{ONE[: -len(END)]}{OTHER}", calls=[CALLED, ("g", "{}")]),
    Case("text before", f"Let me see.\n{CALL}", "Let me see.", calls=[CALLED]),
    Case("text behind", f"{CALL}done", "done", calls=[CALLED]),
    Case("text between", f"{CALL} x {CALL}", "x", calls=[CALLED, CALLED]),
    Case("reasoning", f"<think>hm</think>hi{CALL}", "hi", "hm", [CALLED]),
    Case("no reasoning", f"<think></think>hi{CALL}", "hi", calls=[CALLED]),
    Case("opened by the prompt", f"hm</think>{CALL}", "", "hm", [CALLED], in_reasoning=True),
    Case("calls within reasoning", f"{CALL}</think>hi", "hi", CALL, in_reasoning=True),
    Case("reasoning never closed", "hm", "", "hm", in_reasoning=True),
    Case(
        "marks in arguments",
        wrap("f", f'{{"a": "{END}{CALLS_END}"}}'),
        calls=[("f", f'{{"a": "{END}{CALLS_END}"}}')],
    ),
    none("the first mark alone", CALLS),
    Case("an empty section", f"{CALLS}{CALLS_END}x", "x"),
    none("ends alone", f"a{END}{CALLS_END}b"),
    none("mark begun at the end", "a <|tool_calls_sec"),
    Case("mark begun twice", f"<|tool<|<{CALL}", "<|tool<|<", calls=[CALLED]),
    Case("mark repeated", f"{CALLS}{CALLS}{CALL}", f"{CALLS}{CALLS}", calls=[CALLED]),
    none("text behind the first mark", f"{CALLS}x"),
    none("no number", f"{BEGIN}functions.f{ARGUMENTS}{{}}{END}"),
    none("a number that is none", f"{BEGIN}functions.f:x{ARGUMENTS}{{}}{END}"),
    none("no name", f"{BEGIN}:0{ARGUMENTS}{{}}{END}"),
    none("no arguments' mark", f"{BEGIN}functions.f:0{END}"),
    none("an object as a name", f'{BEGIN}{{"name": "f"}}{END}'),
    none("no arguments", f"{BEGIN}functions.f:0{ARGUMENTS}{END}"),
    none("arguments of another kind", f"{BEGIN}functions.f:0{ARGUMENTS}[1]{END}"),
    none("ended in the name", f"{CALLS}{BEGIN}functions.get_wea"),
    Case(
        "ended in the arguments",
        f'{CALLS}{BEGIN}functions.f:0{ARGUMENTS}{{"a":',
        calls=[("f", '{"a":', False)],
    ),
    Case(
        "broken, then a call",
        wrap("f", '{"a": x}') + CALL,
        f"x}}{END}{CALLS_END}",
        calls=[("f", '{"a": ', False), CALLED],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_reply(case: Case) -> None:
    check(FORMAT, case)


@pytest.mark.parametrize("arguments", WHOLE_ARGUMENTS.values(), ids=WHOLE_ARGUMENTS.keys())
def test_arguments_are_as_they_were_written(arguments: str) -> None:
    check_whole_arguments(FORMAT, wrap, arguments)


@pytest.mark.parametrize("arguments", BROKEN_ARGUMENTS.values(), ids=BROKEN_ARGUMENTS.keys())
def test_what_is_no_json_comes_as_text(arguments: str) -> None:
    check_broken_arguments(FORMAT, wrap, arguments)


def test_a_reply_that_ends_anywhere() -> None:
    check_truncated(FORMAT, f"<think>hm</think>hi{CALLS}{ONE}{OTHER}{CALLS_END}", Context())


def test_calls_have_the_models_ids() -> None:
    raw = f"{CALLS}{one('functions.f:0', '{}')}{one('functions.f:1', '{}')}{ONE}"
    ids = [call.id for call in parse(FORMAT, [raw]).calls]
    assert ids[:2] == ["functions.f:0", "functions.f:1"]
    assert ids[2] not in ids[:2]
