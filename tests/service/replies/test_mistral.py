"""Mistral: an array of calls, and calls by name."""

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

MISTRAL = FORMATS["mistral"]
TEMPLATES = [
    "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]",
    "[TOOL_CALLS]{{ name }}[ARGS]",
    "[TOOL_CALLS]{{ name }}[ARGS]<think></think>",
]


MARK = "[TOOL_CALLS]"


def wrap(name: str, arguments: str) -> str:
    return f"{MARK}{name}[ARGS]{arguments}"


def listed(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


CALL = wrap("f", '{"a": 1}')
ITEM = listed("f", '{"a": 1}')
CALLED = ("f", '{"a": 1}')
CASES = [
    Case("nothing", ""),
    Case("text", "Hello [you].", "Hello [you]."),
    Case("by name", CALL, calls=[CALLED]),
    Case("two by name", CALL + wrap("g", "{}"), calls=[CALLED, ("g", "{}")]),
    Case("with an id", f"{MARK}f[CALL_ID]abcdefghi[ARGS]{{}}", calls=[("f", "{}")]),
    Case("blanks", f"{MARK} f [ARGS] {{}}\n", calls=[("f", "{}")]),
    Case("no mark of arguments", f'{MARK}f{{"a": 1}}', calls=[CALLED]),
    Case("an array of one", f"{MARK}[{ITEM}]", calls=[CALLED]),
    Case("an array of two", f"{MARK} [{ITEM}, {ITEM}]", calls=[CALLED, CALLED]),
    Case("an array, laid out", f"{MARK}[\n  {ITEM},\n  {ITEM}\n]\n", calls=[CALLED, CALLED]),
    Case("an empty array", f"{MARK}[]x", "x"),
    Case("an id behind", f'{MARK}[{ITEM[:-1]}, "id": "abcdefghi"}}]', calls=[CALLED]),
    Case("an id before", f'{MARK}[{{"id": "abcdefghi", {ITEM[1:]}]', calls=[CALLED]),
    Case("arguments first", f'{MARK}[{{"arguments": {{"a": 1}}, "name": "f"}}]', calls=[CALLED]),
    Case("text before", f"Let me see.\n{CALL}", "Let me see.", calls=[CALLED]),
    Case("text behind", f"{CALL} done", "done", calls=[CALLED]),
    Case("text behind an array", f"{MARK}[{ITEM}] done", "done", calls=[CALLED]),
    Case("reasoning", f"[THINK]hm[/THINK]hi{CALL}", "hi", "hm", [CALLED]),
    Case("reasoning opened by the prompt", "hm[/THINK]hi", "hi", "hm", in_reasoning=True),
    Case("other reasoning", "<think>hm</think>", "<think>hm</think>"),
    Case("a mark within reasoning", f"[THINK]{CALL}[/THINK]", "", CALL),
    Case(
        "marks in arguments",
        wrap("f", f'{{"a": "{MARK}[ARGS]]"}}'),
        calls=[("f", f'{{"a": "{MARK}[ARGS]]"}}')],
    ),
    Case("the mark alone", MARK, MARK),
    Case("mark begun at the end", "a [TOOL_", "a [TOOL_"),
    Case("mark begun twice", f"[TOOL_[[TOOL{CALL}", "[TOOL_[[TOOL", calls=[CALLED]),
    Case("mark repeated", f"{MARK}{MARK}{CALL}", f"{MARK}{MARK}", calls=[CALLED]),
    Case("mark mentioned", f"The {MARK} token.", f"The {MARK} token."),
    Case("no name", f"{MARK}[ARGS]{{}}", f"{MARK}[ARGS]{{}}"),
    Case("no arguments", f"{MARK}f[ARGS]x", f"{MARK}f[ARGS]x"),
    Case("an array of something else", f"{MARK}[1, 2]", f"{MARK}[1, 2]"),
    Case("an element that is no call", f"{MARK}[{ITEM}, 7]", ", 7]", calls=[CALLED]),
    Case("the array never closed", f"{MARK}[{ITEM}", calls=[CALLED]),
    Case("something between elements", f"{MARK}[{ITEM} {ITEM}]", f" {ITEM}]", calls=[CALLED]),
    Case("the object never closed", f"{MARK}[{ITEM[:-1]}", calls=[CALLED]),
    Case("ended in the name", f"{MARK}get_wea", f"{MARK}get_wea"),
    Case("ended in the arguments", f'{MARK}f[ARGS]{{"a"', calls=[("f", '{"a"', False)]),
    Case("a strange id", f"{MARK}f[CALL_ID]é é[ARGS]{{}}", calls=[("f", "{}")]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_reply(case: Case) -> None:
    check(MISTRAL, case)


@pytest.mark.parametrize("arguments", WHOLE_ARGUMENTS.values(), ids=WHOLE_ARGUMENTS.keys())
def test_arguments_are_as_they_were_written(arguments: str) -> None:
    check_whole_arguments(MISTRAL, wrap, arguments)


@pytest.mark.parametrize("arguments", BROKEN_ARGUMENTS.values(), ids=BROKEN_ARGUMENTS.keys())
def test_what_is_no_json_comes_as_text(arguments: str) -> None:
    check_broken_arguments(MISTRAL, wrap, arguments)


@pytest.mark.parametrize("arguments", WHOLE_ARGUMENTS.values(), ids=WHOLE_ARGUMENTS.keys())
def test_arguments_in_an_array(arguments: str) -> None:
    check_whole_arguments(MISTRAL, lambda *call: f"{MARK}[{listed(*call)}]", arguments)


def test_ids_are_the_models_where_it_writes_them_once() -> None:
    raw = f"{MARK}f[CALL_ID]abcdefghi[ARGS]{{}}{MARK}f[CALL_ID]abcdefghi[ARGS]{{}}"
    first, second = parse(MISTRAL, [raw]).calls
    assert first.id == "abcdefghi"
    assert second.id != first.id
    assert len(second.id) == 9
    assert second.id.isalnum()
    before = f'{MARK}[{{"id": "123456789", "name": "f", "arguments": {{}}}}]'
    assert parse(MISTRAL, [before]).calls[0].id == "123456789"


def test_a_reply_that_ends_anywhere() -> None:
    raw = f"[THINK]hm[/THINK]\nhi\n{MARK}[{ITEM}, {ITEM}]\n{CALL}"
    check_truncated(MISTRAL, raw, Context())
